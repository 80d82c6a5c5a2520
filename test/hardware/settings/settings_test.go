// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/node/host"
)

// program is an nvidia-smi that prints files, one for each field, and refuses a question with a
// field of which there is none, as the real one does.
const program = `#!/bin/bash
PATH=/usr/bin:/bin
for argument in "$@"; do
  case $argument in
  --query-gpu=index,uuid,pci.bus_id,name,memory.used,*)
    files=$0.gpus
    for field in $(tr , " " <<<"${argument#*memory.used,}"); do
      [[ -e $0.$field ]] || { echo "Field \"$field\" is not a valid field to query."; exit 2; }
      files+=" $0.$field"
    done
    exec paste -d , $files ;;
  --query-compute-apps=*) exec cat "$0.processes" ;;
  -lgi | -lci)
    [[ $(<"$0.$argument") != killed ]] || kill -9 $$
    exec cat "$0.$argument" ;;
  esac
done
exit 1
`

// machine is what nvidia-smi prints, by file.
type machine map[string]string

func healthy() machine {
	m := machine{
		"gpus": "0, GPU-a, 00000000:1B:00.0, NVIDIA H200, 4\n1, GPU-b, 00000000:43:00.0, NVIDIA H200, 0\n", "processes": "", "-lgi": "none\n", "-lci": "none\n",
	}
	for field, value := range map[string]string{
		"mig.mode.current": "Disabled", "mig.mode.pending": "Disabled", "compute_mode": "Default", "persistence_mode": "Enabled",
		"ecc.mode.current": "Enabled", "ecc.mode.pending": "Enabled", "clocks.applications.memory": "3201", "power.limit": "700.00",
	} { // no clocks.applications.graphics: newer drivers have none
		m[field] = " " + value + "\n " + value + "\n"
	}
	return m
}

func (m machine) read(t *testing.T) *Settings {
	t.Helper()
	root := t.TempDir()
	folder := filepath.Join(root, "usr/bin")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "nvidia-smi")
	if err := os.WriteFile(path, []byte(program), 0o755); err != nil {
		t.Fatal(err)
	}
	for file, text := range m {
		if err := os.WriteFile(path+"."+file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	smi, err := NewSMI(host.Roots{Driver: root})
	if err != nil {
		t.Fatal(err)
	}
	all, err := smi.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestChanges: each setting is compared, times and temperatures are not, and a field that the
// driver does not know spoils nothing.
func TestChanges(t *testing.T) {
	before := healthy().read(t)
	if changes := healthy().read(t).Compare(before).Changes; len(changes) > 0 {
		t.Errorf("nothing has changed: got %q", changes)
	}
	if got := before.GPUs[1].Set; got["clocks.applications.graphics"] != unknown || got["power.limit"] != "700.00" {
		t.Errorf("got %v", got)
	}
	if !strings.Contains(before.String(), "power.limit                    700.00") {
		t.Errorf("got %s", before)
	}
	cases := 0
	for _, field := range fields {
		m := healthy()
		m[field] = " " + before.GPUs[0].Set[field] + "\n other\n"
		changes := m.read(t).Compare(before).Changes
		if was := before.GPUs[1].Set[field]; len(changes) != 1 || changes[0] != "GPU 1: "+field+` was "`+was+`" and is "other"` {
			// A field that is known now was not before: that is one more of GPU 0.
			if was != unknown {
				t.Errorf("%s: got %q", field, changes)
			}
		}
		cases++
	}
	for file, want := range map[string]string{"-lgi": "GPU instances were:", "-lci": "compute instances were:"} {
		m := healthy()
		m[file] = "one\n"
		if changes := m.read(t).Compare(before).Changes; len(changes) != 1 || !strings.HasPrefix(changes[0], want) {
			t.Errorf("%s: got %q", file, changes)
		}
		cases++
	}
	m := healthy()
	for file, text := range m {
		first, _, _ := strings.Cut(text, "\n")
		m[file] = first + "\n"
	}
	if changes := m.read(t).Compare(before).Changes; !slices.Contains(changes, "GPU 1 is not there any more") {
		t.Errorf("got %q", changes)
	}
	if cases != 11 {
		t.Errorf("%d cases, want 11", cases)
	}
}

// TestNotCompared: what could not be read before or after is not called the same.
func TestNotCompared(t *testing.T) {
	lost := " Enabled\n [Unknown Error]\n"
	for name, test := range map[string]struct {
		before, after machine
		want          string
	}{
		"read":            {nil, nil, "settings of the GPUs: as before"},
		"killed":          {machine{"-lgi": "killed"}, machine{"-lgi": "killed"}, "settings of the GPUs: COULD NOT BE COMPARED with those before: GPU instances"},
		"killed before":   {machine{"-lgi": "killed"}, nil, "settings of the GPUs: COULD NOT BE COMPARED with those before: GPU instances"},
		"nothing printed": {machine{"-lci": ""}, machine{"-lci": ""}, "settings of the GPUs: COULD NOT BE COMPARED with those before: compute instances"},
		"not readable":    {machine{"persistence_mode": lost}, machine{"persistence_mode": lost}, "settings of the GPUs: COULD NOT BE COMPARED with those before: persistence_mode of GPU 1"},
	} {
		before, after := healthy(), healthy()
		maps.Copy(before, test.before)
		maps.Copy(after, test.after)
		if got := after.read(t).Compare(before.read(t)).String(); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
	after := healthy()
	after["-lgi"], after["power.limit"] = "killed", " 700.00\n 650.00\n"
	got := after.read(t).Compare(healthy().read(t)).String()
	for _, want := range []string{"ARE NOT AS BEFORE", `power.limit was "700.00" and is "650.00"`, "COULD NOT BE COMPARED with those before: GPU instances"} {
		if !strings.Contains(got, want) {
			t.Errorf("got %q, want %q in it", got, want)
		}
	}
}

// TestBusy: what shows that somebody works on a GPU.
func TestBusy(t *testing.T) {
	for name, test := range map[string]struct {
		change machine
		want   string
	}{
		"nobody":         {nil, ""},
		"MIG":            {machine{"mig.mode.current": " Enabled\n Default\n"}, "MIG mode is on (mig.mode.current)"},
		"MIG, pending":   {machine{"mig.mode.pending": " Enabled\n Default\n"}, "MIG mode is on (mig.mode.pending)"},
		"exclusive":      {machine{"compute_mode": " Exclusive_Process\n Default\n"}, "its compute mode is Exclusive_Process"},
		"mode not known": {machine{"compute_mode": " [Unknown Error]\n Default\n"}, "its compute mode is [Unknown Error]"},
		"a process":      {machine{"processes": "GPU-a, 4711\nGPU-b, 12\n"}, "1 processes compute on it"},
		"in another PID namespace": {
			machine{"gpus": "0, GPU-a, 00000000:1B:00.0, NVIDIA H200, 40000\n1, GPU-b, 00000000:43:00.0, NVIDIA H200, 0\n"}, "40000 MiB of its memory are in use, by processes that cannot be seen from here",
		},
		"no MIG": {machine{"mig.mode.current": " [N/A]\n Default\n", "mig.mode.pending": " [N/A]\n Default\n"}, ""},
	} {
		m := healthy()
		maps.Copy(m, test.change)
		if got := strings.Join(m.read(t).GPUs[0].Busy(), ", "); got != test.want {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}
