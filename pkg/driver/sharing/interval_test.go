// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/must"
)

// driver is a driver root whose nvidia-smi is this shell script. $slice is a file
// with the number that is set.
func driver(t *testing.T, script string) (host.Roots, string) {
	t.Helper()
	root := t.TempDir()
	slice := filepath.Join(root, "slice")
	folder := filepath.Join(root, "usr/bin")
	must.Do(t, os.MkdirAll(folder, 0o755))
	script = "#!/bin/sh\nslice=" + slice + "\n" + script
	must.Do(t, os.WriteFile(filepath.Join(folder, "nvidia-smi"), []byte(script), 0o755))
	return host.Roots{Driver: root}, slice
}

const (
	// table is what compute-policy -l prints of a GPU, %s being its policy.
	table = `+---------------------------------+
| GPU compute policies:           |
| GPU     Name           Policy   |
|=================================|
|   3     Timeslice      %-8s |
+---------------------------------+
`
	// obeying is a tool that does what it is told.
	obeying = `
case "$*" in
"compute-policy -i GPU-first --set-timeslice "[0-3])
	echo $5 >$slice
	echo "Successfully set timeslice for GPU 3." ;;
"compute-policy -i GPU-first -l")
	read is <$slice
	case $is in 0) is=Default ;; 1) is=Short ;; 2) is=Medium ;; 3) is=Long ;; esac
	echo "|====================|"
	echo "|   3     Timeslice      $is |" ;;
*)
	echo "unexpected: $*"
	exit 2 ;;
esac
`
)

func TestSetInterval(t *testing.T) {
	roots, slice := driver(t, obeying)
	m := New(Options{Roots: roots})
	for interval, want := range map[Interval]string{
		policy.IntervalShort: "1", policy.IntervalMedium: "2", policy.IntervalLong: "3", policy.IntervalDefault: "0",
	} {
		if err := m.SetInterval(t.Context(), first, interval); err != nil {
			t.Errorf("%s: %v", interval, err)
		}
		if got, err := os.ReadFile(slice); err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("%s: the GPU has %q, %v, want %s", interval, got, err, want)
		}
	}
}

// The tool is started once for a time slice, and once more for the first on a GPU and for the
// one after a failure, to see whether it does what it says.
func TestSetIntervalStartsTheToolOnce(t *testing.T) {
	roots, _ := driver(t, obeying)
	m := New(Options{Roots: roots})
	var calls []string
	is := map[string]string{}
	var failure error
	lies := false
	m.execute = func(_ context.Context, _ host.Program, args []string) (string, error) {
		calls = append(calls, strings.Join(args[1:], " "))
		uuid := args[2]
		if args[3] == "-l" {
			return fmt.Sprintf(table, map[string]string{"0": "Default", "1": "Short"}[is[uuid]]), nil
		}
		if !lies {
			is[uuid] = args[4]
		}
		return "done", failure
	}
	other := Device{PCIAddress: "0000:99:00.0", UUID: "GPU-other"}
	set := func(d Device, interval Interval, want ...string) {
		t.Helper()
		calls = nil
		if err := m.SetInterval(t.Context(), d, interval); (err == nil) != (failure == nil && !lies) {
			t.Errorf("got %v", err)
		}
		for i := range want {
			want[i] = "-i " + d.UUID + " " + want[i]
		}
		if !slices.Equal(calls, want) {
			t.Errorf("started %q, want %q", calls, want)
		}
	}
	const toShort, toDefault, list = "--set-timeslice 1", "--set-timeslice 0", "-l"
	set(first, policy.IntervalShort, toShort, list)
	for range 3 {
		set(first, policy.IntervalDefault, toDefault)
		set(first, policy.IntervalShort, toShort)
	}
	set(other, policy.IntervalShort, toShort, list)
	failure = &exitError{255}
	set(first, policy.IntervalDefault, toDefault)
	failure = nil
	set(first, policy.IntervalDefault, toDefault, list)
	set(first, policy.IntervalShort, toShort)
	// Once it has said what is not true it is asked each time.
	third := Device{PCIAddress: "0000:9a:00.0", UUID: "GPU-third"}
	is[third.UUID], lies = "0", true
	set(third, policy.IntervalShort, toShort, list)
	lies = false
	set(third, policy.IntervalShort, toShort, list)
	set(third, policy.IntervalDefault, toDefault, list)
}

