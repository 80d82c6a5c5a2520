// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/claim/rules"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/gpu"
)

var (
	addressA0 = partition.Address{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}
	addressA4 = partition.Address{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}}
)

func mustPrepare(t *testing.T, m *Manager, claim *resourceapi.ResourceClaim) []LiveDevice {
	t.Helper()
	prepared, err := m.Prepare(t.Context(), claim)
	if err != nil {
		t.Fatalf("prepare %s: %v", claim.Name, err)
	}
	return prepared
}

// told is what the kubelet learns of devices.
func told(devices []LiveDevice) []LiveDevice {
	for i, d := range devices {
		devices[i] = LiveDevice{Requests: d.Requests, Pool: d.Pool, Device: d.Device, ShareID: d.ShareID, CDIDevice: d.CDIDevice}
	}
	return devices
}

func mustUnprepare(t *testing.T, m *Manager, uid types.UID) {
	t.Helper()
	if err := m.Unprepare(t.Context(), uid); err != nil {
		t.Fatalf("unprepare %s: %v", uid, err)
	}
}

func mustReconcile(t *testing.T, m *Manager) {
	t.Helper()
	if err := reconcile(t, m); err != nil {
		t.Errorf("reconcile: %v", err)
	}
}

// reconcile asks the API server about all claims, whenever their turn would be, and then
// cleans up.
func reconcile(t *testing.T, m *Manager) error {
	t.Helper()
	var errs []error
	m.orphans.next()
	for _, r := range m.store.Snapshot().All() {
		if r.State == record.Prepared {
			_, err := m.orphans.check(t.Context(), r)
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, m.cleanUp(t.Context()))...)
}

// cleanUp does everything that is due, and returns what is left.
func (m *Manager) cleanUp(ctx context.Context) error {
	_, err := m.Reconcile(ctx)
	return err
}

// cleanUpGPU is cleanUp for one of them.
func (m *Manager) cleanUpGPU(ctx context.Context, pciAddress string) error {
	return m.convergeGPU(ctx, pciAddress, func(*rules.Task) bool { return true }).left
}

// nothing is due.
func nothing(*rules.Task) bool { return false }

// survey is what Reconcile says without doing anything.
func survey(ctx context.Context, m *Manager) device.Status {
	status, _ := m.converge(ctx, nothing)
	return status
}

// claims are those that have a record.
func (m *Manager) claims() (uids []types.UID) {
	for _, r := range m.store.Snapshot().All() {
		uids = append(uids, r.Claim.UID)
	}
	return uids
}

// recordPath is the file of a claim's record, whose name is another where a file cannot be read.
func recordPath(m *Manager, uid types.UID) string {
	paths, _ := filepath.Glob(m.store.Path(uid) + "*")
	return slices.Max(append(paths, ""))
}

// recordText is what it says.
func recordText(t *testing.T, m *Manager, uid types.UID) string {
	t.Helper()
	data, err := os.ReadFile(recordPath(m, uid))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func wantError(t *testing.T, err error, want ...string) {
	t.Helper()
	for _, w := range want {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("got %v, want %q", err, w)
		}
	}
}

func TestPrepare(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	claim := newClaim("u1", wholeC, sliceA4, sliceA0)
	want := []LiveDevice{
		{Requests: []string{"r2"}, Pool: poolName, Device: sliceA0, CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + sliceA0},
		{Requests: []string{"r1"}, Pool: poolName, Device: sliceA4, CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + sliceA4},
		{Requests: []string{"r0"}, Pool: poolName, Device: wholeC, CDIDevice: "k8s.gpu.nvidia.com/claim=u1-" + wholeC},
	}
	if diff := cmp.Diff(want, told(mustPrepare(t, m, claim))); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	node := func(path string, major, minor int64) cdi.Node {
		return cdi.Node{Path: path, HostPath: "/host" + path, Major: major, Minor: minor}
	}
	// All GPU nodes of the test machine are 1:3. Instances are numbered from 7,
	// and UUIDs use up numbers as well.
	wantSpec := []cdi.Device{
		{Name: sliceA0, Edits: cdi.Edits{Env: []string{"PARTAGE_GPU_a8b2f356=" + sliceA0}, Nodes: []cdi.Node{
			node("/dev/nvidia2", 1, 3), node("/dev/nvidia-caps/nvidia-cap170", 508, 170), node("/dev/nvidia-caps/nvidia-cap171", 508, 171),
		}}},
		{Name: sliceA4, Edits: cdi.Edits{Env: []string{"PARTAGE_GPU_f90e891d=" + sliceA4}, Nodes: []cdi.Node{
			node("/dev/nvidia2", 1, 3), node("/dev/nvidia-caps/nvidia-cap190", 508, 190), node("/dev/nvidia-caps/nvidia-cap191", 508, 191),
		}}},
		{Name: wholeC, Edits: cdi.Edits{Env: []string{"PARTAGE_GPU_e887e0ee=" + wholeC}, Nodes: []cdi.Node{node("/dev/nvidia1", 1, 3)}}},
	}
	if diff := cmp.Diff(wantSpec, b.specs["u1"]); diff != "" {
		t.Errorf("spec: -want +got:\n%s", diff)
	}
	wantEffects := []string{
		"write preparing", "mode on", "create instance", "create compute instance", "create instance", "create compute instance",
		"write spec", "write prepared",
	}
	// What is intended on each GPU is written before it is done.
	effects := slices.DeleteFunc(slices.Clone(b.effects[1:]), func(e string) bool { return e == "mark preparing" })
	if diff := cmp.Diff(wantEffects, append(b.effects[:1:1], effects...)); diff != "" {
		t.Errorf("effects: -want +got:\n%s", diff)
	}

	// Once more, and by another process: the same answer, and nothing is done but to note when.
	for name, again := range map[string]*Manager{"same": m, "other": b.manager()} {
		b.hooks(nil, nil)
		if diff := cmp.Diff(want, told(mustPrepare(t, again, claim))); diff != "" {
			t.Errorf("%s process, again: -want +got:\n%s", name, diff)
		}
		if diff := cmp.Diff([]string{"write spec", "mark prepared"}, b.effects); diff != "" {
			t.Errorf("%s process, effects again: -want +got:\n%s", name, diff)
		}
	}

	b.hooks(nil, nil)
	mustUnprepare(t, b.bareManager(), "u1") // the record alone is enough
	b.wantNothing()
	wantEffects = []string{"destroy compute instance", "destroy instance", "destroy compute instance", "destroy instance", "mode off"}
	if diff := cmp.Diff(wantEffects, b.onHardware()); diff != "" {
		t.Errorf("effects of unprepare: -want +got:\n%s", diff)
	}
	first, last := b.effects[:2], b.effects[len(b.effects)-1:]
	if !slices.Equal(first, []string{"mark releasing", "remove spec"}) || !slices.Equal(last, []string{"mark released"}) {
		t.Errorf("effects of unprepare: %q", b.effects)
	}
	mustUnprepare(t, m, "u1")
	mustUnprepare(t, m, "never-heard-of")
	b.wantNothing()
}

