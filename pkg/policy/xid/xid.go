// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package xid says what the errors mean that NVIDIA's drivers report by a number, an XID: to the driver, and to kubectl gpu.
package xid

import (
	"bytes"
	_ "embed"
	"encoding/csv"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/partage-dev/partage/pkg/policy"
)

// Scope is what an XID is about.
type Scope string

const (
	// Application is an error of a program. The device is in order.
	Application Scope = "application"
	// Partition is what the event names: a partition, or all of the GPU.
	Partition Scope = "partition"
	// WholeGPU is all of the GPU, whatever partition the event names.
	WholeGPU Scope = "gpu"
)

// Recovery is how something ends that an event has reported.
type Recovery string

const (
	// Quiet means that it is over when it has not happened for a while.
	Quiet Recovery = "quiet"
	// Reset means that only a reset mends it.
	Reset Recovery = "reset"
)

// XID is an error that the NVIDIA driver reports by number, and what it means for claims.
type XID struct {
	Number uint64
	Name   string
	Scope  Scope
	// Effect is the built-in one, which a policy may change.
	Effect   policy.Effect
	Recovery Recovery
	// Action is what NVIDIA's catalogue says is to be done at once, or empty.
	Action string
	// Advice is for people.
	Advice string
}

// Under returns the effect under a policy.
func (x XID) Under(h *policy.Health) policy.Effect {
	if effect, changed := h.XIDs[x.Number]; changed {
		return effect
	}
	return x.Effect
}

// advice is for entries of the table that have none of their own.
var advice = map[string]string{
	"RESTART_APP":     "Look for an error in the program. If different programs have it on this GPU, suspect the GPU",
	"RESET_GPU":       "End what uses the GPU, then reset it (nvidia-smi --gpu-reset) or restart the node",
	"RESTART_BM":      "Drain the node and restart it. If it happens again, the GPU, its slot or its power supply may be broken",
	"IGNORE":          "Nothing needs to be done",
	"CONTACT_SUPPORT": "If it happens again, contact the vendor of the GPU",
}

// Lookup returns what an XID means. Every number means something.
func Lookup(number uint64) XID {
	table := Table()
	at, known := slices.BinarySearchFunc(table, number, func(x XID, number uint64) int { return int(x.Number) - int(number) })
	if known {
		return table[at]
	}
	// It is newer than the table, or called unused by NVIDIA's catalogue, which then says to contact support. It keeps nobody
	// away, as it may be harmless and happen again and again: drivers with newer XIDs have a recovery action, which is a
	// condition of its own.
	return XID{
		Number: number, Name: "not known to this version of the driver", Scope: Partition, Effect: policy.EffectNone,
		Recovery: Quiet, Advice: "See https://docs.nvidia.com/deploy/xid-errors",
	}
}

//go:embed xids.csv
var xidTable []byte

// Tainting returns, in order, the XIDs that taint devices unless a policy changes it.
func Tainting() []uint64 {
	var numbers []uint64
	for _, x := range Table() {
		if x.Effect == policy.EffectNoSchedule || x.Effect == policy.EffectNoExecute {
			numbers = append(numbers, x.Number)
		}
	}
	return numbers
}

// Table returns the known XIDs in order. It must not be changed.
var Table = sync.OnceValue(func() []XID {
	table, err := parse(xidTable)
	if err != nil {
		// A test reads the table. Without it every XID is an unknown one.
		return nil
	}
	return table
})

func parse(data []byte) ([]XID, error) {
	r := csv.NewReader(bytes.NewReader(data))
	r.Comment, r.FieldsPerRecord = '#', 7
	records, err := r.ReadAll()
	if err != nil || len(records) == 0 {
		return nil, fmt.Errorf("read the table of XIDs: %w", err)
	}
	var table []XID
	for _, record := range records[1:] {
		number, err := strconv.ParseUint(record[0], 10, 32)
		if err != nil {
			return nil, fmt.Errorf("read the table of XIDs: %w", err)
		}
		x := XID{
			Number: number, Name: record[1], Scope: Scope(record[2]), Effect: policy.Effect(record[3]),
			Recovery: Recovery(record[4]), Action: record[5], Advice: record[6],
		}
		if x.Advice == "" {
			x.Advice = advice[x.Action]
		}
		table = append(table, x)
	}
	return table, nil
}
