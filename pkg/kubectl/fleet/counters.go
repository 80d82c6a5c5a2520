// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

// Counters returns what the devices of the GPU draw from together, by the name of the counter.
// The caller owns the map.
func (g *GPU) Counters() map[string]int64 {
	all := make(map[string]int64, len(g.counters))
	for name, c := range g.counters {
		all[name] = c.Value.Value()
	}
	return all
}
