// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// programChecks are about the driver's programs.
var programChecks = []Check{
	{
		ID:         "programs.nvidia-smi",
		Assumption: "nvidia-smi sets time slices, for which NVML has no call",
		Code:       "pkg/sharing/interval.go",
		Run:        checkProgram("nvidia-smi", []string{"compute-policy", "--help"}, "--set-timeslice"),
	},
	{
		ID:         "programs.mps-control",
		Assumption: "the control daemon of MPS runs in the foreground and has one server for all users",
		Code:       "pkg/mps/supervisor/program.go",
		Run:        checkProgram("nvidia-cuda-mps-control", []string{"--help"}, "-f", "-multiuser-server"),
	},
	{
		ID:         "programs.mps-server",
		Assumption: "the control daemon finds the MPS server",
		Code:       "pkg/mps/supervisor/program.go",
		// It is not run: started by hand it serves.
		Run: checkProgram("nvidia-cuda-mps-server", nil),
	},
}

// checkProgram returns a check that a program is there and that its help names options.
func checkProgram(name string, help []string, options ...string) func(context.Context, *Node) []Finding {
	return func(ctx context.Context, n *Node) []Finding {
		expected := name
		if len(options) > 0 {
			expected += " with " + strings.Join(options, " and ")
		}
		path, err := Ask(ctx, n, File, "program "+name, func(context.Context) (string, error) {
			program, err := n.Roots.Program(name)
			if err != nil {
				return "", err
			}
			if program.Root != "" {
				return program.Path + " in its own root", nil
			}
			return program.Path, nil
		})
		if err != nil {
			return []Finding{Failed("", expected, err)}
		}
		if len(options) == 0 {
			return []Finding{Expect("", true, expected, path)}
		}
		text, err := n.runHelp(ctx, name, help)
		if err != nil {
			return []Finding{Failed("", expected, err)}
		}
		var missing []string
		for _, option := range options {
			if !strings.Contains(text, option) {
				missing = append(missing, option)
			}
		}
		if len(missing) > 0 {
			// Help texts do not name all options.
			return []Finding{Cannot("", expected, "%s is there, its help does not name %s", path, strings.Join(missing, " and "))}
		}
		return []Finding{Expect("", true, expected, path)}
	}
}

// longestHelp is how much of a help text is kept.
const longestHelp = 64 << 10

// runHelp returns what a program prints when it is asked for help, whatever its exit code.
func (n *Node) runHelp(ctx context.Context, name string, args []string) (string, error) {
	return Ask(ctx, n, Command, name+" "+strings.Join(args, " "), func(ctx context.Context) (string, error) {
		program, err := n.Roots.Program(name)
		if err != nil {
			return "", err
		}
		cmd := program.Command(ctx, args...)
		// A program that does not know the option reads commands for a daemon instead. It
		// must find none, and its standard input is empty.
		cmd.Env = append(cmd.Env, "CUDA_MPS_PIPE_DIRECTORY=/nonexistent", "CUDA_MPS_LOG_DIRECTORY=/nonexistent")
		out, err := cmd.CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			return "", fmt.Errorf("run %s: %w", name, err)
		}
		return string(out[:min(len(out), longestHelp)]), ctx.Err()
	})
}
