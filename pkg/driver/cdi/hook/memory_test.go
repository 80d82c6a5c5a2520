// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/test/must"
)

const mib = 1 << 20

// plugin answers on a socket, and returns what it was asked for.
func plugin(t *testing.T, folder, name string, answer MemoryAnswer) <-chan MemoryLimit {
	t.Helper()
	listener := must.Get(net.Listen("unix", filepath.Join(folder, name)))(t)
	t.Cleanup(func() { _ = listener.Close() })
	asked := make(chan MemoryLimit, 9)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			var limit MemoryLimit
			if json.NewDecoder(conn).Decode(&limit) == nil {
				asked <- limit
				_ = json.NewEncoder(conn).Encode(answer)
			}
			_ = conn.Close()
		}
	}()
	return asked
}

// sockets is a folder whose path is short enough.
func sockets(t *testing.T) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("/tmp", "memory"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func stateOf(bundle string, pid int) *strings.Reader {
	return strings.NewReader(fmt.Sprintf(`{"bundle": %q, "pid": %d}`, bundle, pid))
}

func TestLimitMemory(t *testing.T) {
	share := MemoryLimit{PCIAddress: "0000:1b:00.0", UUID: "GPU-a", Soft: 512 * mib, Hard: 1024 * mib}
	const marker = "PARTAGE_MEMORY_12ab34cd=0000:1b:00.0"
	for name, test := range map[string]struct {
		env        []string
		noProcess  bool
		answer     string
		soft, hard uint64 // MiB that the driver is asked for
		want       string // in the error
	}{
		"a share":                   {env: []string{marker}, soft: 512, hard: 1024},
		"less by a variable":        {env: []string{"NVIDIA_GPU_MEMORY_LIMIT=300"}, soft: 300, hard: 300},
		"a request below the limit": {env: []string{"NVIDIA_GPU_MEMORY_REQUEST=100", "NVIDIA_GPU_MEMORY_LIMIT=300"}, soft: 100, hard: 300},
		"a request alone":           {env: []string{"NVIDIA_GPU_MEMORY_REQUEST=100"}, soft: 100, hard: 1024},
		"more by variables":         {env: []string{"NVIDIA_GPU_MEMORY_REQUEST=9999", "NVIDIA_GPU_MEMORY_LIMIT=17592186044415"}, soft: 512, hard: 1024},
		"no number":                 {env: []string{"NVIDIA_GPU_MEMORY_LIMIT=all\x1b"}, want: `"NVIDIA_GPU_MEMORY_LIMIT=all\x1b": want a number of MiB`},
		"nothing at all":            {env: []string{"NVIDIA_GPU_MEMORY_LIMIT=0"}, want: `"NVIDIA_GPU_MEMORY_LIMIT=0": want a number of MiB`},
		"nothing is kept":           {env: []string{"NVIDIA_GPU_MEMORY_REQUEST=0"}, soft: 0, hard: 1024},
		"too large a number":        {env: []string{"NVIDIA_GPU_MEMORY_LIMIT=17592186044416"}, want: "want a number of MiB"},
		"a share of another GPU":    {env: []string{marker, "PARTAGE_MEMORY_ffffffff=0000:43:00.0"}, soft: 512, hard: 1024},
		"another share of the GPU":  {env: []string{marker, "PARTAGE_MEMORY_ffffffff=0000:1b:00.0"}, want: "several shares of one GPU"},
		"no process":                {noProcess: true, want: "does not tell the container's process"},
		"not limited":               {answer: "Not Supported", soft: 512, hard: 1024, want: "does not limit this container to 1024 MiB of GPU 0000:1b:00.0, so it would run without its limit: Not Supported"},
	} {
		t.Run(name, func(t *testing.T) {
			folder := sockets(t)
			asked := plugin(t, folder, "4711.sock", MemoryAnswer{Error: test.answer})
			pid := 7
			if test.noProcess {
				pid = 0
			}
			err := LimitMemory(t.Context(), stateOf(bundleWith(t, nil, test.env...), pid), folder, share)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			want := MemoryLimit{PID: 7, PCIAddress: share.PCIAddress, UUID: share.UUID, Soft: test.soft * mib, Hard: test.hard * mib}
			select {
			case got := <-asked:
				if got != want {
					t.Errorf("asked for %+v, want %+v", got, want)
				}
			default:
				if test.hard > 0 {
					t.Error("nobody was asked")
				}
			}
		})
	}
}

// A process that was killed leaves its socket behind, and the next one has another.
func TestLimitMemoryAfterKill(t *testing.T) {
	folder := sockets(t)
	dead := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(folder, "9999.sock"), Net: "unix"}))(t)
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	asked := plugin(t, folder, "1.sock", MemoryAnswer{})
	if err := LimitMemory(t.Context(), stateOf(bundleWith(t, nil), 7), folder, MemoryLimit{Soft: mib, Hard: mib}); err != nil {
		t.Error(err)
	}
	if got := <-asked; got.PID != 7 {
		t.Errorf("asked for %+v", got)
	}
}

// Without a plugin the container is refused, after a while that is shorter than what a hook has.
func TestLimitMemoryWithoutPlugin(t *testing.T) {
	folder, bundle := sockets(t), bundleWith(t, nil)
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		err := LimitMemory(t.Context(), stateOf(bundle, 7), folder, MemoryLimit{Soft: mib, Hard: mib})
		if err == nil || !strings.Contains(err.Error(), "the driver's plugin cannot be reached in "+folder) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(began); took < pluginTime || took+MemoryTime > 50*time.Second {
			t.Errorf("after %s", took)
		}
	})
}
