// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// earlierRecord is what a version of the driver has written about a claim.
type earlierRecord struct {
	Claim struct{ Namespace, Name, UID string }
	State string
	// Sessions are of MPS. They need a supervisor, and the GPUs need the UUIDs.
	Sessions []struct{ ID string }
	Devices  []struct {
		Requests    []string
		Device      string
		ShareID     string
		AdminAccess bool
		PCIAddress  string
		Type        string
		Partition   *struct {
			ProfileID uint32
			Placement machine.Placement
			Live      *struct {
				InstanceID, ComputeID int
				UUID                  string
			}
		}
	}
}

// TestUpgradeOfJournal checks that records of every earlier version are read: a prepared
// claim stays prepared, an unfinished one is cleaned up.
func TestUpgradeOfJournal(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../../pkg/claim/journal/testdata/formats/*.json")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 8 {
		t.Errorf("%d records of earlier versions, want at least 8", len(files))
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var r earlierRecord
			if err := json.Unmarshal(data, &r); err != nil {
				t.Fatal(err)
			}
			n := harness.NewNode(t, "dgx-h100", r.live)
			actual := []string{`"boot-1"`, `"` + n.Machine(t).BootID + `"`}
			for address, uuid := range map[string]string{"0000:43:00.0": "GPU-b", "0000:52:00.0": "GPU-c"} {
				at := slices.IndexFunc(n.Machine(t).GPUs, func(g machine.GPU) bool { return g.PCIAddress == address })
				actual = append(actual, `"`+uuid+`"`, `"`+n.Machine(t).GPUs[at].UUID+`"`)
			}
			writeRecord(t, n, r.Claim.UID, strings.NewReplacer(actual...).Replace(string(data)))
			flags := slices.Clone(harness.Frequent)
			if len(r.Sessions) > 0 {
				n.StartSupervisor(t)
				flags = append(flags, n.Interposer(t))
			}
			r.goOn(t, n, flags)
		})
	}
}

// live makes the partitions of the record exist.
func (r *earlierRecord) live(m *machine.Machine) {
	for _, d := range r.Devices {
		if d.Partition == nil || d.Partition.Live == nil {
			continue
		}
		live := d.Partition.Live
		at := slices.IndexFunc(m.GPUs, func(g machine.GPU) bool { return g.PCIAddress == d.PCIAddress })
		mig := m.GPUs[at].MIG
		mig.Current, mig.Pending = true, true
		mig.Instances = append(mig.Instances, machine.GPUInstance{
			ID: live.InstanceID, ProfileID: d.Partition.ProfileID, Placement: d.Partition.Placement,
			Compute: []machine.ComputeInstance{{ID: live.ComputeID, Placement: machine.Placement{Size: 1}, UUID: live.UUID}},
		})
	}
}

// allocate stores the claim as the scheduler left it.
func (r *earlierRecord) allocate(n *harness.Node) *drapb.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, d := range r.Devices {
		for _, request := range d.Requests {
			result := resourceapi.DeviceRequestAllocationResult{
				Request: request, Driver: harness.DriverName, Pool: harness.NodeName, Device: d.Device,
			}
			if d.AdminAccess {
				result.AdminAccess = ptr.To(true)
			}
			if d.ShareID != "" {
				result.ShareID = ptr.To(types.UID(d.ShareID))
			}
			results = append(results, result)
		}
	}
	n.API.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.Claim.Namespace, Name: r.Claim.Name, UID: types.UID(r.Claim.UID)},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}},
		},
	})
	return &drapb.Claim{Namespace: r.Claim.Namespace, Name: r.Claim.Name, Uid: r.Claim.UID}
}

// goOn starts the current driver on what an earlier one left.
func (r *earlierRecord) goOn(t *testing.T, n *harness.Node, flags []string) {
	t.Helper()
	claim := r.allocate(n)
	before := n.Instances(t)
	p := n.Start(t, flags...)
	p.Ready(t)
	if r.State == "prepared" {
		n.WantClaims(t, types.UID(r.Claim.UID))
		p.Until(t, "the claim to be prepared again", func(ctx context.Context) error {
			_, err := p.TryPrepare(ctx, claim, harness.KubeletTimeout)
			return err
		})
		if diff := cmp.Diff(before, n.Instances(t)); diff != "" {
			t.Errorf("a claim that was prepared has other partitions now (-before +after):\n%s", diff)
		}
		p.MustUnprepare(t, claim)
	}
	p.Until(t, "the end of the claim", func(context.Context) error {
		var left []string
		for _, in := range n.Instances(t) {
			left = append(left, in.Compute[0].UUID)
		}
		if diff := cmp.Diff(r.foreign(), left); diff != "" {
			return errors.New("live instances (-want +got):\n" + diff)
		}
		return n.CheckNoFiles(r.Claim.UID)
	})
}

// foreign are the UUIDs of the partitions that the driver did not make.
func (r *earlierRecord) foreign() []string {
	var uuids []string
	for _, d := range r.Devices {
		if d.Type == "mig-static" {
			uuids = append(uuids, d.Partition.Live.UUID)
		}
	}
	return uuids
}

// writeRecord puts a file into the journal.
func writeRecord(t *testing.T, n *harness.Node, uid, text string) {
	t.Helper()
	dir := filepath.Join(n.PluginsDir, harness.DriverName, "claims")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, uid+".json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
