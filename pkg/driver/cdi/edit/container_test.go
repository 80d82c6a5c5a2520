// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"debug/elf"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/test/must"
)

// TestContainer puts devices into a container as a runtime does, with the CDI library
// and the hooks: a container either has exactly the limits of its devices, or it is
// refused.
func TestContainer(t *testing.T) {
	dir := must.Get(os.MkdirTemp("/tmp", "edit"))(t) // t.TempDir's is too long for a socket
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	self := must.Get(process.Identify(os.Getpid()))(t)
	write(t, filepath.Join(dir, "s1/session.json"), fmt.Sprintf(`{"daemon": {"pid": %d, "start": %d}}`, self.PID, self.Start))
	listener, err := net.Listen("unixpacket", filepath.Join(dir, "s1/control"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })

	whole := func(uid, name string) Edit { return Direct{Device: name, Owner: uid + "/" + name} }
	client := func(session, owner string) MPSClient {
		return MPSClient{Session: session, PipeDir: filepath.Join(dir, session), ShmDir: dir, Hook: hookAt, Owner: owner}
	}
	limited := func(uid, request, name string, memory int64) Interposer {
		i := Interposer{
			Library: library(t, dir), Folder: filepath.Join(dir, uid), Hook: hookAt,
			Device: name, Owner: uid + "/" + request, MemoryBytes: memory,
		}
		write(t, i.PreloadPath(), PreloadText)
		return i
	}
	const memory = "CUDA_DEVICE_MEMORY_LIMIT="
	for name, test := range map[string]struct {
		env   []string // the pod's
		edits []Edit
		want  []string // variables of the container
		err   string
	}{
		"one limited share": {edits: []Edit{limited("u1", "r0", "gpu-b", 1<<30)}, want: []string{memory + "1024m"}},
		// The claim has more devices, this container does not.
		"one limited share of several": {edits: []Edit{limited("u1", "r1", "gpu-b", 2<<30)}, want: []string{memory + "2048m"}},
		"limited share and a GPU of its claim": {
			edits: []Edit{limited("u1", "r0", "gpu-b", 1<<30), whole("u1", "gpu-a")}, err: "gpu-b with limits in software and also gpu-a",
		},
		"limited shares of two claims": {
			edits: []Edit{limited("u1", "r0", "gpu-a", 20<<30), limited("u2", "r0", "gpu-b", 1<<30)}, err: "2 shares with limits in software, gpu-a, gpu-b",
		},
		"limited shares of two requests": {
			edits: []Edit{limited("u1", "r0", "gpu-a", 1<<30), limited("u1", "r1", "gpu-b", 1<<30)}, err: "2 shares with limits in software",
		},
		"limited shares of one request": {
			edits: []Edit{limited("u1", "r0", "gpu-a", 1<<30), limited("u1", "r0", "gpu-b", 1<<30)}, want: []string{memory + "1024m"},
		},
		"different limits in one request": {
			edits: []Edit{limited("u1", "r0", "gpu-a", 1<<30), limited("u1", "r0", "gpu-b", 2<<30)}, err: "2 shares with limits in software",
		},
		"limits of the pod": {
			env: []string{memory + "99g", "CUDA_DEVICE_MEMORY_SHARED_CACHE=/x"}, edits: []Edit{limited("u1", "r0", "gpu-b", 1<<30)},
			want: []string{memory + "1024m", "CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/caches/gpu-b/usage.cache"},
		},
		"numbered limits of the pod": {
			env: []string{"CUDA_DEVICE_MEMORY_LIMIT_0=99g"}, edits: []Edit{limited("u1", "r0", "gpu-b", 1<<30)}, err: "CUDA_DEVICE_MEMORY_LIMIT_0=99g",
		},
		"MPS share":           {edits: []Edit{client("s1", "u1/a")}, want: []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"}},
		"GPUs of one session": {edits: []Edit{client("s1", "u1/s1"), client("s1", "u1/s1")}},
		"MPS share and a GPU": {edits: []Edit{client("s1", "u1/a"), whole("u2", "gpu-b")}, err: "client of the MPS session s1 and also has gpu-b"},
		"two MPS shares":      {edits: []Edit{client("s1", "u1/a"), client("s1", "u2/a")}, err: "2 MPS shares"},
		"MPS share and a limited share": {
			edits: []Edit{client("s1", "u1/a"), limited("u2", "r0", "gpu-b", 1<<30)}, err: "client of the MPS session s1 and also has gpu-b",
		},
		"GPUs": {edits: []Edit{whole("u1", "gpu-a"), whole("u1", "gpu-b"), whole("u2", "gpu-c")}},
	} {
		t.Run(name, func(t *testing.T) {
			var edits cdi.Edits
			container := &oci.Spec{Process: &oci.Process{Env: test.env}}
			for i, e := range test.edits {
				device := must.Get(Device(fmt.Sprint("device", i), e))(t)
				edits.Append(device.Edits)
				inject(t, container, device)
			}
			err := start(t, container, edits.Hooks)
			if test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) || test.err == "" && err != nil {
				t.Fatalf("the hooks say %v, want %q", err, test.err)
			}
			for _, want := range test.want {
				if !slices.Contains(container.Process.Env, want) {
					t.Errorf("the container lacks %s: %q", want, container.Process.Env)
				}
			}
		})
	}
}

// library makes a file that is a library by its header.
func library(t *testing.T, dir string) (path string) {
	t.Helper()
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]
	header := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_DYN), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT),
	}
	var b strings.Builder
	must.Do(t, binary.Write(&b, binary.LittleEndian, header))
	path = filepath.Join(dir, "libhami-2.so")
	write(t, path, b.String())
	return path
}

// inject adds a device to a container as a runtime does.
func inject(t *testing.T, container *oci.Spec, device cdi.Device) {
	t.Helper()
	edits := &specs.ContainerEdits{Env: device.Env}
	for _, m := range device.Mounts {
		edits.Mounts = append(edits.Mounts, &specs.Mount{HostPath: m.HostPath, ContainerPath: m.ContainerPath})
	}
	must.Do(t, (&cdiapi.ContainerEdits{ContainerEdits: edits}).Apply(container))
}

// start runs the hooks of a container.
func start(t *testing.T, container *oci.Spec, hooks []cdi.Hook) error {
	t.Helper()
	bundle := t.TempDir()
	config := must.Get(json.Marshal(container))(t)
	write(t, filepath.Join(bundle, "config.json"), string(config))
	for _, h := range hooks {
		if err := hook.Run(t.Context(), h.Args[1:], strings.NewReader(fmt.Sprintf(`{"bundle": %q}`, bundle))); err != nil {
			return err
		}
	}
	return nil
}
