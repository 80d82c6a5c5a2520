// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
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
		{[]string{"--driver-root="}, []string{`--driver-root (DRIVER_ROOT) is "": want an absolute path`}},
		{[]string{"--check-interval=1ms"}, []string{`--check-interval (CHECK_INTERVAL) is "1ms": want a time from 50ms to 1m0s`}},
		{[]string{"--check-interval=2"}, []string{"check-interval", `"2"`}},
		{[]string{"--health-port=-1"}, []string{`--health-port (HEALTH_PORT) is "-1": want a port`}},
		{[]string{"-v=-1"}, []string{`--v (LOG_LEVEL) is "-1": want 0 or more`}},
		{[]string{"--logging-format=xml"}, []string{`--logging-format (LOGGING_FORMAT) is "xml": want text or json`}},
		{[]string{"--health-port=70000", "--driver-root=x"}, []string{"HEALTH_PORT", "DRIVER_ROOT"}},
		{[]string{"--no-such-flag"}, []string{"no-such-flag"}},
		{[]string{"start"}, []string{`unknown command "start", there are: container-hook, version`}},
		{[]string{"container-hook"}, []string{"control", "session"}},
		{[]string{"container-hook", "--control=/c"}, []string{"want --control and --session, or --software-limits"}},
		{[]string{"container-hook", "--control=/c", "--session=gpu-0", "--software-limits"}, []string{"want --control and --session, or --software-limits"}},
		{[]string{"container-hook", "--control=/c", "--session=gpu-0"}, []string{"MPS session gpu-0", "container's state"}},
		{[]string{"container-hook", "--software-limits"}, []string{"software limits", "container's state"}},
		{[]string{"launch"}, []string{"only the supervisor"}},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			var stdout, stderr strings.Builder
			if code := run(append([]string{name}, test.args...), strings.NewReader(""), &stdout, &stderr); code != 1 {
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
	if code := run([]string{name, "version"}, nil, &stdout, &stderr); code != 0 || strings.Count(stdout.String(), "\n") != 1 {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout.String(), stderr.String())
	}
}

func TestContainerHook(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "hook") // t.TempDir's is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	control := filepath.Join(dir, "control")
	listener, err := net.Listen("unixpacket", control)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	preload := filepath.Join(dir, "preload")
	config := `{"process": {"env": ["PARTAGE_MPS_0=gpu-0"]}, "mounts": [` +
		`{"destination": "/usr/local/vgpu/libvgpu.so"}, {"destination": "/etc/ld.so.preload", "source": "` + preload + `"}]}`
	for path, content := range map[string]string{filepath.Join(dir, "config.json"): config, preload: "/usr/local/vgpu/libvgpu.so\n"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"--control", control, "--session", "gpu-0"}, {"--software-limits"}} {
		var stdout, stderr strings.Builder
		code := run(append([]string{name, "container-hook"}, args...), strings.NewReader(fmt.Sprintf(`{"bundle": %q}`, dir)), &stdout, &stderr)
		if code != 0 || stdout.Len()+stderr.Len() > 0 {
			t.Errorf("%v: exit code %d, stdout %q, stderr %q", args, code, stdout.String(), stderr.String())
		}
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
