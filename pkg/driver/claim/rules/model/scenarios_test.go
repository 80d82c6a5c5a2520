// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package model

import (
	"slices"
)

var (
	left  = place{Profile: 1, Start: 0, Size: 1}
	right = place{Profile: 1, Start: 1, Size: 1}
	both  = place{Profile: 2, Start: 0, Size: 2}
)

func partition(g int8, p place) device {
	return device{GPU: g, Kind: ofClaims, Place: p}
}

func whole(g int8) device { return device{GPU: g} }

func share(g int8, limit int8) device {
	return device{GPU: g, Shared: true, Session: 1, Limit: limit}
}

func slice(g int8, interval int8) device {
	return device{GPU: g, Shared: true, Slice: interval}
}

// ownMPS is a whole GPU in a session of the claim's own.
func ownMPS(g int8) device { return device{GPU: g, Session: 2, Limit: 5, Own: true} }

func sharedPartition(g int8, p place, limit int8) device {
	return device{GPU: g, Kind: ofClaims, Place: p, Shared: true, Session: 1, Limit: limit}
}

func static(g int8, p place) device {
	return device{GPU: g, Kind: ofStranger, Place: p}
}

func admin(p device) device {
	p.Admin, p.Shared, p.Session, p.Limit, p.Slice = true, false, none, 0, 0
	return p
}

func rounds(n ...int8) (r [maxClaims]int8) {
	copy(r[:], n)
	return r
}

type parts = []device

// Scenarios are the small configurations.
func Scenarios() []*Scenario { return slices.Concat(single(), combined()) }

