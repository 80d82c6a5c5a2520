// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/partage-dev/partage/pkg/claim/converge"
	"github.com/partage-dev/partage/pkg/claim/record"
	"github.com/partage-dev/partage/pkg/claim/rules"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
)

// allUsers joins what others find with the users of orphans.
type allUsers struct {
	others  converge.Users // or nil
	orphans *orphanUsers
}

// Users implements converge.Users.
func (u *allUsers) Users(ctx context.Context, pciAddress string, claims []*record.Record) (rules.Users, map[int]rules.Users) {
	undivided, instances := u.orphans.Users(ctx, pciAddress, claims)
	if u.others == nil {
		return undivided, instances
	}
	more, inInstances := u.others.Users(ctx, pciAddress, claims)
	joined := map[int]rules.Users{}
	maps.Copy(joined, inInstances)
	for id, one := range instances {
		joined[id] = join(joined[id], one)
	}
	return join(more, undivided), joined
}

func join(a, b rules.Users) rules.Users {
	both := rules.Users{Memory: a.Memory || b.Memory, Open: a.Open || b.Open, Text: a.Text}
	if b.Text != "" && both.Text != "" {
		both.Text += ", "
	}
	both.Text += b.Text
	return both
}

// orphanUsers finds the processes on GPUs with an orphan that no other claim explains. Nothing but this keeps a whole GPU, or
// a partition that somebody else made, from being given away under a running container.
type orphanUsers struct {
	store      *record.Store
	partitions Partitions
	roots      host.Roots
	list       func(ctx context.Context) (map[string]mps.Status, error)
	isOrphan   func(r *record.Record) bool
}

var _ converge.Users = (*orphanUsers)(nil)

// Users implements converge.Users.
func (u *orphanUsers) Users(ctx context.Context, pciAddress string, claims []*record.Record) (rules.Users, map[int]rules.Users) {
	instances := map[int]rules.Users{}
	orphaned := false
	for _, held := range u.store.Snapshot().On(pciAddress) {
		if held.Admin || !u.isOrphan(held.Record) {
			continue
		}
		orphaned = true
		if p := held.Partition; p != nil && p.Made != nil {
			instances[p.Made.InstanceID] = rules.Users{}
		}
	}
	if !orphaned {
		return rules.Users{}, nil
	}
	processes, err := u.processes(ctx, pciAddress)
	if err != nil {
		unknown := rules.Users{Memory: true, Text: "who uses the GPU is not known: " + err.Error()}
		for id := range instances {
			instances[id] = unknown
		}
		return unknown, instances
	}
	var undivided rules.Users
	for _, p := range processes {
		if explained(claims, pciAddress, p) {
			continue
		}
		if p.InstanceID < 0 {
			add(&undivided, p)
		}
		for id := range instances {
			if one := instances[id]; p.InstanceID == id || p.InstanceID < 0 {
				add(&one, p)
				instances[id] = one
			}
		}
	}
	return undivided, instances
}

func add(u *rules.Users, p gpu.Process) {
	u.Memory = true
	if u.Text != "" {
		u.Text += ", "
	}
	u.Text += fmt.Sprintf("process %d", p.PID)
}

// explained reports whether another claim may have the process.
func explained(claims []*record.Record, pciAddress string, p gpu.Process) bool {
	return slices.ContainsFunc(claims, func(r *record.Record) bool {
		return slices.ContainsFunc(r.Devices, func(d record.Device) bool {
			if d.PCIAddress != pciAddress || d.Admin {
				return false
			}
			return d.Partition == nil || d.Partition.Made != nil && d.Partition.Made.InstanceID == p.InstanceID
		})
	})
}

// processes are those on a GPU, without the servers that hold it on behalf of MPS clients.
func (u *orphanUsers) processes(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	processes, err := u.partitions.Processes(ctx, pciAddress)
	if errors.Is(err, gpu.ErrNotSupported) {
		// The kernel knows who has the GPU open, whatever the driver can list.
		processes, err = u.openers(ctx, pciAddress)
	}
	if err != nil {
		return nil, err
	}
	// Where the supervisor does not answer, its servers count as users.
	sessions, _ := u.list(ctx)
	return slices.DeleteFunc(processes, func(p gpu.Process) bool {
		for _, s := range sessions {
			if slices.Contains(s.Servers, p.PID) {
				return true
			}
		}
		return false
	}), nil
}

// openers lists the processes that have the device node of a GPU open.
func (u *orphanUsers) openers(ctx context.Context, pciAddress string) ([]gpu.Process, error) {
	minor, err := u.roots.Within(ctx).GPUMinor(pciAddress)
	if err != nil {
		return nil, err
	}
	pids, err := u.roots.Openers(fmt.Sprintf("/dev/nvidia%d", minor))
	if err != nil {
		return nil, err
	}
	var processes []gpu.Process
	for _, pid := range pids {
		processes = append(processes, gpu.Process{PID: pid, InstanceID: -1})
	}
	return processes, nil
}
