// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

// driverRoot adds to a machine what every container needs of the driver.
func driverRoot(t *testing.T, roots host.Roots) host.Roots {
	t.Helper()
	roots.Driver, roots.HostDriver = roots.Dev, "/"
	for _, name := range []string{"libcuda.so", "libnvidia-ml.so"} {
		path := filepath.Join(roots.Driver, "usr/lib64", name)
		write(t, path+".580.95.05", "not a library")
		must.Do(t, os.Symlink(name+".580.95.05", path+".1"))
	}
	for i, name := range []string{"nvidiactl", "nvidia-uvm"} {
		path := filepath.Join(roots.Dev, "dev", name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(195, uint32(255-i)))); err != nil {
			t.Skipf("cannot make device nodes: %v", err)
		}
	}
	return roots
}

// TestEveryHookIsConfined: no hook of any claim, be it ours or NVIDIA's, takes over the
// environment of a container or may hang for ever.
func TestEveryHookIsConfined(t *testing.T) {
	t.Setenv("PATH", "/usr/bin:/bin")
	roots := driverRoot(t, machine(t))
	gpu, partition := GPU{roots, address}, Partition{roots, address, 7, 0}
	client := MPSClient{Session: "gpu-a", PipeDir: "/mps/a/pipe", ShmDir: "/mps/a/shm", Hook: hookAt, Owner: "u1/a"}
	limitedClient := client
	limitedClient.ActiveThreadPercentage, limitedClient.PinnedMemoryBytes = 30, 10<<30
	limited := Interposer{Library: "/opt/l.so", Folder: "/limits/u1", Device: "a", Hook: hookAt, Owner: "u1/r0", MemoryBytes: 1 << 30}
	kinds := map[string]struct {
		edits []Edit
		hooks int
	}{
		"whole GPU or its turns":       {[]Edit{gpu, Direct{"a", "u1/a"}}, 0},
		"partition":                    {[]Edit{partition, Direct{"a", "u1/a"}}, 0},
		"observer":                     {[]Edit{gpu, Monitor{roots}}, 0},
		"MPS share of a GPU":           {[]Edit{gpu, limitedClient}, 1},
		"MPS share of a partition":     {[]Edit{partition, limitedClient}, 1},
		"MPS within a claim":           {[]Edit{gpu, client}, 1},
		"limited share of a GPU":       {[]Edit{gpu, limited}, 1},
		"limited share of a partition": {[]Edit{partition, limited}, 1},
	}
	folder := t.TempDir()
	s := must.Get(cdi.New(cdi.Options{Root: folder, Roots: roots, HookPath: "/data/hooks/nvidia-cdi-hook-12ab"}))(t)
	device := func(name, kind string) cdi.Device {
		t.Helper()
		return must.Get(Device(name, kinds[kind].edits...))(t)
	}
	cases := 0
	for one := range kinds {
		for other := range kinds {
			cases++
			uid := types.UID(fmt.Sprint("claim-", cases))
			must.Get(s.Write(t.Context(), uid, []cdi.Device{device("gpu-a", one), device("gpu-b", other)}))(t)
			data := must.Get(os.ReadFile(filepath.Join(folder, "k8s.gpu.nvidia.com-claim_"+string(uid)+".json")))(t)
			ours, nvidias := confined(t, one+" and "+other, data)
			if want := kinds[one].hooks + kinds[other].hooks; ours != want || nvidias < 2 {
				t.Errorf("%s and %s: got %d hooks of ours and %d of NVIDIA's, want %d and some", one, other, ours, nvidias, want)
			}
		}
	}
	if want := len(kinds) * len(kinds); cases != want || cases < 60 {
		t.Errorf("looked at %d cases, want %d", cases, want)
	}
	programs, err := s.HookPrograms()
	if err != nil || len(programs) != 2 || !programs[hookAt] || !programs["/data/hooks/nvidia-cdi-hook-12ab"] {
		t.Errorf("the specs name %v, %v", programs, err)
	}
}

// confined fails unless all hooks of a spec have an environment and a time limit, and
// counts them.
func confined(t *testing.T, what string, data []byte) (ours, nvidias int) {
	t.Helper()
	var spec specs.Spec
	must.Do(t, json.Unmarshal(data, &spec))
	hooks := spec.ContainerEdits.Hooks
	nvidias = len(hooks)
	for _, d := range spec.Devices {
		hooks = append(hooks, d.ContainerEdits.Hooks...)
	}
	for _, h := range hooks {
		if h.Timeout == nil || *h.Timeout < 10 || *h.Timeout > 100 {
			t.Errorf("%s: %v may take %v seconds", what, h.Args, h.Timeout)
		}
		if !slices.ContainsFunc(h.Env, func(v string) bool { return strings.HasPrefix(v, "PATH=/") }) {
			t.Errorf("%s: %v has the environment %q", what, h.Args, h.Env)
		}
	}
	return len(hooks) - nvidias, nvidias
}
