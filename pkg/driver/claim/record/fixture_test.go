// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/claimtest"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

const (
	pciA, pciB = claimtest.PCIA, claimtest.PCIB
	// uid, boot and life are those of nearly all tests.
	uid  types.UID = "u1"
	boot           = "boot-1"
	life           = CallLife
)

// example has every kind of device and every field.
func example() *Record {
	r := &Record{Claim: Ref{Namespace: "team-a", Name: "train", UID: uid}, BootID: boot, State: Prepared, Arrived: 42 * time.Second}
	add(r, Device{
		Requests: []string{"gpu", "gpu/first"}, Pool: "node-1", Device: "gpu-0000-1b-00-0-mig-1g10gb-4", Type: device.Partition,
		PCIAddress: pciA, DynamicMIG: true, Divisible: true, Mark: Started, CDIDevice: "k8s.gpu.nvidia.com/claim=u1-0",
		Partition: &Partition{
			Profile: "1g.10gb", Place: Place{ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}},
			Made: &gpu.PartitionID{InstanceID: 9, ComputeID: 0, UUID: "MIG-1"},
		},
	})
	add(r, Device{
		Requests: []string{"static"}, Pool: "node-1", Device: "gpu-0000-1b-00-0-mig-1g10gb-5", Type: Static,
		PCIAddress: pciA, Divisible: true, Mark: Lost, Partition: &Partition{Profile: "1g.10gb", Place: Place{ProfileID: 19, Placement: gpu.Placement{Start: 5, Size: 1}}},
	})
	add(r, Device{
		Requests: []string{"share"}, Pool: "node-1", Device: "gpu-0000-3b-00-0-mps", ShareID: ptr.To(types.UID("s1")), Type: device.MPS,
		PCIAddress: pciB, Mark: Started, Sharing: &Sharing{
			UUID: "GPU-1", Session: "gpu-0000-3b-00-0-mps", Limits: Limits{Percent: 25, MemoryBytes: 10 << 30}, Interval: "Long", Limited: true,
			OnClientKilled: policy.KilledRestart, ClientPriority: policy.PriorityBelowNormal,
		},
	})
	add(r, Device{Requests: []string{"watch"}, Pool: "node-1", Device: "gpu-0000-3b-00-0", Type: device.Whole, PCIAddress: pciB, Admin: true})
	r.Sessions = []Session{{
		ID: "gpu-0000-3b-00-0-mps", Shared: true, MultiUser: true, Percent: 50,
		Devices:        []SessionDevice{{Device: "gpu-0000-3b-00-0-mps", PCIAddress: pciB, UUID: "GPU-1", MemoryBytes: 1 << 30}},
		ClientPriority: policy.PriorityBelowNormal, PipeDir: "/run/mps/1/pipe", ShmDir: "/run/mps/1/shm", Losses: 3, Kills: 4,
	}}
	return r
}

// pair is a record of a claim with a partition on each of two GPUs, of which nothing is there.
func pair(arrived time.Duration) *Record {
	r := &Record{Claim: Ref{Namespace: "team-a", Name: "train", UID: uid}, BootID: boot, State: Preparing, Arrived: arrived}
	for i, address := range []string{pciA, pciB} {
		add(r, Device{
			Requests: []string{"r"}, Pool: "node-1", Device: fmt.Sprintf("part-%d", i), Type: device.Partition, PCIAddress: address,
			Partition: &Partition{Profile: "1g.10gb", Place: Place{ProfileID: 19, Placement: gpu.Placement{Start: 4, Size: 1}}},
		})
	}
	return r
}

// put writes a record, whatever there was.
func put(s *Store, r *Record) error {
	return s.Put(r, func(now *Record) error { *now = *r.Clone(); return nil })
}

// cleared notes that nothing is left on a GPU, or on any.
func cleared(s *Store, pciAddress string) error {
	return s.Clear(uid, pciAddress)
}

// started marks all devices.
func started(r *Record) error {
	for i := range r.Devices {
		r.Devices[i].Mark = Started
	}
	return nil
}

// prepared writes what is not in the head as well.
func prepared(r *Record) error {
	r.State = Prepared
	r.Devices[0].Partition.Made = &gpu.PartitionID{InstanceID: 9, UUID: "MIG-1"}
	return nil
}

func open(t *testing.T, dir string, files Files) *Store {
	t.Helper()
	return must.Get(Open(dir, boot, files))(t)
}

// view says in one line what a process knows of the claim.
func view(s *Store) string {
	var parts []string
	all := s.Snapshot()
	for _, r := range all.Records {
		text := fmt.Sprintf("%s %d ", r.State, r.Arrived)
		for i := range r.Devices {
			text += marks[r.Devices[i].Mark : r.Devices[i].Mark+1]
		}
		if r.Devices[0].Partition.Made != nil {
			text += " made"
		}
		parts = append(parts, text)
	}
	for _, r := range all.Earlier {
		parts = append(parts, fmt.Sprintf("earlier %s %s", r.BootID, r.State))
	}
	for _, g := range all.Guards {
		released := ""
		if g.Released {
			released = "released "
		}
		text := strings.TrimSpace(fmt.Sprintf("%sguard %s", released, strings.Join(g.GPUs, ",")))
		if len(g.Cleared) > 0 {
			text += " but " + strings.Join(g.Cleared, ",")
		}
		parts = append(parts, text)
	}
	known, unlock, _ := s.open(false, uid)
	defer unlock()
	if at := known[uid].at; at > 0 {
		parts = append(parts, fmt.Sprintf("released %d", at))
	}
	return strings.Join(parts, "; ")
}

