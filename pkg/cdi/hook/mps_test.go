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
	"time"
)

// bundle makes what a runtime makes for a container with these variables.
func bundle(t *testing.T, env ...string) string {
	t.Helper()
	return bundleWith(t, nil, env...)
}

func bundleWith(t *testing.T, mounts []mount, env ...string) string {
	t.Helper()
	dir := t.TempDir()
	config := map[string]any{
		"ociVersion": "1.2.1",
		"process":    map[string]any{"terminal": false, "args": []string{"sh"}, "env": append([]string{"PATH=/bin"}, env...), "cwd": "/"},
		"root":       map[string]any{"path": "rootfs"},
		"mounts":     append([]mount{{"proc", "/proc"}}, mounts...),
	}
	data, err := json.Marshal(config)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// input is what runc and crun write to a hook.
func input(bundle string) string {
	return fmt.Sprintf(`{"ociVersion":"1.2.1","id":"c0ffee","status":"creating","pid":4711,"bundle":%q,"annotations":{"a":"b"}}`, bundle)
}

func listen(t *testing.T, network string) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hook") // t.TempDir's may be too long
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "control")
	if network == "" {
		return path
	}
	listener, err := net.Listen(network, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	return path
}

func TestMPSClient(t *testing.T) {
	for name, test := range map[string]struct {
		env     []string
		network string
		want    []string // in the error; none if it is empty
	}{
		"reached":             {[]string{"PARTAGE_MPS_12ab34cd=gpu-0"}, "unixpacket", nil},
		"by a stream":         {[]string{"PARTAGE_MPS_12ab34cd=gpu-0"}, "unix", nil},
		"the same twice":      {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_MPS_12ab34cd=gpu-0"}, "unixpacket", nil},
		"without a marker":    {nil, "unixpacket", nil},
		"two of one GPU":      {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_MPS_ffffffff=gpu-0"}, "unixpacket", []string{"2 MPS shares, of gpu-0:", "one MPS share only", "with the sum"}},
		"and a GPU":           {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_GPU_12ab34cd=gpu-1"}, "unixpacket", []string{"client of the MPS session gpu-0", "also has gpu-1:", "different containers"}},
		"and a limited share": {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_LIMITS_12ab34cd=gpu-1", "PARTAGE_GPU_12ab34cd=gpu-2"}, "unixpacket", []string{"also has gpu-1, gpu-2:"}},
		"two GPUs":            {[]string{"PARTAGE_MPS_12ab34cd=gpu-1", "PARTAGE_MPS_ffffffff=gpu-0"}, "unixpacket", []string{"of gpu-0, gpu-1:"}},
		"no daemon":           {[]string{"PARTAGE_MPS_12ab34cd=gpu-0"}, "", []string{"session gpu-0 cannot be reached", "/control", "without its limits", "mps-supervisor"}},
		"two, no daemon":      {[]string{"PARTAGE_MPS_12ab34cd=gpu-1", "PARTAGE_MPS_ffffffff=gpu-0"}, "", []string{"one MPS share only"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := CheckMPSClient(t.Context(), strings.NewReader(input(bundle(t, test.env...))), listen(t, test.network), "gpu-0")
			if len(test.want) == 0 && err != nil {
				t.Errorf("got %v", err)
			}
			for _, want := range test.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q", err, want)
				}
			}
		})
	}
}

// TestComesBack: a daemon that has just ended is given time.
func TestComesBack(t *testing.T) {
	path := listen(t, "")
	listeners := make(chan net.Listener, 1)
	time.AfterFunc(restartTime/8, func() {
		listener, err := net.Listen("unixpacket", path)
		if err != nil {
			t.Error(err)
		}
		listeners <- listener
	})
	if err := CheckMPSClient(t.Context(), strings.NewReader(input(bundle(t))), path, "gpu-0"); err != nil {
		t.Error(err)
	}
	_ = (<-listeners).Close()
}

func TestBadInput(t *testing.T) {
	broken, noProcess := t.TempDir(), t.TempDir()
	for path, content := range map[string]string{broken: "{", noProcess: `{"ociVersion":"1.2.1"}`} {
		if err := os.WriteFile(filepath.Join(path, "config.json"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	control := listen(t, "unixpacket")
	for name, test := range map[string]struct{ input, want string }{
		"nothing":           {"", "container's state"},
		"not JSON":          {"hello", "container's state"},
		"no bundle":         {`{"id":"a"}`, `bundle ""`},
		"a relative bundle": {input("b"), `bundle "b"`},
		"no configuration":  {input(t.TempDir()), "config.json"},
		"half of one":       {input(broken), broken},
		"no process":        {input(noProcess), "no process"},
	} {
		if err := CheckMPSClient(t.Context(), strings.NewReader(test.input), control, "gpu-0"); err == nil ||
			!strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "gpu-0") {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}
