// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// soakRecords are the records by claim.
type soakRecords map[string]*harness.Record

// readRecords reads them while the driver works on them.
func readRecords(n *harness.Node) (soakRecords, error) {
	entries, err := os.ReadDir(n.RecordsDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	all := soakRecords{}
	for _, e := range entries {
		uid, _, _ := strings.Cut(e.Name(), ".")
		if uid == "" {
			continue // what becomes a record
		}
		r, err := n.Record(uid)
		if err != nil {
			return nil, err
		}
		if r != nil {
			all[uid] = r
		}
	}
	return all, nil
}

// strangers reports whether the journal has other claims that use one of the GPUs of these
// and that the kubelet does not hold.
func (s *soak) strangers(claims []*soakClaim) (bool, error) {
	all, err := readRecords(s.n)
	if err != nil {
		return false, err
	}
	m := s.machine
	for uid, record := range all {
		known := slices.ContainsFunc(s.claims, func(c *soakClaim) bool {
			return c.GetUid() == uid && (c.held || slices.Contains(claims, c))
		})
		for _, d := range record.Devices {
			used := slices.ContainsFunc(claims, func(c *soakClaim) bool {
				return slices.ContainsFunc(c.Devices, func(r harness.Device) bool { return m.GPUs[r.GPU].PCIAddress == d.PCIAddress })
			})
			if used && !known {
				return true, nil
			}
		}
	}
	return false, nil
}

// errLooked ends an update of the machine that changes nothing.
var errLooked = errors.New("the machine was only looked at")

// check compares what is there with what the kubelet was told. The driver may be
// at work meanwhile, so it looks while nobody else can change the hardware.
func (s *soak) check() error {
	if err := s.checkOverlap(); err != nil {
		return err
	}
	err := s.n.State.Update(func(m *machine.Machine) error {
		return cmp.Or(s.checkMachine(m), errLooked)
	})
	if errors.Is(err, errLooked) {
		return nil
	}
	return err
}

// checkMachine: what the driver makes is written down before that, and what it
// takes away afterwards, so the journal is read before and after the CDI folder.
func (s *soak) checkMachine(m *machine.Machine) error {
	all, err := readRecords(s.n)
	if err != nil {
		return err
	}
	specs, err := specUIDs(s.n)
	if err != nil {
		return err
	}
	later, err := readRecords(s.n)
	if err != nil {
		return err
	}
	if err := checkPreparedOnce(all, m.BootID); err != nil {
		return err
	}
	maps.Copy(all, later)
	if err := checkRecorded(m, all); err != nil {
		return err
	}
	if err := s.checkSpecs(specs, all); err != nil {
		return err
	}
	for _, c := range s.claims {
		if !c.held {
			continue
		}
		if err := s.checkHeld(c, m, all); err != nil {
			return err
		}
	}
	return nil
}

// partitionName says where a partition is.
func partitionName(pciAddress string, profileID uint32, start, size int) string {
	return fmt.Sprintf("%s profile %d at %d:%d", pciAddress, profileID, start, size)
}

// checkPreparedOnce fails if two prepared claims have the same partition and do
// not share it.
func checkPreparedOnce(all soakRecords, bootID string) error {
	prepared := map[string]string{}
	for uid, r := range all {
		if r.BootID != bootID || r.State != harness.StatePrepared {
			continue
		}
		for _, d := range r.Devices {
			if d.Partition == nil || harness.BaseDeviceName(d.Device) != d.Device {
				continue
			}
			at := recordedName(&d)
			if other, twice := prepared[at]; twice {
				return fmt.Errorf("claims %s and %s are both prepared with %s", uid, other, at)
			}
			prepared[at] = uid
		}
	}
	return nil
}

func recordedName(d *harness.RecordDevice) string {
	p := d.Partition
	return partitionName(d.PCIAddress, p.ProfileID, p.Placement.Start, p.Placement.Size)
}

// checkRecorded fails if there is a partition or a mode that nobody would take
// away: the journal does not know it.
func checkRecorded(m *machine.Machine, all soakRecords) error {
	recorded := map[string]bool{}
	for _, r := range all {
		for _, d := range r.Devices {
			if r.BootID != m.BootID {
				continue
			}
			recorded[d.PCIAddress] = true
			if d.Partition != nil {
				recorded[recordedName(&d)] = true
			}
		}
	}
	for _, g := range m.GPUs {
		if (g.ComputeMode != harness.DefaultMode || g.TimeSlice != harness.DefaultSlice) && !recorded[g.PCIAddress] {
			return fmt.Errorf("%s has compute mode %d and time slice %d and no claim has a record of it", g.PCIAddress, g.ComputeMode, g.TimeSlice)
		}
	}
	for at := range partitionsOf(m) {
		if !recorded[at] {
			return fmt.Errorf("%s is there and no claim has a record of it", at)
		}
	}
	return nil
}

// checkSpecs fails if there is a CDI spec of a claim that the journal does not
// know, unless the claim's Prepare has not succeeded and the kubelet still wants
// something of it: a claim that needs no effect is written down after its spec.
func (s *soak) checkSpecs(specs []string, all soakRecords) error {
	for _, uid := range specs {
		pending := slices.ContainsFunc(s.claims, func(c *soakClaim) bool { return c.GetUid() == uid && !c.held })
		if all[uid] == nil && !pending {
			return fmt.Errorf("claim %s has a CDI spec and no record", uid)
		}
	}
	return nil
}

// partitionsOf are all instances of a machine with the UUIDs of their MIG devices.
func partitionsOf(m *machine.Machine) map[string]string {
	all := map[string]string{}
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if g.MIG == nil {
			continue
		}
		for _, in := range g.MIG.Instances {
			uuids := []string{}
			for _, c := range in.Compute {
				uuids = append(uuids, c.UUID)
			}
			all[partitionName(g.PCIAddress, in.ProfileID, in.Placement.Start, in.Placement.Size)] = strings.Join(uuids, ",")
		}
	}
	return all
}

// specUIDs are the claims that have a CDI spec.
func specUIDs(n *harness.Node) ([]string, error) {
	entries, err := os.ReadDir(n.CDIDir)
	if err != nil {
		return nil, err
	}
	var uids []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue // what becomes a spec
		}
		_, name, found := strings.Cut(strings.TrimSuffix(e.Name(), ".json"), "claim_")
		if !found {
			return nil, fmt.Errorf("%s is in the CDI folder", e.Name())
		}
		uids = append(uids, name)
	}
	slices.Sort(uids)
	return uids, nil
}
