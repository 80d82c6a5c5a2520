// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestOptions: what Arguments writes, Parse reads.
func TestOptions(t *testing.T) {
	for name, want := range map[string]Options{
		"plain": {Library: "libcuda.so.1"},
		"all": {
			Library: "/run/nvidia/driver/usr/lib64/libcuda.so.1", DevRoot: "/run/nvidia/driver", SharedMemory: "/run/shm",
			User: 65534, Allocate: 512 << 20, FillUpTo: 3 << 30, Hold: true, Busy: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Parse(want.Arguments())
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("%v, -want +got:\n%s", err, diff)
			}
		})
	}
}

func TestWrongOptions(t *testing.T) {
	for argument, want := range map[string]string{
		`{}`:                               `library is "": want a path`,
		`{"library":"l","allocate":"1Ti"}`: "read the options",
		`{"library":"l","allocated":1}`:    `unknown field "allocated"`,
		`-library=l`:                       "read the options",
	} {
		if _, err := Parse([]string{argument}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want an error with %q", argument, err, want)
		}
	}
	if _, err := Parse(nil); err == nil || !strings.Contains(err.Error(), "got 0 arguments: want one") {
		t.Errorf("without arguments: got %v", err)
	}
}

// TestProcess: what a program says arrives, whether it ends well, says what went wrong, or
// just ends.
func TestProcess(t *testing.T) {
	for name, test := range map[string]struct {
		script string
		last   Kind
		err    string
	}{
		"ends":      {`echo '{"event":"device"}'; echo '{"event":"done"}'`, Done, ""},
		"fails":     {`echo '{"event":"failed","call":"cuInit","code":100}'; exit 1`, Failed, ""},
		"crashes":   {`echo '{"event":"device"}'; kill -SEGV $$`, Device, "segmentation fault"},
		"complains": {`echo no libcuda >&2; exit 1`, "", "exit status 1: no libcuda"},
		"no JSON":   {`echo '{"event":"device"}'; echo Hello; echo '{"event":"done"}'`, Device, "without saying how"},
		"waits":     {`echo '{"event":"holding"}'; cat; echo '{"event":"done"}'`, Done, ""},
	} {
		t.Run(name, func(t *testing.T) {
			// The options' arguments are the script's, which has no use for them.
			run, err := startScript(t, test.script)
			if err != nil {
				t.Fatal(err)
			}
			events, err := run.Finish(t.Context())
			var last Kind
			if len(events) > 0 {
				last = events[len(events)-1].Kind
			}
			if last != test.last || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("got %v, %v; want the last to be %q, an error with %q", events, err, test.last, test.err)
			}
		})
	}
}

// startScript runs a shell script as the program.
func startScript(t *testing.T, script string) (*Process, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return Program{Path: path, Env: os.Environ()}.Start(t.Context(), Options{Library: "none"})
}
