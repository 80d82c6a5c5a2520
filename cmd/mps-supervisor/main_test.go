// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/mps"
)

// TestBadFlags: every wrong flag ends the program with one line that names the
// flag, its value and what would be right.
func TestBadFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		args []string
		want []string
	}{
		{[]string{"--mps-dir=run"}, []string{`--mps-dir (MPS_DIR) is "run": want an absolute path`}},
		{[]string{"--mps-dir=" + file}, []string{`--mps-dir (MPS_DIR) is "` + file + `": want a directory`}},
		{[]string{"--mps-dir=/" + strings.Repeat("d", 100)}, []string{"--mps-dir (MPS_DIR)", "want a path of at most 24 bytes"}},
		{[]string{"--driver-root="}, []string{`--driver-root (DRIVER_ROOT) is "": want an absolute path`}},
		{[]string{"--dev-root="}, []string{`--dev-root (DEV_ROOT) is "": want auto or an absolute path`}},
		{[]string{"--host-driver-root=x"}, []string{`--host-driver-root (HOST_DRIVER_ROOT) is "x": want an absolute path`}},
		{[]string{"--check-interval=1ms"}, []string{`--check-interval (CHECK_INTERVAL) is "1ms": want a time from 50ms to 1m0s`}},
		{[]string{"--check-interval=2"}, []string{"check-interval", `"2"`}},
		{[]string{"--extra-container-files=log,../x"}, []string{`--extra-container-files (EXTRA_CONTAINER_FILES) is "log,../x": want names`}},
		{[]string{"--memory-percent=0"}, []string{`--memory-percent (MEMORY_PERCENT) is "0": want a number from 1 to 80`}},
		{[]string{"--memory-percent=81"}, []string{`--memory-percent (MEMORY_PERCENT) is "81": want a number from 1 to 80`}},
		{[]string{"--selinux-context=container_file_t"}, []string{`--selinux-context (SELINUX_CONTEXT) is "container_file_t": want auto, none or a context`}},
		{[]string{"--extra-container-files=control_privileged"}, []string{"EXTRA_CONTAINER_FILES", "could command the daemon"}},
		{[]string{"--kubelet-pods-socket=pods-api.sock"}, []string{`--kubelet-pods-socket (KUBELET_PODS_SOCKET) is "pods-api.sock": want an absolute path`}},
		{[]string{"--health-socket=health.sock"}, []string{`--health-socket (HEALTH_SOCKET) is "health.sock": want an absolute path`}},
		{[]string{"-v=-1"}, []string{`--v (LOG_LEVEL) is "-1": want 0 or more`}},
		{[]string{"--logging-format=xml"}, []string{`--logging-format (LOGGING_FORMAT) is "xml": want text or json`}},
		{[]string{"--health-socket=x", "--driver-root=x"}, []string{"HEALTH_SOCKET", "DRIVER_ROOT"}},
		{[]string{"--no-such-flag"}, []string{"no-such-flag"}},
		{[]string{"start"}, []string{`unknown command "start", there are: version`}},
		{[]string{"launch"}, []string{"only the supervisor"}},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			var stdout, stderr strings.Builder
			if code := run(append([]string{name}, test.args...), &stdout, &stderr); code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			got := stderr.String()
			for _, want := range test.want {
				if !strings.Contains(got, want) {
					t.Errorf("stderr lacks %q:\n%s", want, got)
				}
			}
			if strings.Count(got, "\n") != 1 || stdout.Len() > 0 {
				t.Errorf("want one line on stderr and nothing else, got:\n%s%s", got, stdout.String())
			}
		})
	}
}

func TestVersion(t *testing.T) {
	var stdout, stderr strings.Builder
	if code := run([]string{name, "version"}, &stdout, &stderr); code != 0 || strings.Count(stdout.String(), "\n") != 1 {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout.String(), stderr.String())
	}
}

func TestHealth(t *testing.T) {
	for name, test := range map[string]struct {
		err         error
		alive, good bool
	}{
		"serves":                   {nil, true, true},
		"waits for an earlier one": {fmt.Errorf("no socket: %w", mps.ErrUnavailable), true, false},
		"hangs":                    {context.DeadlineExceeded, false, false},
		"is broken":                {errors.New("broken"), false, false},
	} {
		c := checks(func(context.Context) ([]mps.Status, error) { return nil, test.err })
		if err := c.Liveness(t.Context()); (err == nil) != test.alive {
			t.Errorf("%s: liveness is %v", name, err)
		}
		if err := c.Readiness(t.Context()); (err == nil) != test.good {
			t.Errorf("%s: readiness is %v", name, err)
		}
	}
}
