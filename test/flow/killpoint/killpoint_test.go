// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package killpoint

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// roleVariable makes the test program one of the programs that are supervised,
// in the folder that folderVariable names.
const (
	roleVariable   = "PARTAGE_KILLPOINT_ROLE"
	folderVariable = "PARTAGE_KILLPOINT_FOLDER"
)

func TestMain(m *testing.M) {
	LaunchIfAsked()
	roles := map[string]func(dir string) error{"writer": write, "threads": threads, "parent": parent, "child": child}
	role := roles[os.Getenv(roleVariable)]
	if role == nil {
		os.Exit(m.Run())
	}
	if err := play(role); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// play says that it is ready, waits for a line, and acts.
func play(role func(dir string) error) error {
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	if err := role(os.Getenv(folderVariable)); err != nil {
		return err
	}
	fmt.Println("done")
	return nil
}

// write replaces a file, as a journal does, and locks as the simulated library does.
func write(dir string) error {
	path, temporary := filepath.Join(dir, "file"), filepath.Join(dir, "temporary")
	file, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = file.WriteString("content")
	err = errors.Join(err, file.Sync(), file.Close(), os.Rename(temporary, path))
	if err != nil {
		return err
	}
	// None of this leaves anything.
	if _, err := os.ReadFile(path); err != nil {
		return err
	}
	fmt.Println("read")

	file, err = os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	for _, kind := range []int16{unix.F_WRLCK, unix.F_UNLCK} {
		command := unix.F_OFD_SETLKW
		if kind == unix.F_UNLCK {
			command = unix.F_OFD_SETLK
		}
		if err := unix.FcntlFlock(file.Fd(), command, &unix.Flock_t{Type: kind, Len: 1}); err != nil {
			return err
		}
	}
	return errors.Join(file.Close(), os.Mkdir(filepath.Join(dir, "folder"), 0o700), os.Remove(path))
}

// program is a supervised run of this test program.
type program struct {
	supervisor *Supervisor
	cmd        *exec.Cmd
	output     *bufio.Reader
	start      func()
}

func newProgram(t *testing.T, role, dir string) *program {
	t.Helper()
	self := must.Get(os.Executable())(t)
	p := &program{cmd: exec.CommandContext(t.Context(), self)}
	p.cmd.Env = append(os.Environ(), roleVariable+"="+role, folderVariable+"="+dir)
	p.cmd.Stderr = os.Stderr
	output := must.Get(p.cmd.StdoutPipe())(t)
	input, err := p.cmd.StdinPipe()
	must.Do(t, err)
	p.supervisor, err = Start(p.cmd)
	if errors.Is(err, ErrForbidden) {
		t.Skip(err)
	}
	must.Do(t, err)
	p.output = bufio.NewReader(output)
	p.start = func() {
		must.Get(input.Write([]byte("\n")))(t)
	}
	if line, err := p.output.ReadString('\n'); line != "ready\n" {
		t.Fatalf("the program said %q: %v", line, err)
	}
	return p
}

// finish waits for the program's end and returns what it has done.
func (p *program) finish(t *testing.T) []Effect {
	t.Helper()
	for {
		if _, err := p.output.ReadString('\n'); err != nil {
			break
		}
	}
	err := p.cmd.Wait()
	<-p.supervisor.Ended()
	effects, killed := p.supervisor.Disarm()
	if !killed && err != nil {
		t.Fatal(err)
	}
	if killed {
		status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
		if !ok || status.Signal() != syscall.SIGKILL {
			t.Fatalf("the program ended with %v, want SIGKILL", p.cmd.ProcessState)
		}
	}
	return effects
}

// names are calls and targets without what differs between architectures.
func names(dir string, effects []Effect) []string {
	var all []string
	for _, e := range effects {
		name := strings.ReplaceAll(e.String(), dir+"/", "")
		for _, old := range []string{"mkdirat", "renameat2", "renameat", "unlinkat"} {
			name = strings.Replace(name, old+" ", strings.TrimSuffix(strings.TrimSuffix(old, "2"), "at")+" ", 1)
		}
		all = append(all, name)
	}
	return all
}

// TestKilled kills the writer before each effect and checks what it has left.
func TestKilled(t *testing.T) {
	// Each line is an effect and what is there after it.
	steps := []struct{ effect, left string }{
		{"", ""},
		{"openat temporary", "temporary:"},
		{"write temporary", "temporary:content"},
		{"fsync temporary", "temporary:content"},
		{"rename temporary file", "file:content"},
		{"fcntl(F_OFD_SETLK) file", "file:content"},
		{"mkdir folder", "file:content folder/"},
		{"unlink file", "folder/"},
	}
	var effects []string
	for _, s := range steps[1:] {
		effects = append(effects, s.effect)
	}
	for n := range len(steps) + 1 {
		dir := t.TempDir()
		p := newProgram(t, "writer", dir)
		p.supervisor.Arm(n)
		p.start()
		got := names(dir, p.finish(t))
		done, left := len(effects), steps[len(steps)-1].left
		if n > 0 && n <= len(effects) {
			done, left = n, steps[n-1].left
		}
		expect.Same(t, got, effects[:done], "killed before effect", n, "effects")
		expect.Same(t, content(t, dir), left, "killed before effect", n, "left")
	}
}

// content writes a folder in one line.
func content(t *testing.T, dir string) string {
	t.Helper()
	entries := must.Get(os.ReadDir(dir))(t)
	var all []string
	for _, e := range entries {
		if e.IsDir() {
			all = append(all, e.Name()+"/")
			continue
		}
		data := must.Get(os.ReadFile(filepath.Join(dir, e.Name())))(t)
		all = append(all, e.Name()+":"+string(data))
	}
	return strings.Join(all, " ")
}

const threadCount, foldersEach = 8, 20

// threads makes folders on many threads at once.
func threads(dir string) error {
	var wg sync.WaitGroup
	errs := make([]error, threadCount)
	for i := range threadCount {
		wg.Go(func() {
			for j := range foldersEach {
				errs[i] = errors.Join(errs[i], os.Mkdir(filepath.Join(dir, fmt.Sprintf("%d-%d", i, j)), 0o700))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// TestThreads: each effect is counted once, and what comes after the kill does
// not happen on any thread.
func TestThreads(t *testing.T) {
	const all = threadCount * foldersEach
	for _, n := range []int{0, 1, 2, 50, all, all + 1} {
		dir := t.TempDir()
		p := newProgram(t, "threads", dir)
		p.supervisor.Arm(n)
		p.start()
		effects := p.finish(t)
		wantEffects, wantFolders := all, all
		if n > 0 && n <= all {
			wantEffects, wantFolders = n, n-1
		}
		expect.Equal(t, len(effects), wantEffects, "killed before effect", n, "effects were counted")
		entries := must.Get(os.ReadDir(dir))(t)
		// An effect that was let through need not be over when the program dies.
		if len(entries) > wantFolders || len(entries) < wantFolders-threadCount {
			t.Errorf("killed before effect %d: %d folders are there, want %d", n, len(entries), wantFolders)
		}
	}
}

// TestNotArmed: without Arm nothing is counted, and the program runs.
func TestNotArmed(t *testing.T) {
	dir := t.TempDir()
	p := newProgram(t, "writer", dir)
	p.start()
	expect.Len(t, p.finish(t), 0, "effects")
	expect.Equal(t, content(t, dir), "folder/", "left")
}

// TestCalls: the filter reaches every call, since its jumps are short, and no
// call is there twice.
func TestCalls(t *testing.T) {
	var numbers []uintptr
	for _, c := range calls {
		if slices.Contains(numbers, c.number) {
			t.Errorf("%s is there twice", c.name)
		}
		numbers = append(numbers, c.number)
	}
	if program := filter(calls); len(program) > unix.BPF_MAXINSNS {
		t.Errorf("the filter has %d instructions", len(program))
	}
}

// parent starts a child, waits until that has made a folder, and makes one.
func parent(dir string) error {
	cmd := exec.CommandContext(context.Background(), os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"=child")
	input, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewReader(output)
	for _, step := range []func() error{
		func() error { _, err := lines.ReadString('\n'); return err },
		func() error { _, err := input.Write([]byte("\n")); return err },
		func() error { _, err := lines.ReadString('\n'); return err },
		func() error { return os.Mkdir(filepath.Join(dir, "parent"), 0o700) },
		input.Close, cmd.Wait,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// child makes a folder, and another one when its parent has ended.
func child(dir string) error {
	if err := os.Mkdir(filepath.Join(dir, "child"), 0o700); err != nil {
		return err
	}
	fmt.Println("made")
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		return err
	}
	return os.Mkdir(filepath.Join(dir, "later"), 0o700)
}

// TestChildren: what a child does does not count, and it lives on when its parent
// is killed.
func TestChildren(t *testing.T) {
	dir := t.TempDir()
	p := newProgram(t, "parent", dir)
	p.supervisor.Arm(1)
	p.start()
	effects := p.finish(t)
	if len(effects) != 1 || !strings.HasSuffix(effects[0].String(), "/parent") {
		t.Errorf("effects: %v", effects)
	}
	expect.Equal(t, content(t, dir), "child/ later/", "left")
}
