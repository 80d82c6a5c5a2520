// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package settings reads with nvidia-smi how the GPUs of a machine are set up and who uses
// them, and says what has changed.
package settings

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/hardware/bounded"
)

// fields are compared.
var fields = []string{
	"mig.mode.current", "mig.mode.pending", "compute_mode", "persistence_mode", "ecc.mode.current", "ecc.mode.pending",
	"clocks.applications.graphics", "clocks.applications.memory", "power.limit",
}

// lists are compared as they are printed.
var lists = map[string][]string{"GPU instances": {"mig", "-lgi"}, "compute instances": {"mig", "-lci"}}

// unknown stands for what nvidia-smi has no answer to.
const unknown = "not known"

const (
	commandLimit = 20 * time.Second
	outputLimit  = time.Second // after its end
)

// SMI is nvidia-smi.
type SMI struct {
	program host.Program
	// known are the fields that this version has not refused.
	known []string
}

// NewSMI finds it.
func NewSMI(roots host.Roots) (*SMI, error) {
	program, err := roots.Program("nvidia-smi")
	return &SMI{program, slices.Clone(fields)}, err
}

// Run returns what nvidia-smi prints, also where it fails.
func (s *SMI) Run(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	cmd, out := s.program.Command(ctx, args...), &bounded.Output{}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = out, out, outputLimit
	err := bounded.Run(ctx, cmd)
	if err != nil {
		err = fmt.Errorf("nvidia-smi %s: %w", strings.Join(args, " "), err)
	}
	return out.String(), err
}

// rows asks for fields of something, and returns a row for each.
func (s *SMI) rows(ctx context.Context, query string, columns ...string) ([][]string, error) {
	out, err := s.Run(ctx, "--query-"+query+"="+strings.Join(columns, ","), "--format=csv,noheader,nounits")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(out))
	}
	var rows [][]string
	for line := range strings.Lines(out) {
		cells := strings.Split(strings.TrimSpace(line), ", ")
		if len(cells) == len(columns) {
			rows = append(rows, cells)
		}
	}
	return rows, nil
}

// GPU is one of the machine's.
type GPU struct {
	Index, UUID, PCI, Name string
	// Set is how it is set up, by field.
	Set map[string]string
	// UsedMiB is how much of its memory is in use.
	UsedMiB int
	// Processes are those that compute on it, as far as they can be seen from here.
	Processes []string
}

// Settings are how all GPUs of a machine are set up.
type Settings struct {
	GPUs []GPU
	// Lists are texts, by what they list. One that could not be made is not there.
	Lists map[string]string
}

// columns describe a GPU before its settings.
var columns = []string{"index", "uuid", "pci.bus_id", "name", "memory.used"}

// refused is what a version says to a question with a field that it does not have.
var refused = regexp.MustCompile(`Field "([^"]+)" is not a valid field to query`)

// gpus asks once for everything: each start of nvidia-smi may take seconds. What it says to a
// question with a field that it does not know is no answer, so that is left out from then on.
func (s *SMI) gpus(ctx context.Context) ([][]string, error) {
	for {
		rows, err := s.rows(ctx, "gpu", slices.Concat(columns, s.known)...)
		if err == nil {
			return rows, nil
		}
		found := refused.FindStringSubmatch(err.Error())
		if found == nil || !slices.Contains(s.known, found[1]) {
			return nil, err
		}
		s.known = slices.DeleteFunc(s.known, func(field string) bool { return field == found[1] })
	}
}

// Read asks nvidia-smi.
func (s *SMI) Read(ctx context.Context) (*Settings, error) {
	rows, err := s.gpus(ctx)
	if err != nil {
		return nil, err
	}
	all := &Settings{Lists: map[string]string{}}
	for _, row := range rows {
		used, err := strconv.Atoi(row[4])
		if err != nil {
			used = 0 // some GPUs cannot tell
		}
		g := GPU{Index: row[0], UUID: row[1], PCI: row[2], Name: row[3], UsedMiB: used, Set: map[string]string{}}
		for _, field := range fields {
			g.Set[field] = unknown
		}
		for i, field := range s.known {
			g.Set[field] = row[len(columns)+i]
		}
		all.GPUs = append(all.GPUs, g)
	}
	for what, args := range lists {
		// Without partitions it ends with an error, and says so. Where it is killed, or says nothing, that is no answer.
		text, err := s.Run(ctx, args...)
		exit := (*exec.ExitError)(nil)
		if ended := err == nil || errors.As(err, &exit) && exit.Exited(); ended && strings.TrimSpace(text) != "" {
			all.Lists[what] = text
		}
	}
	processes, err := s.rows(ctx, "compute-apps", "gpu_uuid", "pid")
	if err != nil {
		return nil, err
	}
	for _, row := range processes {
		if at := slices.IndexFunc(all.GPUs, func(g GPU) bool { return g.UUID == row[0] }); at >= 0 {
			all.GPUs[at].Processes = append(all.GPUs[at].Processes, row[1])
		}
	}
	return all, nil
}

