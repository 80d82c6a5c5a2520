// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestConformanceExitCode: what could not be run is told apart from a difference.
func TestConformanceExitCode(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"no such flag":   {[]string{"--no-such-flag"}, "no-such-flag"},
		"no such output": {[]string{"--output=xml"}, `--output is "xml": want table or json`},
		"no transcript":  {[]string{"--replay=/does/not/exist"}, "--replay: open /does/not/exist"},
		"no folder":      {[]string{"--transcript=" + filepath.Join(t.TempDir(), "a/b")}, "--transcript: open"},
		"two sources":    {[]string{"--transcript=a", "--replay=b"}, "exclude each other"},
		"one output":     {[]string{"--transcript=-", "--catalogue-patch=-"}, "both the standard output"},
		"no such check":  {[]string{"--skip=mps.ends,mps.end"}, `--skip: there is no check "mps.end": want some of node.pids, node.kernel,`},
		"needed check":   {[]string{"--mps", "--skip=mps.start"}, "--skip: the check mps.start cannot be skipped: the others of part mps need it"},
		"skip later":     {[]string{"--replay=a", "--skip=mps.ends"}, "--skip and --replay exclude each other"},
		"wrong root":     {[]string{"--proc-root=/does/not/exist"}, "--proc-root (PROC_ROOT)"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr strings.Builder
			args := append([]string{"gpu-kubelet-plugin", "conformance"}, test.args...)
			if code := run(args, &stdout, &stderr); code != 2 {
				t.Errorf("exit code %d, want 2", code)
			}
			if !strings.Contains(stderr.String(), test.want) || strings.Count(stderr.String(), "\n") != 1 {
				t.Errorf("stderr is %q, want one line with %q", stderr.String(), test.want)
			}
		})
	}
}