// wantView fails unless a process knows this of the claim.
func wantView(t *testing.T, when, want string, s *Store) {
	t.Helper()
	expect.Same(t, view(s), want, when)
}

// step is something that is written.
type step struct {
	name string
	do   func(*Store) error
	// want is the view afterwards.
	want string
	// inPlace is for what needs no space, and kept for what stays in memory.
	inPlace, kept bool
}

func release(arrived time.Duration) func(*Store) error {
	return func(s *Store) error {
		_, err := s.Release(uid, arrived)
		return err
	}
}

// steps are the life of a claim that is prepared again, with a record that is damaged in between.
func steps() []step {
	damaged := "guard " + pciA + "," + pciB
	return []step{
		{"save", func(s *Store) error { return put(s, pair(1)) }, "preparing 1 --", false, false},
		{"start", func(s *Store) error { return s.Put(pair(9), started) }, "preparing 1 ++", true, false},
		{"prepared", func(s *Store) error { return s.Update(uid, prepared) }, "prepared 1 ++ made", false, false},
		{"prepared again", func(s *Store) error {
			return s.Update(uid, func(r *Record) error { r.Arrived = 2; return nil })
		}, "prepared 2 ++ made", true, false},
		{"late release", release(1), "prepared 2 ++ made; released 1", true, true},
		{"release", release(3), "releasing 2 ++ made; released 3", true, true},
		{"clear one", func(s *Store) error { return cleared(s, pciA) }, "releasing 2 -+ made; released 3", true, false},
		{"clear", func(s *Store) error { return cleared(s, pciB) }, "released 3", true, false},
		{"save again", func(s *Store) error { return put(s, pair(4)) }, "preparing 4 --; released 3", false, false},
		{"start again", func(s *Store) error { return s.Update(uid, started) }, "preparing 4 ++; released 3", true, false},
		{"damage", damage, damaged + "; released 3", true, false},
		{"release what is damaged", release(5), "released " + damaged + "; released 5", false, true},
		{"save over it", func(s *Store) error { return put(s, pair(6)) }, "preparing 6 --; " + damaged + "; released 5", false, false},
		{"start once more", func(s *Store) error { return s.Update(uid, started) }, "preparing 6 ++; " + damaged + "; released 5", true, false},
		{"drop the guard", func(s *Store) error { return s.DropGuards(uid) }, "preparing 6 ++; released 5", true, false},
		{"undo", func(s *Store) error { return cleared(s, "") }, "released 5", true, false},
		{"sweep", func(s *Store) error { return s.Sweep(5 + life) }, "", true, false},
		{"save the last", func(s *Store) error { return s.Put(pair(7), started) }, "preparing 7 ++", false, false},
		{"undo the last", func(s *Store) error { return cleared(s, "") }, "", true, false},
		{"release nothing", release(8), "released 8", false, true},
	}
}

// damage changes the last byte of the body.
func damage(s *Store) error {
	data, err := os.ReadFile(s.Path(uid))
	if err != nil {
		return err
	}
	data[len(data)-3] ^= 1
	return os.WriteFile(s.Path(uid), data, 0o600)
}

// faulty fails, or its process is killed, at a call that changes something.
type faulty struct {
	OS
	// strike decides by the number of the call and whether it needs space. Nil is for no fault.
	strike func(call int, space bool) error
	// after is the number of a call that has its effect all the same.
	after, calls int
}

func (f *faulty) call(op, path string, space bool, do func() error) error {
	f.calls++
	var err error
	if f.strike != nil {
		if err = f.strike(f.calls, space); err != nil {
			err = &fs.PathError{Op: op, Path: path, Err: err}
		}
	}
	if err != nil && f.after != f.calls {
		if space { // what a killed process leaves
			_ = os.WriteFile(filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp"), []byte("part"), 0o600)
		}
		return err
	}
	if doErr := do(); err == nil {
		return doErr
	}
	return err
}

func (f *faulty) Replace(path string, data []byte) error {
	return f.call("write", path, true, func() error { return f.OS.Replace(path, data) })
}

func (f *faulty) WriteHead(path string, data []byte) error {
	return f.call("write", path, false, func() error { return f.OS.WriteHead(path, data) })
}

func (f *faulty) Remove(path string) error {
	return f.call("unlink", path, false, func() error { return f.OS.Remove(path) })
}

// faults are what disks do.
var faults = map[string]struct {
	err error
	// space means that only what needs space fails.
	space bool
}{
	"full": {unix.ENOSPC, true}, "read-only": {unix.EROFS, false}, "broken": {unix.EIO, false},
}

func add(r *Record, d Device) { r.Devices = append(r.Devices, d) }
