// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/test/flow/fakeapi"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

const (
	driverName = "gpu.nvidia.com"
	nodeName   = "node-1"
)

// node is one simulated machine with the directories of a kubelet and an API
// server, without a driver at first.
type node struct {
	api *fakeapi.Server
	// root holds the machine; the others are what their flags say.
	root, kubeconfig, cdi, plugins, registrar, mps string

	state *state.File
}

// newNode makes a machine of the catalogue, changed by change.
func newNode(t testing.TB, machineName string, change ...func(*machine.Machine)) *node {
	t.Helper()
	// Socket paths have little room; t.TempDir() would use most of it.
	dir, err := os.MkdirTemp("", "f")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// MPS servers may run as any user.
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	n := &node{
		api:       fakeapi.New(t),
		root:      filepath.Join(dir, "root"),
		cdi:       filepath.Join(dir, "cdi"),
		plugins:   filepath.Join(dir, "plugins"),
		registrar: filepath.Join(dir, "reg"),
		mps:       filepath.Join(dir, "mps"),
	}
	t.Cleanup(func() {
		if err := n.endMPS(); err != nil {
			t.Error(err)
		}
	})
	for _, path := range []string{n.cdi, n.plugins, n.registrar, n.mps} {
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	n.api.AddNode(nodeName)
	n.kubeconfig = n.api.Kubeconfig(t, dir)

	m, err := catalog.Machine(machineName, catalog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(m)
	}
	err = sysroot.Create(n.root, m, built.assets)
	if errors.Is(err, unix.EPERM) {
		t.Skipf("a simulated machine needs device nodes: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	n.state, err = state.Open(sysroot.StatePath(n.root))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A call that the simulator answers with "not supported" because it
		// does not know it would make these tests say little.
		if calls, err := n.state.Unmodelled(); err != nil || len(calls) > 0 {
			t.Errorf("calls of NVML functions that the simulator does not model: %v, %v", calls, err)
		}
		n.state.Close()
	})
	return n
}

func (n *node) machine(t testing.TB) *machine.Machine {
	t.Helper()
	m, err := n.state.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// instances are all live GPU instances of the machine.
func (n *node) instances(t testing.TB) []machine.GPUInstance {
	t.Helper()
	var all []machine.GPUInstance
	for _, g := range n.machine(t).GPUs {
		if g.MIG != nil {
			all = append(all, g.MIG.Instances...)
		}
	}
	return all
}

// migMode is the mode of every GPU in the order of the machine.
func (n *node) migMode(t testing.TB) []bool {
	t.Helper()
	var modes []bool
	for _, g := range n.machine(t).GPUs {
		modes = append(modes, g.MIG != nil && g.MIG.Current)
	}
	return modes
}

// cdiSpecs are the names of the claims' CDI files.
func (n *node) cdiSpecs(t testing.TB) []string { return list(t, n.cdi) }

// journal lists what is written down about claims.
func (n *node) journal(t testing.TB) []string {
	return list(t, filepath.Join(n.plugins, driverName, "claims"))
}

// list is the content of a directory; one that is absent is empty.
func list(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// wantClean fails unless nothing at all is left of any claim.
func (n *node) wantClean(t testing.TB) {
	t.Helper()
	if left := n.instances(t); len(left) > 0 {
		t.Errorf("GPU instances are left: %+v", left)
	}
	if left := n.cdiSpecs(t); len(left) > 0 {
		t.Errorf("CDI files are left: %v", left)
	}
	if left := n.journal(t); len(left) > 0 {
		t.Errorf("journal files are left: %v", left)
	}
}

// wantClaims fails unless exactly these claims have one CDI file and one journal
// file each.
func (n *node) wantClaims(t testing.TB, uids ...types.UID) {
	t.Helper()
	for what, files := range map[string][]string{"CDI": n.cdiSpecs(t), "journal": n.journal(t)} {
		if len(files) != len(uids) {
			t.Errorf("%s files are %v, want one for each of %v", what, files, uids)
		}
		for _, uid := range uids {
			if !slices.ContainsFunc(files, func(f string) bool { return strings.Contains(f, string(uid)) }) {
				t.Errorf("%s files are %v, none is of claim %s", what, files, uid)
			}
		}
	}
}

// device returns the name of the published device with this profile ("" for the
// whole GPU) and start on GPU number index, in the order of PCI addresses.
func (n *node) device(t testing.TB, index int, profile string, start int) string {
	t.Helper()
	return deviceName(n.machine(t).GPUs[index].PCIAddress, place{profile, start})
}

// deviceName is the name of the published device.
func deviceName(pciAddress string, at place) string {
	name := "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(pciAddress)
	if at.profile == "" {
		return name
	}
	return name + "-mig-" + profileText.Replace(at.profile) + "-" + itoa(at.start)
}

// profileText makes "1g24gb-me-all" of "1g.24gb+me.all", and "1g24gb-no-me" of
// "1g.24gb-me".
var profileText = strings.NewReplacer("-", "-no-", "+", "-", ".all", "-all", ".", "")
