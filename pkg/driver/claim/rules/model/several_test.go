// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

// combined are scenarios in which two things go wrong that each of the others has alone.
func combined() []*Scenario {
	three := []place{left, right, both}
	return []*Scenario{
		{
			Name: "two versions, one place", States: 69915, GPUs: 1, Processes: 2, Newer: newer(0), Claims: []parts{{partition(0, left)}, {partition(0, left)}},
			Budget: budget{Crash: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "two versions, partitions that overlap", States: 69930, GPUs: 1, Processes: 2, Newer: newer(0), Claims: []parts{{partition(0, left)}, {partition(0, both)}},
			Budget: budget{Crash: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "an unreadable record of two partitions, a stranger", States: 150070, GPUs: 1, Processes: 1, Places: []place{left},
			Claims: []parts{{partition(0, left), partition(0, right)}, {partition(0, right)}},
			Budget: budget{Crash: 1, Unreadable: 1, Stranger: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "three partitions of one claim on two GPUs", GPUs: 2, Processes: 1, Places: three,
			Claims: []parts{{partition(0, left), partition(0, right), partition(1, left)}, {partition(0, right)}},
			Budget: budget{Crash: 1, Hang: 1, Stranger: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "a process of no claim, and an orphan", States: 167030, GPUs: 1, Processes: 1, Claims: []parts{{whole(0)}, {partition(0, left)}},
			Budget: budget{Crash: 1, Intrude: 1, Fail: 1, Orphan: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "a whole GPU between two claims, a process stays", GPUs: 1, Processes: 1, Claims: []parts{{whole(0)}, {whole(0)}},
			Budget: budget{Crash: 1, Stays: 1, Intrude: 1, Force: 1, Rounds: rounds(2, 1)},
		},
		{
			Name: "the driver is loaded anew, an unreadable record", GPUs: 1, Processes: 1, Claims: []parts{{slice(0, 3)}, {slice(0, 1)}},
			Budget: budget{Crash: 1, Reload: 1, Unreadable: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "a claim on two GPUs, the driver is loaded anew", States: 1316, GPUs: 2, Processes: 1, Places: []place{left},
			Claims: []parts{{slice(0, 3), partition(1, left)}},
			Budget: budget{Reload: 1, Rounds: rounds(1)},
		},
	}
}
