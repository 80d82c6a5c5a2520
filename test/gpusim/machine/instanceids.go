// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package machine

// UpperHalfFirst numbers GPU instances as newer drivers do, which give the lower ids to the upper half of the memory slices:
// of a GPU with eight, instances of four have the id 1 at 4 and 2 at 0, those of one 7 to 9 at 4 to 6 and 11 to 14 at 0 to 3.
// Boards of the catalogue have the order of older drivers. It is for a GPU as the catalogue makes it.
func (m *MIG) UpperHalfFirst() {
	for i := range m.Profiles {
		m.Profiles[i].upperHalfFirst(m.MemorySlices)
	}
}

func (p *GIProfile) upperHalfFirst(slices int) {
	used := map[int]bool{}
	var ids []int
	for _, at := range p.Placements {
		n := (at.Start + slices/2) % slices / at.Size
		if n >= len(p.InstanceIDs) {
			return
		}
		ids = append(ids, p.InstanceIDs[n])
		used[p.InstanceIDs[n]] = true
	}
	for _, id := range p.InstanceIDs {
		if !used[id] {
			ids = append(ids, id)
		}
	}
	p.InstanceIDs = ids
}