func TestPrepareNothingOfOurs(t *testing.T) {
	b := newBox(t)
	prepared, err := b.manager().Prepare(t.Context(), newClaim("u1"))
	if err != nil || prepared != nil {
		t.Errorf("got %v, %v", prepared, err)
	}
	b.wantNothing()
}

func TestPrepareRefuses(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0, "gpu-0000-ff-00-0"))
	wantError(t, err, "gpu-0000-ff-00-0")
	_, err = m.Prepare(t.Context(), configure(newClaim("u1", wholeA), fromClaim, gpuBad))
	wantError(t, err, "sharing.strategy")
	_, err = m.Prepare(t.Context(), newClaim("../../u1", wholeA))
	wantError(t, err, "claim UID")
	if err := m.Unprepare(t.Context(), "../u1"); err == nil {
		t.Error("a path was taken for a UID")
	}
	_, err = b.bareManager().Prepare(t.Context(), newClaim("u1", wholeA))
	if !errors.Is(err, gpu.ErrDriverNotLoaded) {
		t.Errorf("without inventory: got %v", err)
	}
	// A GPU without its device node.
	if err := os.Remove(filepath.Join(b.root, "dev/nvidia2")); err != nil {
		t.Fatal(err)
	}
	_, err = m.Prepare(t.Context(), newClaim("u1", sliceA0))
	wantError(t, err, "device "+sliceA0, "nvidia2")
	b.wantNothing()
}

func TestPartitionDisappeared(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	before := b.specs["u1"]
	b.removeForeign(addressA0)
	mustPrepare(t, m, newClaim("u1", sliceA0))
	if diff := cmp.Diff(before, b.specs["u1"]); diff == "" {
		t.Error("the spec still names the capabilities of the old instance")
	}
	r, err := m.store.Read("u1")
	if err != nil {
		t.Fatal(err)
	}
	if live, _ := b.look(addressA0); *r.Devices[0].Partition.Made != live {
		t.Errorf("journal says %+v, live is %+v", r.Devices[0].Partition.Made, live)
	}
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}

// A claim that is prepared is not undone when looking after it fails: its
// containers may be running.
func TestVerifyFails(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("u1", sliceA0))
	before := b.state()
	b.hooks(failAt("write spec"), nil)
	_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
	wantError(t, err, errFault.Error())
	b.hooks(nil, nil)
	if diff := cmp.Diff(before, b.state()); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
}

var errFault = errors.New("injected fault")

func failAt(effect string) func(string) error {
	return func(e string) error {
		if e == effect {
			return errFault
		}
		return nil
	}
}

func TestNewManagerRefuses(t *testing.T) {
	b := newBox(t)
	good := b.options()
	for name, change := range map[string]func(*Options){
		"driver":   func(o *Options) { o.DriverName = "" },
		"pool":     func(o *Options) { o.PoolName = "" },
		"relative": func(o *Options) { o.DataDir = "data" },
		"hardware": func(o *Options) { o.Partitions = nil },
		"sharing":  func(o *Options) { o.Sharing = nil },
		"cdi":      func(o *Options) { o.Specs.CDI = nil },
		"calls":    func(o *Options) { o.Calls = nil },
		"users":    func(o *Options) { o.Users = nil },
		"events":   func(o *Options) { o.Events = nil },
		"cluster":  func(o *Options) { o.Cluster = nil },
		"pods":     func(o *Options) { o.Pods = nil },
	} {
		o := good
		change(&o)
		if _, err := NewManager(o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	write(t, filepath.Join(b.root, "file"), "")
	good.DataDir = filepath.Join(b.root, "file")
	if _, err := NewManager(good); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
