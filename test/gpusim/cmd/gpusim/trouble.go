// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// The parts of show and of fault list about what goes wrong.
type (
	shownFault struct {
		ID          int     `json:"id"`
		Function    string  `json:"function"`
		GPU         int     `json:"gpu"` // -1: any
		Skip        int     `json:"skip,omitempty"`
		Times       int     `json:"times,omitempty"`       // 0: all
		Probability float64 `json:"probability,omitempty"` // 0: 1
		Delay       string  `json:"delay,omitempty"`
		Hang        bool    `json:"hang,omitempty"`
		AllGPUs     bool    `json:"allGPUs,omitempty"`
		Effect      string  `json:"effect"`
		Code        string  `json:"code,omitempty"`
		Seen        uint64  `json:"seen"`
		Struck      uint64  `json:"struck"`
	}
	shownLatency struct {
		Function    string `json:"function"`
		Base        string `json:"base"`
		PerInstance string `json:"perInstance"`
		Exclusive   bool   `json:"exclusive"`
	}
)

func viewFaults(faults []machine.Fault) []shownFault {
	out := []shownFault{}
	for _, f := range faults {
		s := shownFault{
			ID: f.ID, Function: f.Function, GPU: f.GPU, Skip: f.Skip, Times: f.Times, Probability: f.Probability,
			Hang: f.Hang, AllGPUs: f.AllGPUs, Effect: name(effects, int(f.Effect)), Seen: f.Seen, Struck: f.Struck,
		}
		if f.Delay > 0 {
			s.Delay = f.Delay.String()
		}
		if (f.Effect == machine.Fail || f.Effect == machine.FailAfter) && !ofProgram(f.Function) {
			s.Code = codeName(f.Code)
		}
		out = append(out, s)
	}
	return out
}

func viewLatencies(latencies []machine.Latency) []shownLatency {
	out := []shownLatency{}
	for _, l := range latencies {
		out = append(out, shownLatency{l.Function, l.Base.String(), l.PerInstance.String(), l.Exclusive})
	}
	return out
}

func faultListCommand() *cli.Command {
	return listCommand("list the faults, with the calls that each has seen and struck", printFaults,
		func(m *machine.Machine) []shownFault { return viewFaults(m.Faults) })
}

// printFaults writes a table of faults, or nothing where there are none.
func printFaults(w io.Writer, before string, faults []shownFault) {
	if len(faults) == 0 {
		return
	}
	fmt.Fprint(w, before, "FAULT\tFUNCTION\tGPU\tCALLS\tEFFECT\tSEEN\tSTRUCK\n")
	for _, f := range faults {
		gpu := orNone(f.GPU)
		if f.GPU < 0 {
			gpu = "any"
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%d\n", f.ID, f.Function, gpu, f.calls(), f.does(), f.Seen, f.Struck)
	}
}

// calls says which calls the fault is for: "2 after 1, p=0.5".
func (f shownFault) calls() string {
	text := "all"
	if f.Times > 0 {
		text = fmt.Sprint(f.Times)
	}
	if f.Skip > 0 {
		text += fmt.Sprintf(" after %d", f.Skip)
	}
	if f.Probability > 0 && f.Probability < 1 {
		text += fmt.Sprintf(", p=%g", f.Probability)
	}
	return text
}

// does says what happens to them: "fail IN_USE, delay 1s".
func (f shownFault) does() string {
	text := []string{strings.TrimSpace(f.Effect + " " + f.Code)}
	if f.Delay != "" {
		text = append(text, "delay "+f.Delay)
	}
	if f.Hang {
		text = append(text, "hang")
	}
	if f.AllGPUs {
		text = append(text, "with all GPUs")
	}
	return strings.Join(text, ", ")
}

func printLatencies(w io.Writer, latencies []shownLatency) {
	if len(latencies) == 0 {
		return
	}
	fmt.Fprint(w, "\nCALLS OF\tTAKE\tPER INSTANCE\tON ONE GPU\n")
	for _, l := range latencies {
		together := map[bool]string{true: "one by one", false: "at once"}[l.Exclusive]
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.Function, l.Base, l.PerInstance, together)
	}
}