// mostUsedMiB is what an idle driver may have taken of a GPU's memory.
const mostUsedMiB = 1024

// Busy returns what shows that somebody works on the GPU, or nothing.
func (g GPU) Busy() []string {
	var why []string
	for _, field := range []string{"mig.mode.current", "mig.mode.pending"} {
		if g.Set[field] == "Enabled" {
			why = append(why, "MIG mode is on ("+field+")")
		}
	}
	if mode := g.Set["compute_mode"]; mode != "Default" {
		why = append(why, "its compute mode is "+mode)
	}
	if n := len(g.Processes); n > 0 {
		why = append(why, fmt.Sprintf("%d processes compute on it", n))
	} else if g.UsedMiB > mostUsedMiB {
		why = append(why, fmt.Sprintf("%d MiB of its memory are in use, by processes that cannot be seen from here", g.UsedMiB))
	}
	return why
}

// Comparison is what came of a comparison. Settings are as before where both are empty.
type Comparison struct {
	// Changes say what has changed, Unknown what could not be compared.
	Changes, Unknown []string
}

// String returns the answer for people.
func (c Comparison) String() string {
	switch {
	case len(c.Changes) > 0:
		line := strings.Repeat("!", 72)
		return strings.Join(slices.Concat([]string{line, "THE SETTINGS OF A GPU ARE NOT AS BEFORE. Somebody has to look at it:"}, c.Changes, c.unknown(), []string{line}), "\n")
	case len(c.Unknown) > 0:
		return "settings of the GPUs: " + strings.Join(c.unknown(), "\n")
	}
	return "settings of the GPUs: as before"
}

func (c Comparison) unknown() []string {
	if len(c.Unknown) == 0 {
		return nil
	}
	return []string{"COULD NOT BE COMPARED with those before: " + strings.Join(c.Unknown, "; ")}
}

// unreadable is what nvidia-smi prints for what it could not read.
const unreadable = "[Unknown Error]"

// Compare compares the settings with what they were.
func (s *Settings) Compare(before *Settings) Comparison {
	var c Comparison
	for _, was := range before.GPUs {
		at := slices.IndexFunc(s.GPUs, func(g GPU) bool { return g.UUID == was.UUID })
		if at < 0 {
			c.Changes = append(c.Changes, fmt.Sprintf("GPU %s is not there any more", was.Index))
			continue
		}
		for _, field := range fields {
			switch is := s.GPUs[at].Set[field]; {
			case is == unreadable || was.Set[field] == unreadable:
				c.Unknown = append(c.Unknown, fmt.Sprintf("%s of GPU %s", field, was.Index))
			case is != was.Set[field]:
				c.Changes = append(c.Changes, fmt.Sprintf("GPU %s: %s was %q and is %q", was.Index, field, was.Set[field], is))
			}
		}
	}
	if len(s.GPUs) > len(before.GPUs) {
		c.Changes = append(c.Changes, fmt.Sprintf("there were %d GPUs and are %d", len(before.GPUs), len(s.GPUs)))
	}
	for _, what := range slices.Sorted(maps.Keys(lists)) {
		was, knownBefore := before.Lists[what]
		is, known := s.Lists[what]
		switch {
		case !known || !knownBefore:
			c.Unknown = append(c.Unknown, what)
		case is != was:
			c.Changes = append(c.Changes, fmt.Sprintf("%s were:\n%s\nand are:\n%s", what, was, is))
		}
	}
	return c
}

// String lists all that is compared.
func (s *Settings) String() string {
	var b strings.Builder
	for _, g := range s.GPUs {
		fmt.Fprintf(&b, "GPU %s %s %s\n", g.Index, g.PCI, g.Name)
		for _, field := range fields {
			fmt.Fprintf(&b, "  %-30s %s\n", field, g.Set[field])
		}
	}
	for _, what := range slices.Sorted(maps.Keys(lists)) {
		text, known := s.Lists[what]
		if !known {
			text = unknown
		}
		fmt.Fprintf(&b, "%s:\n%s\n", what, text)
	}
	return b.String()
}
