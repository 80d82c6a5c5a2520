// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"bufio"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// TestExit: how a process ended that was adopted is known, whether its parent waits for it
// at once or never. Before Linux 6.15 it is not known in the first case; never is it wrong.
func TestExit(t *testing.T) {
	for name, end := range map[string]struct {
		signal unix.Signal
		want   string
		killed bool
	}{
		"killed":         {unix.SIGKILL, "signal 9 (SIGKILL)", true},
		"exits properly": {unix.SIGTERM, "exit status 0", false},
		"faults":         {unix.SIGSEGV, "signal 11 (SIGSEGV)", true},
	} {
		for waits, wait := range map[string]bool{"": false, ", its parent waits": true} {
			t.Run(name+waits, func(t *testing.T) {
				t.Parallel()
				cmd := exec.Command("sh", "-c", `trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done`)
				// It says when it is ready for signals.
				output, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				must(t, cmd.Start())
				id, err := Identify(cmd.Process.Pid)
				if err != nil {
					t.Fatal(err)
				}
				unwatched := make(chan struct{})
				t.Cleanup(func() { close(unwatched) })
				p, err := Adopt(id, unwatched)
				if err != nil {
					t.Fatal(err)
				}
				if wait {
					go func() { _, _ = cmd.Process.Wait() }()
				}
				if _, err := bufio.NewReader(output).ReadString('\n'); err != nil {
					t.Fatal(err)
				}
				must(t, id.Signal(end.signal))
				<-p.Done()
				if wait && !p.Exit().Known {
					t.Skip("this kernel does not tell after the parent has waited")
				}
				if got := p.Exit(); got.String() != end.want || got.Killed() != end.killed || p.How() != end.want {
					t.Errorf("got %+v, %v, want %s", got, p.How(), end.want)
				}
			})
		}
	}
}
