// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

// Most returns how many of a GPU's devices could be allocated together if nothing else of the
// GPU was, such as seven partitions 1g.10gb of an H100.
func (g *GPU) Most(devices []*Device) int {
	all := counters{}
	for name, c := range g.counters {
		all[name] = c.Value.Value()
	}
	return all.most(devices)
}