func single() []*Scenario {
	three := []place{left, right, both}
	one := []place{left}
	return []*Scenario{
		{
			Name: "one partition, every fault", GPUs: 1, Processes: 1, Places: three, Claims: []parts{{partition(0, left)}},
			Budget: budget{Crash: 1, Stranger: 1, Hang: 1, Fail: 1, Timeout: 1, Again: 1, Rounds: rounds(1)},
		},
		{
			Name: "one partition twice, stranger and crash", States: 269394, GPUs: 1, Processes: 1, Places: three, Claims: []parts{{partition(0, left)}},
			Budget: budget{Crash: 1, Stranger: 2, Timeout: 1, Rounds: rounds(2)},
		},
		{
			Name: "two partitions that overlap", GPUs: 1, Processes: 1, Places: three, Claims: []parts{{partition(0, left)}, {partition(0, both)}},
			Budget: budget{Crash: 1, Stranger: 1, Force: 1, Stays: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "two partitions side by side", GPUs: 1, Processes: 1, Places: three, Claims: []parts{{partition(0, left)}, {partition(0, right)}},
			Budget: budget{Crash: 1, Stranger: 2, Rounds: rounds(1, 1)},
		},
		{
			Name: "two plugins during an upgrade", GPUs: 1, Processes: 2, Places: one, Claims: []parts{{partition(0, left)}, {partition(0, both)}},
			Budget: budget{Crash: 1, Force: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "whole GPU and partition, both mode changes, a process stays", GPUs: 1, Processes: 1, Places: one,
			Claims: []parts{{whole(0)}, {partition(0, left)}},
			Budget: budget{Crash: 1, Stays: 1, Force: 1, Fail: 1, Stranger: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "two whole GPUs in turn, a process stays", GPUs: 1, Processes: 1, Claims: []parts{{whole(0)}, {whole(0)}},
			Budget: budget{Crash: 1, Stays: 1, Force: 1, Hang: 1, Orphan: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "MPS shares of a whole GPU", GPUs: 1, Processes: 1, Claims: []parts{{share(0, 2)}, {share(0, 5)}, {whole(0)}},
			Budget: budget{Crash: 1, Fail: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "MPS shares, GPU lost, mode of an administrator", GPUs: 1, Processes: 1, Claims: []parts{{share(0, 2)}, {share(0, 5)}},
			Budget: budget{Crash: 1, Lost: 1, Stranger: 1, Mode: 1, Stays: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "MPS shares of a partition", GPUs: 1, Processes: 1, Places: one,
			Claims: []parts{{sharedPartition(0, left, 2)}, {sharedPartition(0, left, 5)}},
			Budget: budget{Crash: 1, Stranger: 1, Fail: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "time slices", GPUs: 1, Processes: 1, Claims: []parts{{slice(0, 3)}, {slice(0, 3)}, {whole(0)}},
			Budget: budget{Crash: 1, Fail: 1, Force: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "a claim on two GPUs, one hangs", GPUs: 2, Processes: 1, Places: one,
			Claims: []parts{{partition(0, left), partition(1, left)}, {partition(0, both)}},
			Budget: budget{Crash: 1, Hang: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "a claim on two GPUs, strangers", GPUs: 2, Processes: 1, Places: []place{left, right},
			Claims: []parts{{partition(0, left), partition(1, left)}, {partition(0, right)}},
			Budget: budget{Stranger: 2, Rounds: rounds(1, 1)},
		},
		{
			Name: "MPS session on two GPUs", States: 246915, GPUs: 2, Processes: 1, Claims: []parts{{ownMPS(0), ownMPS(1)}, {whole(0)}},
			Budget: budget{Crash: 1, Hang: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "a record becomes unreadable", States: 116036, GPUs: 1, Processes: 1, Places: one,
			Claims: []parts{{partition(0, left)}, {whole(0)}},
			Budget: budget{Crash: 1, Unreadable: 1, Again: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "an unreadable record of a share", GPUs: 1, Processes: 1,
			Claims: []parts{{share(0, 2)}, {share(0, 5)}},
			Budget: budget{Crash: 1, Unreadable: 1, Again: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "reboot", GPUs: 1, Processes: 1, Places: three, Claims: []parts{{partition(0, left)}, {partition(0, right)}},
			Budget: budget{Crash: 1, Reboot: 1, Orphan: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "reboot, strangers", States: 72026, GPUs: 1, Processes: 1, Places: one, Claims: []parts{{partition(0, left)}},
			Budget: budget{Reboot: 1, Stranger: 1, Again: 1, Rounds: rounds(2)},
		},
		{
			Name: "full disk", States: 191494, GPUs: 1, Processes: 1, Places: one, Claims: []parts{{partition(0, left)}, {partition(0, both)}},
			Budget: budget{Crash: 1, Disk: 1, Hang: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "full disk, two GPUs", GPUs: 2, Processes: 1, Claims: []parts{{partition(0, left), partition(1, left)}, {partition(0, left)}},
			Budget: budget{Disk: 2, Hang: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "late calls", GPUs: 1, Processes: 2, Claims: []parts{{partition(0, left)}, {whole(0)}},
			Budget: budget{Timeout: 2, Crash: 1, Again: 1, Rounds: rounds(2, 1)},
		},
		{
			Name: "orphans", GPUs: 1, Processes: 1, Claims: []parts{{share(0, 2)}, {share(0, 5)}, {whole(0)}},
			Budget: budget{Orphan: 1, Force: 1, Stays: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "an orphan on two GPUs, one is lost", GPUs: 2, Processes: 1, Claims: []parts{{whole(0), partition(1, left)}, {whole(0)}},
			Budget: budget{Crash: 1, Orphan: 1, Lost: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "an unreadable record on two GPUs, one is lost", GPUs: 2, Processes: 1, Claims: []parts{{slice(0, 3), whole(1)}, {whole(0)}},
			Budget: budget{Crash: 1, Unreadable: 1, Lost: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "static partition and admin access", GPUs: 1, Processes: 1, Places: three, Foreign: []place{left},
			Claims: []parts{{static(0, left)}, {admin(partition(0, right))}, {partition(0, right)}},
			Budget: budget{Crash: 1, Stranger: 2, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "a fixed mode", States: 151917, GPUs: 1, Processes: 1, Places: one, Fixed: true, Claims: []parts{{fixed(whole(0))}, {fixed(partition(0, left))}},
			Budget: budget{Crash: 1, Stranger: 1, Fail: 1, Force: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "the supervisor is away", GPUs: 1, Processes: 1, Claims: []parts{{share(0, 2)}, {share(0, 5)}, {whole(0)}},
			Budget: budget{Crash: 1, Away: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "time slices that differ", GPUs: 1, Processes: 1, Claims: []parts{{slice(0, 3)}, {slice(0, 1)}, {slice(0, 0)}},
			Budget: budget{Crash: 1, Fail: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "two partitions of one claim", GPUs: 1, Processes: 1, Places: []place{left, right},
			Claims: []parts{{partition(0, left), partition(0, right)}, {partition(0, right)}},
			Budget: budget{Crash: 1, Stranger: 1, Fail: 1, Force: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "two partitions of one claim, a stranger twice", GPUs: 1, Processes: 1, Places: []place{left, right},
			Claims: []parts{{partition(0, left), partition(0, right)}},
			Budget: budget{Stranger: 2, Timeout: 1, Stays: 1, Again: 1, Rounds: rounds(1)},
		},
		{
			Name: "two partitions of one claim, a failure", States: 7317, GPUs: 1, Processes: 1, Places: []place{left, right},
			Claims: []parts{{partition(0, left), partition(0, right)}},
			Budget: budget{Stranger: 1, Fail: 1, Rounds: rounds(1)},
		},
		{
			Name: "two shares of one claim, of two", GPUs: 1, Processes: 1, Claims: []parts{{of(2, share(0, 2)), of(2, share(0, 3))}, {of(2, share(0, 5))}, {whole(0)}},
			Budget: budget{Crash: 1, Fail: 1, Force: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "two shares of a partition of one claim, of three", GPUs: 1, Processes: 1, Places: one,
			Claims: []parts{{of(3, sharedPartition(0, left, 2)), of(3, sharedPartition(0, left, 3))}, {of(3, sharedPartition(0, left, 5))}},
			Budget: budget{Crash: 1, Fail: 1, Stranger: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "admin access and a partition of one claim", GPUs: 1, Processes: 1, Places: []place{left, right},
			Claims: []parts{{admin(whole(0)), partition(0, left)}, {whole(0)}},
			Budget: budget{Crash: 1, Stranger: 1, Stays: 1, Force: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "two partitions of one claim, each in a session of its own", GPUs: 1, Processes: 1, Places: []place{left, right},
			Claims: []parts{{ownPartition(0, left, 1), ownPartition(0, right, 2)}, {partition(0, right)}},
			Budget: budget{Crash: 1, Stranger: 1, Again: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "more claims than shares", GPUs: 1, Processes: 1, Claims: []parts{{of(1, share(0, 2))}, {of(1, share(0, 5))}},
			Budget: budget{Crash: 1, Force: 1, Orphan: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "a process of no claim, whole GPU and partition", States: 143070, GPUs: 1, Processes: 1, Claims: []parts{{whole(0)}, {partition(0, left)}},
			Budget: budget{Crash: 1, Intrude: 1, Timeout: 1, Fail: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "a process of no claim, shares", States: 336562, GPUs: 1, Processes: 1, Claims: []parts{{share(0, 2)}, {share(0, 5)}},
			Budget: budget{Crash: 1, Intrude: 2, Rounds: rounds(1, 1)},
		},
		{
			Name: "the driver is loaded anew", GPUs: 1, Processes: 1, Claims: []parts{{slice(0, 3)}, {slice(0, 3)}, {slice(0, 0)}},
			Budget: budget{Crash: 1, Fail: 1, Reload: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "two versions, partition and whole GPU", GPUs: 1, Processes: 2, Newer: newer(0), Claims: []parts{{partition(0, left)}, {whole(0)}},
			Budget: budget{Crash: 1, Force: 1, Again: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "two versions, shares", GPUs: 1, Processes: 2, Newer: newer(0), Claims: []parts{{share(0, 2)}, {share(0, 5)}},
			Budget: budget{Crash: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "two versions, time slices", GPUs: 1, Processes: 2, Newer: newer(0), Claims: []parts{{slice(0, 3)}, {slice(0, 0)}},
			Budget: budget{Crash: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "torn observations, partitions", GPUs: 1, Processes: 1, Torn: true, Places: []place{left, right},
			Claims: []parts{{partition(0, left)}, {partition(0, right)}},
			Budget: budget{Stranger: 1, Stays: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
		{
			Name: "torn observations, whole GPU and shares", GPUs: 1, Processes: 1, Torn: true, Claims: []parts{{whole(0)}, {share(0, 2)}, {share(0, 5)}},
			Budget: budget{Stays: 1, Intrude: 1, Force: 1, Away: 1, Rounds: rounds(1, 1, 1)},
		},
		{
			Name: "torn observations, two GPUs and two processes", GPUs: 2, Processes: 2, Torn: true, Claims: []parts{{partition(0, left)}, {partition(1, left)}},
			Budget: budget{Crash: 1, Timeout: 1, Rounds: rounds(1, 1)},
		},
	}
}

// of is a share of a device that has n.
func of(n int8, p device) device {
	p.Clients = n
	return p
}

// ownPartition is a partition in a session of the claim's own. No other device is in it: only whole GPUs share one.
func ownPartition(g int8, p place, session int8) device {
	return device{GPU: g, Kind: ofClaims, Place: p, Session: session, Limit: 5, Own: true}
}

func newer(claims ...int) (n [maxClaims]bool) {
	for _, c := range claims {
		n[c] = true
	}
	return n
}

func fixed(p device) device {
	p.Fixed = true
	return p
}

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
