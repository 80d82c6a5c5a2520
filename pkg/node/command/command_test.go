// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package command

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/urfave/cli/v3"
)

// invoke runs a command with the flags of a process and the sub-command "sub".
func invoke(t *testing.T, p *Process, action cli.ActionFunc, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err strings.Builder
	code = Run(&cli.Command{
		Name: "test", Writer: &out, ErrWriter: &err,
		Flags:    p.Flags("Process"),
		Action:   NoArguments(action),
		Commands: []*cli.Command{{Name: "sub", Action: NoArguments(action)}},
	}, append([]string{"test"}, args...))
	return code, out.String(), err.String()
}

func TestRun(t *testing.T) {
	several := errors.Join(errors.New("one"), errors.New("two"))
	for name, test := range map[string]struct {
		args           []string
		err            error
		code           int
		stdout, stderr string
	}{
		"success":             {},
		"sub-command":         {args: []string{"sub"}},
		"several errors":      {err: several, code: 1, stderr: "test: one; two\n"},
		"unknown command":     {args: []string{"start"}, code: 1, stderr: "test: unknown command \"start\", there are: sub, version\n"},
		"argument":            {args: []string{"sub", "all"}, code: 1, stderr: "test: sub takes no argument, got \"all\"\n"},
		"argument of version": {args: []string{"version", "1"}, code: 1, stderr: "test: version takes no argument, got \"1\"\n"},
		"unknown flag":        {args: []string{"sub", "--x"}, code: 1, stderr: "test: flag provided but not defined: -x\n"},
		"wrong number":        {args: []string{"-v=x"}, code: 1, stderr: "test: invalid value \"x\" for flag -v: strconv.ParseInt: parsing \"x\": invalid syntax\n"},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := invoke(t, &Process{}, func(context.Context, *cli.Command) error { return test.err }, test.args...)
			if code != test.code || stdout != test.stdout || stderr != test.stderr {
				t.Errorf("got %d, stdout %q, stderr %q", code, stdout, stderr)
			}
		})
	}
}

func TestFlags(t *testing.T) {
	t.Setenv("LOG_LEVEL", "4")
	t.Setenv("HEALTH_SOCKET", "health.sock")
	var p Process
	var inEffect []any
	code, _, stderr := invoke(t, &p, func(_ context.Context, cmd *cli.Command) error {
		inEffect = InEffect(cmd)
		return p.Validate()
	}, "--logging-format=xml")
	if diff := cmp.Diff([]any{"health-socket", "health.sock", "v", 4, "logging-format", "xml"}, inEffect); diff != "" {
		t.Errorf("flags in effect: -want +got:\n%s", diff)
	}
	want := `test: --health-socket (HEALTH_SOCKET) is "health.sock": want an absolute path of at most 107 bytes, or nothing; ` +
		`--logging-format (LOGGING_FORMAT) is "xml": want text or json` + "\n"
	if code != 1 || stderr != want {
		t.Errorf("got %d, %q, want %q", code, stderr, want)
	}
}

func TestListenHealth(t *testing.T) {
	if listener, err := (&Process{}).ListenHealth(t.Context()); err != nil || listener != nil {
		t.Errorf("without a socket: got %v, %v", listener, err)
	}
	if _, err := (&Process{HealthSocket: "/does/not/exist"}).ListenHealth(t.Context()); err == nil || !strings.Contains(err.Error(), "--health-socket (HEALTH_SOCKET)") {
		t.Errorf("in a folder that is not there: got %v", err)
	}
}
