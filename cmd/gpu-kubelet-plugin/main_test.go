// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/node/host"
)

// TestBadFlags: every wrong flag ends the program with one line that names the
// flag, its value and what would be right.
func TestBadFlags(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// A run that starts with these has only the mistakes that a test adds.
	good := []string{
		"--node-name=n", "--kubelet-plugins-dir=" + dir, "--kubelet-registrar-dir=" + dir, "--nvidia-cdi-hook=" + os.Args[0],
		"--partage-hook=" + os.Args[0],
	}
	for _, test := range []struct {
		args []string
		want []string
	}{
		{[]string{"--node-name="}, []string{`--node-name (NODE_NAME) is "": want`}},
		{[]string{"--node-name=Node_1"}, []string{`--node-name (NODE_NAME) is "Node_1": want the name of a Node`}},
		{[]string{"--kubeconfig=/does/not/exist"}, []string{`--kubeconfig (KUBECONFIG) is "/does/not/exist": want a file that exists`}},
		{[]string{"--kube-api-qps=0"}, []string{`--kube-api-qps (KUBE_API_QPS) is "0": want more than 0`}},
		{[]string{"--kube-api-burst=0"}, []string{`--kube-api-burst (KUBE_API_BURST) is "0": want 1 or more`}},
		{[]string{"--driver-root=usr"}, []string{`--driver-root (DRIVER_ROOT) is "usr": want an absolute path`}},
		{[]string{"--driver-root=" + file}, []string{`--driver-root (DRIVER_ROOT) is "` + file + `": want a directory`}},
		{[]string{"--dev-root=dev"}, []string{`--dev-root (DEV_ROOT) is "dev": want auto or an absolute path`}},
		{[]string{"--proc-root=/does/not/exist"}, []string{`--proc-root (PROC_ROOT) is "/does/not/exist": want a directory that exists`}},
		{[]string{"--sys-root="}, []string{`--sys-root (SYS_ROOT) is "": want an absolute path`}},
		{[]string{"--host-driver-root=x"}, []string{`--host-driver-root (HOST_DRIVER_ROOT) is "x": want`}},
		{[]string{"--host-dev-root=x"}, []string{`--host-dev-root (HOST_DEV_ROOT) is "x": want`}},
		{[]string{"--host-dev-root=/"}, []string{`--host-dev-root (HOST_DEV_ROOT) is "/": want nothing, since --dev-root is auto`}},
		{[]string{"--cdi-root=x"}, []string{`--cdi-root (CDI_ROOT) is "x": want an absolute path`}},
		{[]string{"--nvidia-cdi-hook=" + file}, []string{`--nvidia-cdi-hook (NVIDIA_CDI_HOOK) is "` + file + `": want a program`}},
		{[]string{"--partage-hook=/does/not/exist"}, []string{`--partage-hook (PARTAGE_HOOK) is "/does/not/exist": want a program`}},
		{[]string{"--mps-dir=" + file}, []string{`--mps-dir (MPS_DIR) is "` + file + `": want a directory`}},
		{[]string{"--pod-logs-dir=logs"}, []string{`--pod-logs-dir (POD_LOGS_DIR) is "logs": want an absolute path`}},
		{[]string{"--ignored-namespaces=a,b_c"}, []string{`--ignored-namespaces (IGNORED_NAMESPACES) is "a,b_c": want names of namespaces`}},
		{[]string{"--annotation-namespaces=A"}, []string{`--annotation-namespaces (ANNOTATION_NAMESPACES) is "A": want names of namespaces`}},
		{[]string{"--pod-namespace=a/b"}, []string{`--pod-namespace (POD_NAMESPACE) is "a/b": want the name of a namespace`}},
		{[]string{"--policy-file=policy.yaml"}, []string{`--policy-file (POLICY_FILE) is "policy.yaml": want an absolute path`}},
		{[]string{"--interposer-library=lib.so"}, []string{`--interposer-library (INTERPOSER_LIBRARY) is "lib.so": want an absolute path`}},
		{[]string{"--kubelet-plugins-dir=/does/not/exist"}, []string{"--kubelet-plugins-dir (KUBELET_PLUGINS_DIR)"}},
		{[]string{"--kubelet-registrar-dir=/does/not/exist"}, []string{"--kubelet-registrar-dir (KUBELET_REGISTRAR_DIR)"}},
		{[]string{"--pod-uid=a/b"}, []string{`--pod-uid (POD_UID) is "a/b": want a UID`}},
		{[]string{"--health-socket=health.sock"}, []string{`--health-socket (HEALTH_SOCKET) is "health.sock": want an absolute path`}},
		{[]string{"--nvml-call-limit=0s"}, []string{`--nvml-call-limit (NVML_CALL_LIMIT) is "0s": want a time from 10s to 10m0s`}},
		{[]string{"--nvml-call-limit=11m"}, []string{`--nvml-call-limit (NVML_CALL_LIMIT) is "11m0s": want a time from 10s to 10m0s`}},
		{[]string{"--poll-interval=-1s"}, []string{`--poll-interval (POLL_INTERVAL) is "-1s": want a time from 50ms to 1h0m0s`}},
		{[]string{"--poll-interval=10"}, []string{"poll-interval", `"10"`}},
		{[]string{"--orphan-grace=0s"}, []string{`--orphan-grace (ORPHAN_GRACE) is "0s": want a time from`}},
		{[]string{"--policy-spread=-1s"}, []string{`--policy-spread (POLICY_SPREAD) is "-1s": want a time from 0s to 1h0m0s`}},
		{[]string{"--claim-check-interval=25h"}, []string{`--claim-check-interval (CLAIM_CHECK_INTERVAL) is "25h0m0s": want a time from`}},
		{[]string{"--node-labels=true"}, []string{`--node-labels (NODE_LABELS) is "true": want Never, Write or Remove`}},
		{[]string{"-v=-1"}, []string{`--v (LOG_LEVEL) is "-1": want 0 or more`}},
		{[]string{"--logging-format=xml"}, []string{`--logging-format (LOGGING_FORMAT) is "xml": want text or json`}},
		{[]string{"--health-socket=x", "--kube-api-burst=-1"}, []string{"HEALTH_SOCKET", "KUBE_API_BURST"}},
		{[]string{"--no-such-flag"}, []string{"no-such-flag"}},
		{[]string{"start"}, []string{`unknown command "start"`}},
		{[]string{"slices", "all"}, []string{"slices takes no argument"}},
		{[]string{"slices", "--node-name=Node_1"}, []string{"--node-name (NODE_NAME)"}},
		{[]string{"slices", "--driver-root=" + dir, "--policy-file=" + file}, []string{"sharing policy " + file + ": invalid SharingPolicy: is empty"}},
		{[]string{"claims-in-use", "--kubeconfig=/does/not/exist"}, []string{`--kubeconfig (KUBECONFIG) is "/does/not/exist"`}},
		{[]string{"slices", "--driver-root=" + dir}, []string{"NVIDIA driver is not loaded", dir}},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			var stdout, stderr strings.Builder
			code := run(append(append([]string{name}, good...), test.args...), &stdout, &stderr)
			if code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			got := stderr.String()
			for _, want := range test.want {
				if !strings.Contains(got, want) {
					t.Errorf("stderr lacks %q:\n%s", want, got)
				}
			}
			if strings.Count(got, "\n") != 1 || stdout.Len() > 0 {
				t.Errorf("want one line on stderr and nothing else, got:\n%s%s", got, stdout.String())
			}
		})
	}
}

