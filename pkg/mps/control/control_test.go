// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
)

const (
	gpuA = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
	gpuB = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
)

func TestParseMemory(t *testing.T) {
	for answer, want := range map[string]int64{
		"5G": 5 << 30, "20350M": 20350 << 20, "1024M": 1 << 30, "512MiB": 512 << 20, "2GB": 2 << 30, "7k": 7 << 10,
		"1073741824": 1 << 30, "1.5G": 3 << 29, "10G (device 0)": 10 << 30, " 64M\n": 64 << 20,
		"": -1, "M": -1, "none": -1, "5X": -1, "Error: operation not permitted": -1, "Server 12 not found": -1, "-1G": -1 << 30,
	} {
		got, err := ParseMemory(answer)
		if want == -1 {
			expect.Fails(t, err, answer)
			continue
		}
		if err != nil || got.Bytes != want {
			t.Errorf("%q: got %d, %v, want %d", answer, got, err, want)
		}
	}
}

// A limit is confirmed by what it is when rounded to the unit of the answer, and by
// nothing else.
func TestConfirm(t *testing.T) {
	for _, test := range []struct {
		answer string
		want   int64 // MiB
		ok     bool
	}{
		{"5G", 5120, true}, {"5120M", 5120, true}, {"5368709120", 5120, true}, {"5242880K", 5120, true},
		{"1G", 1100, true}, {"2G", 1100, true}, {"1G", 2047, true}, {"2G", 2047, true}, // down or up
		{"1.0G", 1100, true}, {"1.1G", 1100, true}, {"1.2G", 1100, false}, {"1.07G", 1100, true}, {"1.05G", 1100, false},
		{"1G", 2048, false}, {"3G", 1100, false}, {"6G", 5120, false}, {"4G", 5120, false},
		{"5119M", 5120, false}, {"5121M", 5120, false}, {"1024M", 1100, false}, {"5368709121", 5120, false},
		{"1G", 900, true},
		// What is 0 may be no limit at all.
		{"0G", 900, false}, {"0M", 900, false}, {"-1G", 900, false}, {"99999999999T", 900, false},
	} {
		got, err := ParseMemory(test.answer)
		expect.Do(t, err, test.answer)
		expect.Equal(t, got.Confirms(test.want<<20), test.ok, test.answer, "confirms", test.want, "MiB")
	}
}

func TestParseLimits(t *testing.T) {
	// The second device is without a limit, so it is not asked for.
	spec := mps.Spec{Devices: []string{gpuA, gpuB, "GPU-c"}, ThreadPercentage: 12, Memory: map[string]int64{gpuA: 5 << 30, "GPU-c": 100<<20 + 5}}
	commands := func(limits []limit) (set []string) {
		for _, l := range limits {
			set = append(set, l.set)
		}
		return set
	}
	wantQueries := []string{"get_active_thread_percentage 77", "get_device_pinned_mem_limit 77 0", "get_device_pinned_mem_limit 77 2"}
	expect.Same(t, queries(limitsOf(77, spec)), wantQueries, "queries")
	wantCommands := []string{"set_default_active_thread_percentage 12", "set_default_device_pinned_mem_limit 0 5120M", "set_default_device_pinned_mem_limit 2 100M"}
	expect.Same(t, commands(limitsOf(0, spec)), wantCommands, "commands")
	for name, test := range map[string]struct {
		answers []string
		parsed  bool
		right   bool
	}{
		"right":                                {[]string{"12.0", "5G", "100M"}, true, true},
		"percent":                              {[]string{"12.5", "5G", "100M"}, true, false},
		"memory":                               {[]string{"12.0", "5G", "101M"}, true, false},
		"a coarse unit that rounds to nothing": {[]string{"12.0", "5G", "0G"}, true, false},
		"a refusal":                            {[]string{"12.0", "5G", "Error: no"}, false, false},
		"not numbers":                          {[]string{"all", "5G", "100M"}, false, false},
	} {
		differs, err := compare(limitsOf(77, spec), test.answers)
		if (err == nil) != test.parsed || err == nil && (differs == "") != test.right {
			t.Errorf("%s: %q, %v", name, differs, err)
		}
	}
	spec.ClientPriority = mps.PriorityBelowNormal
	wantQueries, wantCommands = append(wantQueries, "get_default_client_priority"), append(wantCommands, "set_default_client_priority 1")
	expect.Same(t, queries(limitsOf(77, spec)), wantQueries, "queries")
	expect.Same(t, commands(limitsOf(0, spec)), wantCommands, "commands")
	for answer, want := range map[string]string{
		"1 [BELOW NORMAL]": "", "0 [NORMAL]": "client priority is Normal, want BelowNormal", "Unknown command": "default client priority: want NORMAL or BELOW NORMAL",
	} {
		differs, err := compare(limitsOf(77, spec), []string{"12.0", "5G", "100M", answer})
		if err != nil {
			differs = err.Error()
		}
		if (differs == "") != (want == "") || !strings.Contains(differs, want) {
			t.Errorf("%q: %q, want %q", answer, differs, want)
		}
	}
	if got := commands(limitsOf(3, mps.Spec{Devices: []string{gpuA}})); !cmp.Equal(got, []string{"set_active_thread_percentage 3 100"}) {
		t.Errorf("without limits: %q", got)
	}
}

