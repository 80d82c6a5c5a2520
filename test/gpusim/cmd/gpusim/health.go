// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// viewHealth says what is not well with a GPU that answers.
func viewHealth(g *machine.GPU) []string {
	h := &g.Health
	var out []string
	say := func(is bool, format string, args ...any) {
		if is {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	ecc, rows := h.VolatileECC, h.RemappedRows
	say(ecc != machine.ECCErrors{}, "memory errors: %d corrected, %d uncorrected", ecc.Corrected, ecc.Uncorrected)
	say(rows.Corrected+rows.Uncorrected > 0, "remapped rows: %d", rows.Corrected+rows.Uncorrected)
	say(rows.Pending, "remapping is pending")
	say(rows.Failed, "remapping failed")
	say(h.RetiredPagesPending, "retirement of pages is pending")
	say(h.ChannelRepair || h.TPCRepair, "a repair is pending")
	say(h.Unrepairable, "memory is unrepairable")
	say(h.RecoveryAction != 0, "recovery action %s", name(recoveryActions, h.RecoveryAction))
	for _, word := range slices.Sorted(maps.Keys(throttlings)) {
		say(h.ClocksReasons&throttlings[word] == throttlings[word], "throttled by %s at %d °C", word, h.Temperature)
	}
	say(h.Fabric.State == nvml.GPU_FABRIC_STATE_NOT_STARTED || h.Fabric.State == nvml.GPU_FABRIC_STATE_IN_PROGRESS, "fabric is not complete")
	say(h.Fabric.Status != 0 || h.Fabric.Mask != 0, "fabric is unhealthy")
	say(g.NoEvents, "reports no events")
	return out
}

// printHealth writes the tables of what fails and of what is not well, where there is any.
func printHealth(w io.Writer, gpus []shownGPU) {
	columns := []struct {
		title string
		text  func(shownGPU) string
	}{
		{"FAILURE", func(g shownGPU) string { return g.Failure }},
		{"HEALTH", func(g shownGPU) string { return strings.Join(g.Health, ", ") }},
	}
	for _, column := range columns {
		header := "\nGPU\t" + column.title + "\n"
		for _, g := range gpus {
			if text := column.text(g); text != "" {
				fmt.Fprintf(w, "%s%d\t%s\n", header, g.Index, text)
				header = ""
			}
		}
	}
}
