// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/fakeapi"
	"github.com/partage-dev/partage/test/gpusim/catalog"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// Names of the driver and of its node.
const (
	DriverName = "gpu.nvidia.com"
	NodeName   = "node-1"
)

// Node is one simulated machine with the directories of a kubelet and an API
// server, without a driver at first.
type Node struct {
	Cluster
	GPUs
	Files
	MPSFolder

	// Kubeconfig, RegistrarDir and PodResources are what the driver's flags say. The last is a
	// socket where nobody listens unless the test does.
	Kubeconfig, RegistrarDir, PodResources string
}

// Cluster is what the test plays of one.
type Cluster struct {
	API *fakeapi.Server
}

// GPUs are the simulated machine.
type GPUs struct {
	// Root is the root of its file system.
	Root  string
	State *state.File
}

// Files are the folders in which the driver writes down what claims have.
type Files struct {
	CDIDir, PluginsDir string
}

// MPSFolder is the folder of the MPS supervisor.
type MPSFolder struct {
	MPSDir string
}

// NewNode makes a node with a machine of the catalogue, changed by change, until the
// test ends.
func NewNode(t testing.TB, machineName string, change ...func(*machine.Machine)) *Node {
	t.Helper()
	return newNode(t, machineName, sysroot.Create, change)
}

// NewNodeInContainer is NewNode for a machine whose driver is in a container, with its
// device nodes.
func NewNodeInContainer(t testing.TB, machineName string) *Node {
	t.Helper()
	return newNode(t, machineName, sysroot.CreateInContainer, nil)
}

type createMachine func(root string, m *machine.Machine, a sysroot.Assets) error

func newNode(t testing.TB, machineName string, create createMachine, change []func(*machine.Machine)) *Node {
	t.Helper()
	keepOutOfCache(t)
	// Socket paths have little room; t.TempDir() would use most of it.
	dir, err := os.MkdirTemp("", "f")
	must.Do(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// MPS servers may run as any user.
	must.Do(t, os.Chmod(dir, 0o755))
	n := &Node{
		Cluster:      Cluster{API: fakeapi.New(t)},
		GPUs:         GPUs{Root: filepath.Join(dir, "root")},
		Files:        Files{CDIDir: filepath.Join(dir, "cdi"), PluginsDir: filepath.Join(dir, "plugins")},
		MPSFolder:    MPSFolder{MPSDir: filepath.Join(dir, "mps")},
		RegistrarDir: filepath.Join(dir, "reg"), PodResources: filepath.Join(dir, "pods.sock"),
	}
	t.Cleanup(func() {
		expect.Do(t, n.endMPS())
	})
	for _, path := range []string{n.CDIDir, n.PluginsDir, n.RegistrarDir, n.MPSDir} {
		must.Do(t, os.Mkdir(path, 0o700))
	}
	must.Do(t, os.WriteFile(n.DefaultPolicy(), []byte(everythingPolicy), 0o600))
	n.API.AddNode(NodeName)
	n.Kubeconfig = n.API.Kubeconfig(t, dir)

	m, err := catalog.Machine(machineName, catalog.Options{})
	must.Do(t, err)
	for _, f := range change {
		f(m)
	}
	err = create(n.Root, m, Built.Assets)
	if errors.Is(err, unix.EPERM) {
		t.Skipf("a simulated machine needs device nodes: %v", err)
	}
	must.Do(t, err)
	n.State, err = state.Open(sysroot.StatePath(n.Root))
	must.Do(t, err)
	t.Cleanup(func() {
		// A call that the simulator answers with "not supported" because it
		// does not know it would make these tests say little.
		expect.Len(t, must.Get(n.State.Unmodelled())(t), 0, "calls of NVML functions that the simulator does not model")
		n.State.Close()
	})
	return n
}

// DefaultPolicy is the SharingPolicy of a driver whose flags name no other one.
func (n *Node) DefaultPolicy() string { return filepath.Join(filepath.Dir(n.Root), "everything.yaml") }

// DriverRoot is the folder with the files of the NVIDIA driver.
func (n *GPUs) DriverRoot() string { return sysroot.DriverRoot(n.Root) }

// CDISpecs are the names of the CDI files of claims.
func (n *Files) CDISpecs(t testing.TB) []string { return List(t, n.CDIDir) }

// List lists a directory, which is empty if it does not exist.
func List(t testing.TB, dir string) []string {
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

// WantClean fails unless nothing at all is left of any claim.
func (n *Node) WantClean(t testing.TB) {
	t.Helper()
	expect.Len(t, n.Instances(t), 0, "GPU instances are left")
	expect.Len(t, n.CDISpecs(t), 0, "CDI files are left")
	expect.Len(t, n.Records(t), 0, "records are left")
}