func TestFlagsFromEnvironment(t *testing.T) {
	t.Setenv("KUBE_API_BURST", "-1")
	t.Setenv("NODE_NAME", "Node_1")
	var stdout, stderr strings.Builder
	if code := run([]string{name}, &stdout, &stderr); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	for _, want := range []string{`--node-name (NODE_NAME) is "Node_1"`, `--kube-api-burst (KUBE_API_BURST) is "-1"`} {
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("stderr lacks %q:\n%s", want, stderr.String())
		}
	}
}

func TestVersion(t *testing.T) {
	var stdout, stderr strings.Builder
	if code := run([]string{name, "version"}, &stdout, &stderr); code != 0 || strings.Count(stdout.String(), "\n") != 1 {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout.String(), stderr.String())
	}
}

func TestRoots(t *testing.T) {
	for name, test := range map[string]struct {
		config config
		want   host.Roots
	}{
		"automatic": {
			config{driverRoot: "/d", devRoot: "auto", procRoot: "/proc", sysRoot: "/sys"},
			host.Roots{Driver: "/d", Dev: host.AutoDev, Proc: "/proc", Sys: "/sys", HostDriver: "/d", PodLogs: "/var/log/pods"},
		},
		"seen from a container": {
			config{driverRoot: "/d", devRoot: "auto", procRoot: "/proc", sysRoot: "/sys", hostDriverRoot: "/run/driver"},
			host.Roots{Driver: "/d", Dev: host.AutoDev, Proc: "/proc", Sys: "/sys", HostDriver: "/run/driver", PodLogs: "/var/log/pods"},
		},
		"devices given": {
			config{driverRoot: "/a", devRoot: "/b", procRoot: "/c", sysRoot: "/d"},
			host.Roots{Driver: "/a", Dev: "/b", Proc: "/c", Sys: "/d", HostDriver: "/a", HostDev: "/b", PodLogs: "/var/log/pods"},
		},
		"all given": {
			config{driverRoot: "/a", devRoot: "/b", procRoot: "/c", sysRoot: "/d", hostDriverRoot: "/e", hostDevRoot: "/f", podLogs: "/g"},
			host.Roots{Driver: "/a", Dev: "/b", Proc: "/c", Sys: "/d", HostDriver: "/e", HostDev: "/f", PodLogs: "/g"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := test.config.roots(); got != test.want {
				t.Errorf("%+v, want %+v", got, test.want)
			}
		})
	}
}

