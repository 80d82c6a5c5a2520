// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/node/healthsocket"
)

// build makes the program as releases do.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-buildvcs=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

// serve answers on a socket until the test ends.
func serve(t *testing.T, checks healthsocket.Checks) (socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "h") // t.TempDir's is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket = filepath.Join(dir, "s")
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(healthsocket.Serve(t.Context(), listener, checks, func(err error) { t.Error(err) }))
	return socket
}

// TestProgram: exit code and text are what a probe of the kubelet gets.
func TestProgram(t *testing.T) {
	program := build(t)
	socket := serve(t, healthsocket.Checks{
		Liveness: func(context.Context) error { return nil },
		Readiness: func(context.Context) error {
			return errors.Join(errors.New("no driver in /usr/läb"), errors.New("not registered"))
		},
	})
	nobody := socket + "-of-nobody"

	for what, test := range map[string]struct {
		args   []string
		socket string
		code   int
		stderr string
	}{
		"alive":     {args: []string{"liveness"}, socket: socket},
		"not ready": {[]string{"readiness"}, socket, 1, "no driver in /usr/läb; not registered\n"},
		"no check":  {nil, socket, 1, "health-probe: got []: want liveness or readiness\n"},
		"two":       {[]string{"liveness", "readiness"}, socket, 1, `health-probe: got ["liveness" "readiness"]: want liveness or readiness` + "\n"},
		"unknown":   {[]string{"startup"}, socket, 1, `unknown check "startup": want liveness or readiness` + "\n"},
		"no socket": {[]string{"liveness"}, "", 1, `health-probe: HEALTH_SOCKET is "": want the socket of the process to ask` + "\n"},
		"no process": {
			[]string{"liveness"}, nobody, 1,
			"ask " + nobody + " about liveness: dial unix " + nobody + ": connect: no such file or directory\n",
		},
	} {
		t.Run(what, func(t *testing.T) {
			var stdout, stderr strings.Builder
			cmd := exec.CommandContext(t.Context(), program, test.args...)
			cmd.Env = []string{socketVariable + "=" + test.socket}
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run()
			if code := cmd.ProcessState.ExitCode(); code != test.code || stdout.Len() > 0 || stderr.String() != test.stderr {
				t.Errorf("got %d, stdout %q, stderr %q", code, stdout.String(), stderr.String())
			}
		})
	}
}

// TestSmall: a node pays for what is linked each time that the program starts.
func TestSmall(t *testing.T) {
	program := build(t)
	if info, err := os.Stat(program); err != nil || info.Size() > 4<<20 {
		t.Errorf("it has %d bytes, want 4 MiB at most: %v", info.Size(), err)
	}
	build, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range build.Deps {
		if d.Path != "golang.org/x/sync" {
			t.Errorf("it has the dependency %s", d.Path)
		}
	}
	cmd := exec.Command("go", "list", "-deps", ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	if !slices.Contains(packages, "net") {
		t.Fatalf("%d packages, and not net: nothing is tested", len(packages))
	}
	for _, heavy := range []string{"net/http", "crypto/tls", "encoding/json", "text/template", "regexp", "flag"} {
		if slices.Contains(packages, heavy) {
			t.Errorf("it contains %s", heavy)
		}
	}
}
