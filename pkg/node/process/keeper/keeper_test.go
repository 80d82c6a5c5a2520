// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/wait"
	"github.com/partage-dev/partage/test/must"
)

// keepCommand makes the test program a keeper: of a starter, a lock, and a program with its arguments.
const keepCommand = "keep"

func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != keepCommand {
		os.Exit(m.Run())
	}
	starter, err := strconv.Atoi(os.Args[2])
	if err != nil {
		panic(err)
	}
	status, err := Keep(os.Args[3], Program{Starter: starter, Path: os.Args[4], Args: os.Args[5:], Env: os.Environ()})
	if err != nil {
		fmt.Println(err)
		status = 99
	}
	os.Exit(status)
}

func newLock(t *testing.T) string {
	t.Helper()
	lock := filepath.Join(t.TempDir(), "lock")
	must.Do(t, os.WriteFile(lock, nil, 0o600))
	return lock
}

// keep starts the keeper of a shell.
func keep(t *testing.T, lock, script string) *process.Process {
	t.Helper()
	return keepFor(t, os.Getpid(), lock, script)
}

func keepFor(t *testing.T, starter int, lock, script string) *process.Process {
	t.Helper()
	self := must.Get(os.Executable())(t)
	cmd := exec.Command(self, keepCommand, strconv.Itoa(starter), lock, "/bin/sh", "-c", script)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	p := must.Get(process.Start(cmd))(t)
	t.Cleanup(func() {
		must.Do(t, End(context.Background(), lock))
	})
	return p
}

// pidIn waits for a PID in a file.
func pidIn(t *testing.T, path string) process.ID {
	t.Helper()
	var id process.ID
	eventually(t, "a PID in "+path, func() bool {
		text, err := os.ReadFile(path)
		if err != nil || !strings.HasSuffix(string(text), "\n") {
			return false
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err == nil {
			id, err = process.Identify(pid)
		}
		return err == nil
	})
	return id
}

func eventually(t *testing.T, what string, question func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := wait.Until(ctx, func() (bool, error) { return question(), nil }); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// orphan makes a shell start a process that nothing connects with it any more, and that does not end when it is asked to.
func orphan(path string) string {
	return fmt.Sprintf(`(env -i /usr/bin/setsid /bin/sh -c 'trap "" TERM HUP; echo $$ >%s; while :; do sleep 1; done' &) ; `, path)
}

// TestEnd shows that nothing is left of what a program has started when its keeper has ended, and that the keeper ends
// with its program, as that did.
func TestEnd(t *testing.T) {
	for name, test := range map[string]struct {
		then string
		act  func(t *testing.T, lock string, program process.ID)
		how  string
	}{
		"told":              {"wait; sleep 1000", func(t *testing.T, lock string, _ process.ID) { t.Helper(); mustEnd(t, lock) }, "signal 9 (SIGKILL)"},
		"program killed":    {"sleep 1000", func(_ *testing.T, _ string, program process.ID) { _ = program.Signal(unix.SIGKILL) }, "signal 9 (SIGKILL)"},
		"program succeeds":  {"exit 0", nothing, "exit status 0"},
		"program fails":     {"exit 3", nothing, "exit status 3"},
		"program cannot go": {"exec /does/not/exist", nothing, "exit status 127"},
	} {
		t.Run(name, func(t *testing.T) {
			lock := newLock(t)
			dir := filepath.Dir(lock)
			p := keep(t, lock, fmt.Sprintf("echo $$ >%s/program; ", dir)+orphan(dir+"/orphan")+
				fmt.Sprintf("while ! [ -s %s/orphan ]; do sleep 0.05; done; while ! [ -e %[1]s/go ]; do sleep 0.05; done; ", dir)+test.then)
			program, left := pidIn(t, dir+"/program"), pidIn(t, dir+"/orphan")
			if !left.DescendsFrom(p.ID) || !program.DescendsFrom(p.ID) || p.DescendsFrom(program) {
				t.Error("it is not seen who has started whom")
			}
			if id, found, err := Of(lock); err != nil || !found || id != p.ID {
				t.Errorf("the lock is that of %v, %t, %v, want %v", id, found, err, p.ID)
			}
			must.Do(t, os.WriteFile(dir+"/go", nil, 0o600))
			test.act(t, lock, program)
			<-p.Done()
			if left.Alive() || program.Alive() {
				t.Error("something goes on")
			}
			if how := How(p); how != test.how {
				t.Errorf("it ended with %q, want %q", how, test.how)
			}
			if id, found, err := Of(lock); found || err != nil {
				t.Errorf("the lock is still that of %v, %v", id, err)
			}
		})
	}
}

func nothing(*testing.T, string, process.ID) {}

func mustEnd(t *testing.T, lock string) {
	t.Helper()
	must.Do(t, End(t.Context(), lock))
}

// TestKilled shows that a program does not outlive a keeper that is killed.
func TestKilled(t *testing.T) {
	lock := newLock(t)
	program := filepath.Join(filepath.Dir(lock), "program")
	p := keep(t, lock, fmt.Sprintf("echo $$ >%s; exec sleep 1000", program))
	id := pidIn(t, program)
	must.Do(t, p.Signal(unix.SIGKILL))
	eventually(t, "the end of the program", func() bool { return !id.Alive() })
}

// TestOneKeeper shows that there is one at a time, and none of a file that is removed.
func TestOneKeeper(t *testing.T) {
	lock := newLock(t)
	first := keep(t, lock, "sleep 1000")
	eventually(t, "the keeper", func() bool { _, found, err := Of(lock); return found && err == nil })
	if _, err := Lock(lock); !errors.Is(err, ErrKept) {
		t.Errorf("got %v, want %v", err, ErrKept)
	}
	second := keep(t, lock, "sleep 1000")
	must.Do(t, first.Signal(unix.SIGTERM))
	eventually(t, "the second keeper", func() bool { id, _, err := Of(lock); return id == second.ID && err == nil })
	mustEnd(t, lock)
	file := must.Get(Lock(lock))(t)
	late := keep(t, lock, "sleep 1000")
	must.Do(t, errors.Join(os.Remove(lock), file.Close()))
	<-late.Done()
	if late.How() != "exit status 99" {
		t.Errorf("a keeper beside who removes the file: %s", late.How())
	}
	if file, err := Lock(lock); file != nil || err != nil {
		t.Errorf("got %v, %v", file, err)
	}
	if _, err := take(lock, unix.F_SETLK); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v, want %v", err, fs.ErrNotExist)
	}
	if _, found, err := Of(lock); found || err != nil {
		t.Errorf("found %t, %v", found, err)
	}
}

// TestOrphaned shows that a keeper starts nothing whose starter has ended before the keeper had the lock: who came after that
// has looked for a keeper, and found none.
func TestOrphaned(t *testing.T) {
	lock := newLock(t)
	started := filepath.Join(filepath.Dir(lock), "started")
	p := keepFor(t, os.Getppid(), lock, "echo >"+started)
	<-p.Done()
	if p.How() != "exit status 99" {
		t.Error(p.How())
	}
	if _, err := os.Lstat(started); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the program has run: %v", err)
	}
}
