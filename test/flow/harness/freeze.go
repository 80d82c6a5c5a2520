// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// freezer is where version 1 of cgroups can stop processes in a way that they do not even die when they are killed.
// Version 2 cannot.
const freezer = "/sys/fs/cgroup/freezer"

// Freeze makes processes ones that cannot be killed, as those that hang in the kernel, until the result is called, which is
// at the end of the test at the latest.
func Freeze(t testing.TB, pids ...int) (thaw func()) {
	t.Helper()
	dir, err := os.MkdirTemp(freezer, "partage-test-")
	if err != nil {
		t.Skipf("no process can be frozen here: %v", err)
	}
	state := filepath.Join(dir, "freezer.state")
	// The test's own context has ended when it cleans up.
	ctx := context.WithoutCancel(t.Context())
	set := func(want string) {
		err := Eventually(ctx, func() error {
			err := os.WriteFile(state, []byte(want), 0)
			got, readErr := os.ReadFile(state)
			if err = errors.Join(err, readErr); err == nil && strings.TrimSpace(string(got)) != want {
				err = fmt.Errorf("the processes are %s", got)
			}
			return err
		})
		expect.Do(t, err, dir, "to be", want)
	}
	thaw = func() { set("THAWED") }
	t.Cleanup(func() {
		thaw()
		for _, pid := range pids {
			_ = os.WriteFile(filepath.Join(freezer, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		}
		expect.Do(t, Eventually(ctx, func() error { return os.Remove(dir) }))
	})
	for _, pid := range pids {
		must.Do(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0), "freeze process", pid)
	}
	set("FROZEN")
	return thaw
}
