// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/host"
)

// TestDoctor: it fails where a handler gives GPUs without a claim, unless the machine has none.
func TestDoctor(t *testing.T) {
	for name, test := range map[string]struct {
		handlers, device, stdout string
		err                      error
	}{
		"in order": {
			handlers: `{"name": ""}, {"name": "runc"}`, device: "0x030200",
			stdout: "container runtime: /usr/sbin/runc\nhandlers for RuntimeClasses: runc\nContainers have GPUs of this node through claims only.\n",
		},
		"exposed": {
			handlers: `{"name": "nvidia"}`, device: "0x030200", err: errExposed,
			stdout: "container runtime: /usr/sbin/runc\nhandlers for RuntimeClasses: nvidia\nPods can have all GPUs of this node without a claim:",
		},
		"no GPUs": {
			handlers: `{"name": "nvidia"}`, device: "0x020000",
			stdout: "container runtime: not looked for: there are no NVIDIA GPUs\nhandlers for RuntimeClasses: nvidia\nContainers have GPUs of this node through claims only.\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/api/v1/nodes/n1" {
					t.Errorf("asked for %s", r.URL)
				}
				w.Header().Set("Content-Type", "application/json")
				_, _ = fmt.Fprintf(w, `{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "status": {"runtimeHandlers": [%s]}}`, test.handlers)
			}))
			defer server.Close()
			root := t.TempDir()
			for path, content := range map[string]string{
				"kubeconfig": fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "c", "cluster": {"server": %q}}],
					"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`, server.URL),
				"sys/bus/pci/devices/0000:1b:00.0/vendor": "0x10de\n",
				"sys/bus/pci/devices/0000:1b:00.0/class":  test.device + "\n",
				"proc/42/cmdline":                         "/usr/bin/containerd-shim-runc-v2\x00",
				"proc/42/cwd/runtime":                     "/usr/sbin/runc",
				"proc/42/root/etc/hostname":               "n1\n",
			} {
				path = filepath.Join(root, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			proc := filepath.Join(root, "proc")
			c := &config{devRoot: "auto",
				nodeName: "n1", kubeconfig: filepath.Join(root, "kubeconfig"), qps: 5, burst: 5,
				driverRoot: "/", procRoot: proc, sysRoot: filepath.Join(root, "sys"),
			}
			var stdout strings.Builder
			if err := examine(t.Context(), c, proc, 42, &stdout); !errors.Is(err, test.err) {
				t.Errorf("error %v, want %v", err, test.err)
			}
			if !strings.HasPrefix(stdout.String(), test.stdout) {
				t.Errorf("printed %q", stdout.String())
			}
		})
	}
}

// TestStarter: what kubectl exec runs has another parent than the plugin with CRI-O, whose
// runtime waits for it. Without a plugin there is only that one.
func TestStarter(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "d") // t.TempDir's is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	const runtime = 42
	served := filepath.Join(dir, "served")
	listener, err := host.ListenUnix(t.Context(), served)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	for name, test := range map[string]struct {
		socket string
		want   int
	}{
		"the plugin serves": {served, os.Getppid()},
		"no plugin":         {filepath.Join(dir, "other"), runtime},
		"no socket":         {"", runtime},
	} {
		c := &config{devRoot: "auto", process: command.Process{HealthSocket: test.socket}}
		if got := c.starter(t.Context(), runtime); got != test.want {
			t.Errorf("%s: got process %d, want %d", name, got, test.want)
		}
	}
}
