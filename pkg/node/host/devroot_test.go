// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/must"
)

// place makes a folder with device nodes. They have the number of /dev/null, since only
// root can make others.
func place(t *testing.T, onHost string, nodes ...string) DevRoot {
	t.Helper()
	d := DevRoot{Path: t.TempDir(), OnHost: onHost}
	for _, name := range nodes {
		link(t, d.Path, "dev/"+name, "/dev/null")
	}
	return d
}

func TestDevRoots(t *testing.T) {
	host := DevRoot{Path: "/", OnHost: "/"}
	for name, test := range map[string]struct {
		roots Roots
		want  []DevRoot
	}{
		"given":               {Roots{Driver: "/d", Dev: "/e", HostDev: "/x"}, []DevRoot{{"/e", "/x"}}},
		"of this process":     {Roots{}, []DevRoot{host}},
		"driver on the host":  {Roots{Driver: "/driver-root", Dev: AutoDev, HostDriver: "/"}, []DevRoot{host}},
		"driver in container": {Roots{Driver: "/driver-root", Dev: AutoDev, HostDriver: "/run/nvidia/driver"}, []DevRoot{{"/driver-root", "/run/nvidia/driver"}, host}},
		"outside containers":  {Roots{Driver: "/run/nvidia/driver", Dev: AutoDev}, []DevRoot{{"/run/nvidia/driver", "/run/nvidia/driver"}, host}},
	} {
		if diff := cmp.Diff(test.want, test.roots.devRoots()); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
}

func TestMostComplete(t *testing.T) {
	const inContainer, onHost = "/run/nvidia/driver", "/"
	all := []string{"nvidiactl", "nvidia-uvm", "nvidia0"}
	byItself := []string{"nvidiactl", "nvidia0"} // what libnvidia-ml makes
	for name, test := range map[string]struct {
		driver, host []string
		want         string
	}{
		"driver container":                     {all, byItself, inContainer},
		"driver container, host driver before": {all, all, inContainer},
		"driver container without devices":     {nil, all, onHost},
		"driver container that starts":         {byItself, nil, inContainer},
		"driver container is gone":             {nil, byItself, onHost},
		"none":                                 {nil, nil, inContainer},
	} {
		if got := byCompleteness([]DevRoot{place(t, inContainer, test.driver...), place(t, onHost, test.host...)})[0]; got.OnHost != test.want {
			t.Errorf("%s: got %s, want %s", name, got.OnHost, test.want)
		}
	}
}

// TestNodeAuto: it is decided for each look, so a driver container may come later.
func TestNodeAuto(t *testing.T) {
	driver := t.TempDir()
	roots := Roots{Driver: driver, Dev: AutoDev, HostDriver: "/run/nvidia/driver"}
	_, err := roots.Node("/dev/nvidia-uvm-of-no-machine")
	if !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{
		"the device node nvidia-uvm-of-no-machine is neither in /run/nvidia/driver/dev nor in /dev", "nvidia-modprobe -u -c=0", "GPU Operator",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
	// What the driver root lacks may be on the host.
	if node, err := roots.Node("/dev/null"); err != nil || node.Root.OnHost != "/" || node.Major != 1 || node.Minor != 3 {
		t.Errorf("got %+v, %v", node, err)
	}
	for _, path := range append(RequiredNodes(), "/dev/null") {
		link(t, driver, path, "/dev/null")
	}
	if got := roots.DevRoot(); got != (DevRoot{driver, "/run/nvidia/driver"}) || got.Folder() != "/run/nvidia/driver/dev" {
		t.Errorf("the nodes are in %+v", got)
	}
	if node, err := roots.Node("/dev/null"); err != nil || node.Root.Path != driver {
		t.Errorf("got %+v, %v", node, err)
	}
	must.Do(t, errors.Join(os.Remove(filepath.Join(driver, "dev/null")), os.Mkdir(filepath.Join(driver, "dev/null"), 0o755)))
	if _, err := roots.Node("/dev/null"); !errors.Is(err, ErrNotCharDevice) {
		t.Errorf("a folder: got %v", err)
	}
}

func TestMissingNode(t *testing.T) {
	for path, want := range map[string]string{
		"/dev/nvidiactl":        "the device node nvidiactl is not in /x/dev on this node (file does not exist): nvidia-modprobe -c=0, nvidia-smi",
		"/dev/nvidia12":         "the device node nvidia12 is not in /x/dev on this node (file does not exist): nvidia-modprobe -c=12, nvidia-smi",
		"/dev/nvidia-uvm-tools": "the device node nvidia-uvm-tools is not in /x/dev on this node (file does not exist): nvidia-modprobe -u -c=0",
	} {
		_, err := Roots{Dev: t.TempDir(), HostDev: "/x"}.Node(path)
		if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}
