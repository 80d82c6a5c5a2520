// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"slices"

	"github.com/partage-dev/partage/pkg/gpu"
)

// pods knows which processes are in which pods, and which pods may use which claims. UIDs
// are those of the metadata.
type pods struct {
	// of returns the pod of a process, or "".
	of func(pid int) (uid string)
	// may reports whether a claim is reserved for a pod.
	may func(h *Holding, uid string) bool
}

// attribute divides what a GPU reports among those who have devices on it, in their order,
// and returns how much of the used memory is left, and the pods that use a share and are not
// among those of any claim that has one.
//
// Who has a device alone has all that is used of it, by whomever. Shares are divided by
// process: a process counts for the claim if its pod may use that claim and no other on the
// same device. What cannot be told is nobody's.
func attribute(u *gpu.Usage, held []Holding, p pods) (by []Measured, unattributed uint64, strangers []string) {
	unattributed = u.UsedBytes
	by = make([]Measured, len(held))
	for i := range held {
		if held[i].Kind.IsShare() {
			by[i] = noProcesses(u, held[i].Partition != nil)
		} else {
			by[i] = exclusive(u, &held[i])
		}
	}
	for _, process := range u.Processes {
		sharers := sharersOf(held, process.InstanceID)
		if len(sharers) == 0 {
			continue
		}
		pod := p.of(process.PID)
		if pod == "" {
			continue
		}
		sharers = slices.DeleteFunc(sharers, func(i int) bool { return !p.may(&held[i], pod) })
		switch len(sharers) {
		case 0:
			strangers = append(strangers, pod)
		case 1:
			by[sharers[0]].add(process)
		}
	}
	for _, m := range by {
		if m.MemoryBytes != nil {
			unattributed -= min(unattributed, *m.MemoryBytes)
		}
	}
	return by, unattributed, strangers
}

// sharersOf are those who have a share of the GPU instance, or of the GPU if it is negative.
func sharersOf(held []Holding, instance int) []int {
	var sharers []int
	for i := range held {
		h := &held[i]
		on := -1
		if h.Partition != nil {
			on = h.Partition.InstanceID
		}
		if h.Kind.IsShare() && on == instance {
			sharers = append(sharers, i)
		}
	}
	return sharers
}

// exclusive is what is used of a device that a claim has alone.
func exclusive(u *gpu.Usage, h *Holding) Measured {
	if h.Partition == nil {
		return Measured{MemoryBytes: new(u.UsedBytes), Utilization: u.Utilization, Processes: count(u, -1)}
	}
	for _, p := range u.Partitions {
		if p.UUID == h.Partition.UUID && p.UUID != "" {
			return Measured{MemoryBytes: new(p.UsedBytes), Utilization: p.Utilization, Processes: count(u, p.InstanceID)}
		}
	}
	return Measured{}
}

// count returns the number of processes on an instance, or on the undivided GPU.
func count(u *gpu.Usage, instance int) *int {
	if u.Processes == nil {
		return nil
	}
	n := 0
	for _, p := range u.Processes {
		if p.InstanceID == instance {
			n++
		}
	}
	return &n
}

// noProcesses is a share that nobody uses.
func noProcesses(u *gpu.Usage, onPartition bool) Measured {
	if u.Processes == nil {
		return Measured{}
	}
	m := Measured{MemoryBytes: new(uint64), Processes: new(int)}
	if u.ProcessUtilization && !onPartition {
		m.Utilization = new(float64)
	}
	return m
}

// add counts a process. One whose memory is not known makes the sum unknown.
func (m *Measured) add(p gpu.ProcessUsage) {
	*m.Processes++
	if p.MemoryBytes == nil || m.MemoryBytes == nil {
		m.MemoryBytes = nil
	} else {
		*m.MemoryBytes += *p.MemoryBytes
	}
	if p.Utilization != nil && m.Utilization != nil {
		*m.Utilization = min(1, *m.Utilization+*p.Utilization)
	}
}
