// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
)

// Rows as the real tool printed them on an RTX PRO 6000 (driver 580) and a
// GB200 (driver 570), from public transcripts.
func TestProfileRow(t *testing.T) {
	for want, p := range map[string]profile{
		"|   0  MIG 1g.24gb+me.all  65     1/1        23.62      No     46     4     4   |\n" +
			"|                                                               1     4     1   |\n": {
			name: "MIG 1g.24gb+me.all",
			info: nvml.GpuInstanceProfileInfo_v3{Id: 65, InstanceCount: 1, MultiprocessorCount: 46, CopyEngineCount: 1, DecoderCount: 4,
				EncoderCount: 4, JpegCount: 4, OfaCount: 1, MemorySizeMB: 24192},
		},
		"|   0  MIG 4g.96gb          0     1/1        95.12      No     188    4     4   |\n" +
			"|                                                               4     4     1   |\n": {
			name: "MIG 4g.96gb",
			info: nvml.GpuInstanceProfileInfo_v3{Id: 0, InstanceCount: 1, MultiprocessorCount: 188, CopyEngineCount: 4, DecoderCount: 4,
				EncoderCount: 4, JpegCount: 4, OfaCount: 1, MemorySizeMB: 97408},
		},
		"|   0  MIG 1g.23gb         19     7/7        22.00      No     18     1     0   |\n" +
			"|                                                               2     1     0   |\n": {
			name: "MIG 1g.23gb",
			info: nvml.GpuInstanceProfileInfo_v3{Id: 19, InstanceCount: 7, MultiprocessorCount: 18, CopyEngineCount: 2, DecoderCount: 1,
				JpegCount: 1, MemorySizeMB: 22528},
		},
	} {
		expect.Same(t, profileRow(0, p, int(p.info.InstanceCount)), want)
	}
}

// All lines of a table are equally long.
func TestTableWidths(t *testing.T) {
	p := profile{name: "MIG 1g.10gb", info: nvml.GpuInstanceProfileInfo_v3{Id: 19, InstanceCount: 7, MemorySizeMB: 9984}}
	for _, table := range []string{profilesHead + profileRow(12, p, 7) + profilesRule, instancesHead + instancesRule, computeHead + computeRule} {
		lines := strings.Split(strings.TrimSuffix(table, "\n"), "\n")
		for _, l := range lines {
			expect.Equal(t, len(l), len(lines[0]), "characters", l)
		}
	}
}

func TestParse(t *testing.T) {
	for line, want := range map[string]command{
		"-L":                                    {verb: "-L"},
		"-q -i 0,1 -i GPU-x":                    {verb: "-q", ids: []string{"0", "1", "GPU-x"}},
		"--id=0 --list-gpus":                    {verb: "-L", ids: []string{"0"}},
		"-i 3 -c EXCLUSIVE_PROCESS":             {verb: "-c", value: "EXCLUSIVE_PROCESS", ids: []string{"3"}},
		"-mig 1":                                {verb: "-mig", value: "1"},
		"--version":                             {verb: "--version"},
		"mig -lgi -i 0":                         {verb: "-lgi", ids: []string{"0"}},
		"mig --list-gpu-instance-profiles":      {verb: "-lgip"},
		"compute-policy -i U --set-timeslice=2": {verb: "--set-timeslice", value: "2", ids: []string{"U"}},
		"compute-policy --set-timeslice 0":      {verb: "--set-timeslice", value: "0"},
		"compute-policy -l":                     {verb: "-l"},
		"mig -h":                                {verb: "help"},
		"mig -cgi 19:4,9 -C -i 0":               {verb: "-cgi", value: "19:4,9", compute: true, ids: []string{"0"}},
		"mig -gi 7,8 -dgi":                      {verb: "-dgi", instances: []string{"7", "8"}},
		"":                                      {verb: "summary"},
		"-i 2":                                  {verb: "summary", ids: []string{"2"}},
		"--query-gpu=name,uuid --format=csv":    {verb: "--query-gpu", value: "name,uuid", format: "csv"},
		"mig -dci -gi 7 -ci 0":                  {verb: "-dci", instances: []string{"7"}, computes: []string{"0"}},
	} {
		got, err := parse(strings.Fields(line))
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		if d := cmp.Diff(want, *got, cmp.AllowUnexported(command{})); d != "" {
			t.Errorf("%s: %s", line, d)
		}
	}
	for line, want := range map[string]string{
		"-x":               `"-x" is not recognized`,
		"-L -q":            "Invalid combination",
		"-c":               "requires an argument",
		"-L=1":             "takes no argument",
		"mig -L":           "not recognized",
		"nvlink -s":        "Invalid combination",
		"mig -lgi -i":      "requires an argument",
		"mig -cgi":         "requires an argument",
		"mig -dgi -C":      "Invalid combination",
		"mig -lgi -gi 3":   "Invalid combination",
		"mig -dgi -ci 0":   "Invalid combination",
		"mig -C":           "Invalid combination",
		"compute-policy":   "Invalid combination",
		"--version -L":     "Invalid combination",
		"-L --format=csv":  "Invalid combination",
		"--query-gpu=name": "Invalid combination",
	} {
		expect.Says(t, expect.Err(parse(strings.Fields(line))), want, line)
	}
}

func TestSelect(t *testing.T) {
	g := gpu{index: 1, uuid: "GPU-1234", busID: "00000000:1B:00.0"}
	for id, want := range map[string]bool{
		"1": true, "0": false, "GPU-1234": true, "GPU-12": false,
		"00000000:1B:00.0": true, "0000:1b:00.0": true, "1b:00.0": true, "0000:2b:00.0": false, "0001:1b:00.0": false, "b:00.0": false, ":00.0": false,
	} {
		expect.Equal(t, g.is(id), want, "-i", id)
	}
}
