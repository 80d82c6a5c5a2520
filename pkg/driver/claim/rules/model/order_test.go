// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

// normal makes states equal that differ only in the numbers of arrivals.
func (w *world) normal() {
	for c := range w.Claims {
		var used [10]*int8
		n := 0
		add := func(at *int8) {
			if *at > 0 {
				used[n] = at
				n++
			}
		}
		add(&w.Tombs[c])
		add(&w.Guards[c])
		add(&w.Records[c].Arrived)
		add(&w.Calls[c][0].Arrived)
		add(&w.Calls[c][1].Arrived)
		add(&w.Releases[c].Arrived)
		for g := range w.Work {
			if k := &w.Work[g]; k.Process != 0 && int(k.Queue[0].Claim) == c {
				add(&k.Arrived)
			}
		}
		rank, last := int8(0), int8(0)
		for {
			lowest := int8(127)
			for i := range n {
				if *used[i] > last && *used[i] < lowest {
					lowest = *used[i]
				}
			}
			if lowest == 127 {
				break
			}
			last = lowest
			rank++
			for i := range n {
				if *used[i] == lowest {
					*used[i] = rank
				}
			}
			if rank < lowest {
				last = lowest
			}
		}
		w.Claims[c].Clock = rank
	}
}