// TestDriverRootOnHost: people do not know the paths of the container.
func TestDriverRootOnHost(t *testing.T) {
	for name, test := range map[string]struct {
		onHost string
		says   string
	}{
		"another path":  {"/run/nvidia/driver", "is /run/nvidia/driver on the host"},
		"the same path": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := &config{driverRoot: t.TempDir(), hostDriverRoot: test.onHost, sysRoot: t.TempDir()}
			roots := c.roots()
			h := &hardware{Client: nvml.New(nvml.Options{Roots: roots}), roots: roots}
			err := h.Open(t.Context())
			if !errors.Is(err, gpu.ErrDriverNotLoaded) {
				t.Fatalf("got %v", err)
			}
			if got := strings.Contains(err.Error(), "on the host"); got != (test.says != "") || !strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want it to say %q", err, test.says)
			}
		})
	}
}

// TestNoGPUs: a node without GPUs needs no driver, one with GPUs does.
func TestNoGPUs(t *testing.T) {
	root := t.TempDir()
	c := &config{driverRoot: root, sysRoot: root}
	h := &hardware{Client: nvml.New(nvml.Options{Roots: c.roots()}), roots: c.roots()}
	devices := filepath.Join(root, "bus/pci/devices")
	open := func() error { t.Helper(); return h.Open(t.Context()) }

	if err := open(); !errors.Is(err, gpu.ErrDriverNotLoaded) {
		t.Errorf("without a PCI bus: got %v", err)
	}
	if err := os.MkdirAll(devices, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := open(); err != nil {
		t.Errorf("without a GPU: %v", err)
	}
	if node, err := h.Discover(t.Context()); err != nil || len(node.GPUs) != 0 {
		t.Errorf("without a GPU: discovered %v, %v", node, err)
	}
	for name, value := range map[string]string{"vendor": "0x10de\n", "class": "0x030200\n"} {
		file := filepath.Join(devices, "0000:1b:00.0", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o750), os.WriteFile(file, []byte(value), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := open(); !errors.Is(err, gpu.ErrDriverNotLoaded) {
		t.Errorf("with a GPU and without a driver: got %v", err)
	}
	if _, err := h.Discover(t.Context()); !errors.Is(err, gpu.ErrDriverNotLoaded) {
		t.Errorf("with a GPU and without a driver: discovered, %v", err)
	}
}
