// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// fewFilesCommand makes a program a supervisor that got few open files from its container
// runtime, with or without the right to raise the hard limit.
const fewFilesCommand = "few-files"

func superviseWithFewFiles(soft, hard, privileged string, args []string) error {
	var limit unix.Rlimit
	if _, err := fmt.Sscan(soft+" "+hard, &limit.Cur, &limit.Max); err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	if privileged != strconv.FormatBool(true) {
		// It takes effect with the next program.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil {
			return err
		}
	}
	return fmt.Errorf("become a supervisor: %w", unix.Exec(self, append([]string{os.Args[0], superviseCommand}, args...), os.Environ()))
}

// TestOpenFiles: daemon and servers may open as many files as NVIDIA asks for, whatever
// the container runtime has given the supervisor. If they may not, one can see why.
func TestOpenFiles(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		soft, hard int // containerd 2.0 and later give 1024 and 524288
		privileged bool
		want       uint64
		message    string
	}{
		"soft limit too low":               {1024, 16384, false, 16384, ""},
		"hard limit too low":               {1024, 4096, true, 65536, ""},
		"hard limit that cannot be raised": {1024, 4096, false, 4096, "only 4096 files open and NVIDIA asks for at least 16384"},
		"hard limit that is enough":        {1024, 20000, false, 20000, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if raise, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0); err != nil || test.privileged && raise == 0 {
				t.Skipf("hard limits cannot be raised here: %v", err)
			}
			s := w.otherBy(fewFilesCommand, strconv.Itoa(test.soft), strconv.Itoa(test.hard), strconv.FormatBool(test.privileged))
			status := s.ensure(t, one)
			if status.Phase != mps.Running || !strings.Contains(status.Message, test.message) || (test.message == "") != (status.Message == "") {
				t.Errorf("got %s, %q, want %q", status.Phase, status.Message, test.message)
			}
			record := must.Get(w.folder(one.ID).load())(t)
			for _, pid := range append(status.Servers, record.Daemon.PID) {
				var got unix.Rlimit
				if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &got); err != nil || got.Cur != test.want {
					t.Errorf("PID %d may open %d files, %v, want %d", pid, got.Cur, err, test.want)
				}
			}
			expect.Do(t, s.Stop(t.Context(), one.ID))
		})
	}
}