func TestSetIntervalFails(t *testing.T) {
	const long = policy.IntervalLong
	answer := func(code int, text string) string { return fmt.Sprintf("echo '%s'\nexit %d\n", text, code) }
	list := func(policy string) string {
		return "case \"$*\" in *-l) cat <<'EOF'\n" + fmt.Sprintf(table, policy) + "EOF\n;; *) echo done ;; esac\n"
	}
	withCat := "cat() { while IFS= read -r line; do echo \"$line\"; done; }\n"
	tests := map[string]struct {
		script   string
		device   Device   // default: first
		interval Interval // default: Long
		is       error
		says     string // empty: no error
	}{
		"not supported":           {script: answer(3, "Failed to set timeslice policy: Not Supported"), is: gpu.ErrNotSupported, says: "policy: Not Supported (exit code 3)"},
		"not permitted":           {script: answer(4, "Insufficient Permissions"), is: gpu.ErrNoPermission, says: "Insufficient Permissions"},
		"gone":                    {script: answer(6, "No devices were found"), is: gpu.ErrNotFound, says: "No devices were found"},
		"gone, and taken back":    {script: answer(6, "No devices were found"), interval: policy.IntervalDefault},
		"driver not loaded":       {script: answer(9, "could not communicate"), is: gpu.ErrDriverNotLoaded, says: "could not"},
		"no library":              {script: answer(12, "could not find libnvidia-ml.so"), is: gpu.ErrDriverNotLoaded, says: "libnvidia-ml"},
		"lost":                    {script: answer(15, "fell off the bus"), is: gpu.ErrLost, says: "fell off"},
		"too old":                 {script: answer(2, "Option compute-policy is not recognized"), is: gpu.ErrInvalid, says: "not recognized"},
		"for another reason":      {script: answer(255, "Failed: Unknown Error"), says: "Failed: Unknown Error (exit code 255)"},
		"only words say why":      {script: answer(255, "Timeslice: NOT SUPPORTED"), is: gpu.ErrNotSupported, says: "NOT SUPPORTED"},
		"success that is none":    {script: answer(0, "Failed to set timeslice: Insufficient Permissions"), is: gpu.ErrNoPermission, says: "Failed"},
		"wordless":                {script: "exit 1\n", says: "no output (exit code 1)"},
		"several lines":           {script: "echo\necho one\necho '  two '\nexit 1\n", says: ": one two (exit code 1)"},
		"changes nothing":         {script: withCat + list("Default"), says: "answered success (done), but the time slice is Default"},
		"changes to another":      {script: withCat + list("Short"), says: "but the time slice is Short"},
		"table of another kind":   {script: withCat + list("3 ms")},
		"table without words":     {script: "echo done\n"},
		"cannot be read back":     {script: "case \"$*\" in *-l) echo broken; exit 255 ;; *) echo done ;; esac\n", says: "it was set, reading it back failed"},
		"cannot list one GPU":     {script: "case \"$*\" in *-l) echo 'Invalid combination'; exit 2 ;; *) echo done ;; esac\n"},
		"killed by somebody":      {script: "kill -9 $$\n", says: "signal: killed"},
		"partition":               {device: partition, is: gpu.ErrNotSupported, says: migUUID},
		"an interval that is not": {interval: "Eternal", is: gpu.ErrInvalid, says: `"Eternal"`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			roots, _ := driver(t, test.script)
			d, interval := first, long
			if test.device != (Device{}) {
				d = test.device
			}
			if test.interval != "" {
				interval = test.interval
			}
			err := New(Options{Roots: roots}).SetInterval(t.Context(), d, interval)
			if (err == nil) != (test.says == "") || (test.is != nil && !errors.Is(err, test.is)) {
				t.Fatalf("got %v, want %v", err, test.is)
			}
			if err == nil {
				return
			}
			for _, says := range []string{test.says, d.PCIAddress, d.UUID, "time slice"} {
				if !strings.Contains(err.Error(), says) {
					t.Errorf("%q does not say %q", err, says)
				}
			}
		})
	}
}

func TestSetIntervalWithoutTheProgram(t *testing.T) {
	root := t.TempDir()
	err := New(Options{Roots: host.Roots{Driver: root}}).SetInterval(t.Context(), first, policy.IntervalShort)
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), root) || !strings.Contains(err.Error(), "nvidia-smi") {
		t.Errorf("got %v", err)
	}
}