func TestParsePriority(t *testing.T) {
	for answer, want := range map[string]mps.ClientPriority{
		"0": mps.PriorityNormal, "1": mps.PriorityBelowNormal, "0 [NORMAL]": mps.PriorityNormal, "1 [BELOW NORMAL]": mps.PriorityBelowNormal,
		"Normal": mps.PriorityNormal, "below normal": mps.PriorityBelowNormal, "Default client priority: 1 [BELOW_NORMAL]": mps.PriorityBelowNormal,
		"": "", "2": "", "-1": "", "Unknown command: get_default_client_priority": "", "Invalid command": "", "error 1": "",
		// An older daemon may say anything about a command that it does not know.
		"Unknown command. The commands are listed below": "", "abnormal command": "",
	} {
		got, err := ParsePriority(answer)
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%q: got %q, %v, want %q", answer, got, err, want)
		}
	}
}

// A daemon without priorities is found out before anything is set, however much it says.
func TestNoPriorities(t *testing.T) {
	for name, answer := range map[string]string{"a line": "Unknown command", "nothing": "", "a page": "Commands:\n  quit\n  ps\n"} {
		set := filepath.Join(t.TempDir(), "set")
		c := Client{Limit: time.Minute, Check: unchecked, Command: func(ctx context.Context) *exec.Cmd {
			return exec.CommandContext(ctx, "sh", "-c", `if grep -q "^set_" ; then touch "$1"; fi; printf '%s' "$0"`, answer, set)
		}}
		err := c.SetLimits(t.Context(), mps.Spec{Devices: []string{gpuA}, ClientPriority: mps.PriorityNormal}, 0)
		if !errors.Is(err, ErrNoPriorities) || !strings.Contains(err.Error(), "set_default_client_priority") {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := os.Stat(set); err == nil {
			t.Errorf("%s: something was set", name)
		}
	}
}

// A daemon that has answered once has priorities. When it says something else after they were
// set, the caller has to know that something was.
func TestPriorityNotReadBack(t *testing.T) {
	c := Client{Limit: time.Minute, Check: unchecked, Command: func(ctx context.Context) *exec.Cmd {
		return exec.CommandContext(ctx, "sh", "-c", `if grep -q "^set_"; then printf '100\nbusy\n'; else echo 0; fi`)
	}}
	err := c.SetLimits(t.Context(), mps.Spec{Devices: []string{gpuA}, ClientPriority: mps.PriorityBelowNormal}, 0)
	if err == nil || errors.Is(err, ErrNoPriorities) || !strings.Contains(err.Error(), `"100\nbusy"`) {
		t.Errorf("got %v", err)
	}
}

func unchecked() error { return nil }

// TestInspect: what a daemon leaves out, or says besides, is no fact about its servers or their clients.
func TestInspect(t *testing.T) {
	spec := mps.Spec{Devices: []string{gpuA}, ThreadPercentage: 50, Memory: map[string]int64{gpuA: 1 << 30}}
	for name, test := range map[string]struct {
		list, status, clients, percentage, memory string

		want  string
		count int // of clients
	}{
		"active":                          {"77", "ACTIVE", "11\n12", "50.0", "1G", "", 2},
		"limits like PIDs":                {"77", "ACTIVE", "11", "50", "1073741824", "", 1},
		"no clients":                      {"77", "ACTIVE", "", "50.0", "1G", "", 0},
		"not active":                      {"77", "INITIALIZING", "11", "", "refused", "", 1},
		"the list alone":                  {"77", "", "", "", "", "want the state", 0},
		"no state":                        {"77", "", "", "50.0", "1G", "want the state", 0},
		"a state alone":                   {"77", "ACTIVE", "", "", "", "want 2 limits", 0},
		"a limit is missing":              {"77", "ACTIVE", "", "50.0", "", "want 2 limits", 0},
		"one more line after the clients": {"77", "ACTIVE", "11\n(one client)", "50.0", "1G", "want PIDs of clients", 0},
		"rubbish instead of a list":       {"busy", "ACTIVE", "", "50.0", "1G", "want PIDs", 0},
	} {
		script := `while read c; do case "$c" in get_server_list) printf '%b\n' "$0";; get_server_status*) printf '%b\n' "$1";; ` +
			`get_client_list*) printf '%b\n' "$2";; *percentage*) printf '%b\n' "$3";; *) printf '%b\n' "$4";; esac; done`
		c := Client{Limit: time.Minute, Check: unchecked, Command: func(ctx context.Context) *exec.Cmd {
			return exec.CommandContext(ctx, "sh", "-c", script, test.list, test.status, test.clients, test.percentage, test.memory)
		}}
		for _, expected := range [][]int{nil, {77}, {78}} {
			got, err := c.Inspect(t.Context(), expected, spec)
			switch {
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("%s, expected %v: got %+v, %v, want %q", name, expected, got, err, test.want)
			case test.want == "" && (err != nil || len(got) != 1 || got[0].PID != 77 || len(got[0].Clients) != test.count):
				t.Errorf("%s, expected %v: got %+v, %v", name, expected, got, err)
			}
		}
	}
}

func TestParseState(t *testing.T) {
	for answer, want := range map[string]State{"ACTIVE": StateActive, "FAULT": StateFault, "Active": StateActive, "INITIALIZING": "INITIALIZING"} {
		expect.Equal(t, parseState(answer), want, answer)
	}
}

func TestBoundedBuffer(t *testing.T) {
	var output boundedBuffer
	n, err := io.Copy(&output, bytes.NewReader(make([]byte, 1<<20)))
	if n != 1<<20 || err != nil || len(output.String()) != maxOutput {
		t.Errorf("took %d, kept %d, %v", n, len(output.String()), err)
	}
}

func TestTerminate(t *testing.T) {
	for answer, want := range map[string]bool{
		"": true, "0": true, "CUDA_SUCCESS": true, "CUDA_SUCCESS (0)": true,
		"1": false, "CUDA_ERROR_INVALID_VALUE": false, "No such client": false,
	} {
		c := Client{Limit: time.Minute, Check: unchecked, Command: func(ctx context.Context) *exec.Cmd {
			return exec.CommandContext(ctx, "sh", "-c", `read -r a b c; [ "$a $b $c" = "terminate_client 10 3" ] && printf '%s\n' "$0"`, answer)
		}}
		if err := c.Terminate(t.Context(), 10, 3); (err == nil) != want {
			t.Errorf("%q: got %v", answer, err)
		}
	}
}