// A tool that takes too long is killed, and what it started as well.
func TestSetIntervalTakesTooLong(t *testing.T) {
	// The reader of a pipe waits for the writers, which are in the tool's group.
	roots, _ := driver(t, "PATH=/usr/bin:/bin\nsleep 1000 &\nsleep 1000\n")
	m := New(Options{Roots: roots, CommandLimit: 100 * time.Millisecond})
	started := time.Now()
	err := m.SetInterval(t.Context(), first, policy.IntervalShort)
	if !errors.Is(err, gpu.ErrTimeout) || errors.Is(err, gpu.ErrHung) || time.Since(started) > time.Minute {
		t.Errorf("got %v after %s", err, time.Since(started))
	}
	var failed *gpu.Error
	if !errors.As(err, &failed) || failed.PCIAddress != firstPCI || failed.Call != computePolicy {
		t.Errorf("got %+v", failed)
	}

	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	m = New(Options{Roots: roots})
	if err := m.SetInterval(ctx, first, policy.IntervalShort); !errors.Is(err, context.Canceled) || errors.Is(err, gpu.ErrHung) {
		t.Errorf("the caller gave up: %v", err)
	}
}

// A tool that cannot be killed is a call that is out, and whoever holds the GPU's lock
// learns when it is gone.
func TestSetIntervalThatCannotBeKilled(t *testing.T) {
	roots, _ := driver(t, "")
	synctest.Test(t, func(t *testing.T) {
		m := New(Options{Roots: roots})
		gone := make(chan struct{})
		m.execute = func(context.Context, host.Program, []string) (string, error) {
			<-gone // whatever the context says
			return "", nil
		}
		started := time.Now()
		err := m.SetInterval(t.Context(), first, policy.IntervalShort)
		var hung *gpu.PendingError
		if !errors.Is(err, gpu.ErrHung) || !errors.As(err, &hung) {
			t.Fatalf("got %v", err)
		}
		if waited := time.Since(started); waited != call.DefaultLimit {
			t.Errorf("returned after %s", waited)
		}
		if hung.Call != computePolicy || hung.PCIAddress != firstPCI || !hung.Since.Equal(started) {
			t.Errorf("got %+v", hung)
		}
		synctest.Wait()
		select {
		case <-hung.Done:
			t.Error("done while it is there")
		default:
		}
		close(gone)
		<-hung.Done
	})
}

// What ends at the last moment has ended.
func TestSetIntervalEndsWhenKilled(t *testing.T) {
	roots, _ := driver(t, "")
	synctest.Test(t, func(t *testing.T) {
		m := New(Options{Roots: roots})
		m.execute = func(ctx context.Context, _ host.Program, _ []string) (string, error) {
			<-ctx.Done()
			time.Sleep(time.Second)
			return fmt.Sprintf(table, "Short"), nil
		}
		started := time.Now()
		err := m.SetInterval(t.Context(), first, policy.IntervalShort)
		if waited := time.Since(started); err != nil || waited != 2*(defaultCommandLimit+time.Second) {
			t.Errorf("%v after %s", err, waited)
		}
	})
}

func TestListedInterval(t *testing.T) {
	const rule = "+----+\n"
	for text, want := range map[string]Interval{
		fmt.Sprintf(table, "Default"):                                       policy.IntervalDefault,
		fmt.Sprintf(table, "MEDIUM"):                                        policy.IntervalMedium,
		"|   0     timeslice      long  |\r\n" + rule:                       policy.IntervalLong,
		"| 0 | Time-slice | Short |\n":                                      policy.IntervalShort,
		"GPU 0: Time Slice: Medium\n":                                       policy.IntervalMedium,
		"|   0     Time-Slice     Short    |\n":                             policy.IntervalShort,
		fmt.Sprintf(table, "N/A"):                                           "",
		fmt.Sprintf(table, "Short") + "|   4     Timeslice      Long     |": "",
		"":           "",
		"|\n||\n| |": "",
	} {
		got, ok := listedInterval(text)
		if got != want || ok != (want != "") {
			t.Errorf("%q: got %q, %t, want %q", text, got, ok, want)
		}
	}
}

func FuzzListedInterval(f *testing.F) {
	f.Add(fmt.Sprintf(table, "Short"))
	f.Fuzz(func(t *testing.T, text string) {
		if got, ok := listedInterval(text); ok && intervals[got] == "" {
			t.Errorf("%q from %q", got, text)
		}
	})
}

func TestOneLine(t *testing.T) {
	if long := oneLine(strings.Repeat("ä", 1000)); len(long) > 400 {
		t.Errorf("got %d bytes: %s", len(long), long)
	}
	if got := oneLine("a\xff\n\n b "); got != `a\xff b` {
		t.Errorf("got %q", got)
	}
}
