// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

// probing makes the test binary a program that tells what it sees.
const probing = "PARTAGE_TEST_PROBE"

func TestMain(m *testing.M) {
	if os.Getenv(probing) != "" {
		folder, err := os.Getwd()
		_, marker := os.Stat("/marker")
		fmt.Println(folder, err, marker == nil, len(os.Environ()), os.Args[1:])
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func install(t *testing.T, root, path, content string) {
	t.Helper()
	write(t, root, path, content)
	must.Do(t, os.Chmod(filepath.Join(root, path), 0o755))
}

func TestProgram(t *testing.T) {
	const smi, loader = "nvidia-smi", "lib64/ld-linux-x86-64.so.2"
	tests := map[string]struct {
		make func(t *testing.T, root string)
		// system tells whether the root is entered; file is where the program is.
		system bool
		file   string
		says   string // for those that fail
	}{
		"driver only": {
			make: func(t *testing.T, root string) { install(t, root, "bin/"+smi, "#!/bin/sh\n") }, file: "bin/" + smi,
		},
		"driver only, by way of a link": {
			make: func(t *testing.T, root string) {
				install(t, root, "opt/nvidia/"+smi, "#!/bin/sh\n")
				link(t, root, "usr/bin/"+smi, "/opt/nvidia/"+smi)
			},
			file: "opt/nvidia/" + smi,
		},
		"whole system": {
			make: func(t *testing.T, root string) {
				install(t, root, "usr/bin/"+smi, "#!/bin/sh\n")
				install(t, root, "usr/"+loader, "")
				link(t, root, "lib64", "usr/lib64")
			},
			file: "usr/bin/" + smi, system: true,
		},
		"whole system for Arm": {
			make: func(t *testing.T, root string) {
				install(t, root, "usr/bin/"+smi, "#!/bin/sh\n")
				install(t, root, "lib/ld-linux-aarch64.so.1", "")
			},
			file: "usr/bin/" + smi, system: true,
		},
		"whole system with links that are meant within it": {
			make: func(t *testing.T, root string) {
				install(t, root, "usr/lib/nvidia/current/"+smi, "#!/bin/sh\n")
				link(t, root, "etc/alternatives/"+smi, "/usr/lib/nvidia/current/"+smi)
				link(t, root, "usr/bin/"+smi, "/etc/alternatives/"+smi)
				install(t, root, "usr/"+loader, "")
				link(t, root, "lib64", "/usr/lib64")
			},
			file: "usr/bin/" + smi, system: true,
		},
		"first of two": {
			make: func(t *testing.T, root string) {
				install(t, root, "usr/bin/"+smi, "#!/bin/sh\n")
				install(t, root, "opt/bin/"+smi, "#!/bin/sh\n")
			},
			file: "usr/bin/" + smi,
		},
		"the one that can be executed": {
			make: func(t *testing.T, root string) {
				write(t, root, "usr/bin/"+smi, "")
				install(t, root, "opt/bin/"+smi, "#!/bin/sh\n")
			},
			file: "opt/bin/" + smi,
		},
		"no program":     {make: func(*testing.T, string) {}, says: "no " + smi},
		"not executable": {make: func(t *testing.T, root string) { write(t, root, "usr/bin/"+smi, "") }, says: "cannot be executed"},
		"a folder": {
			make: func(t *testing.T, root string) { write(t, root, "usr/bin/"+smi+"/file", "") }, says: "cannot be executed",
		},
		"a link to nothing": {
			make: func(t *testing.T, root string) { link(t, root, "usr/bin/"+smi, "/gone") }, says: "no " + smi,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			root, roots := tree(t)
			test.make(t, root)
			got, err := roots.Program(smi)
			if test.says != "" {
				if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), test.says) || !strings.Contains(err.Error(), root) {
					t.Errorf("got %v", err)
				}
				return
			}
			want := Program{Path: filepath.Join(root, test.file)}
			if test.system {
				want = Program{Root: root, Path: "/" + test.file}
			}
			if diff := cmp.Diff(want, Program{Root: got.Root, Path: got.Path}); diff != "" || err != nil {
				t.Errorf("%v, -want +got:\n%s", err, diff)
			}
			folder := map[bool]string{true: "/usr/bin", false: filepath.Join(root, "usr/bin")}[test.system]
			env := strings.Join(got.Env, "\n")
			if !strings.HasPrefix(env, "PATH="+folder+":") || strings.Contains(env, "LD_LIBRARY_PATH="+root) == test.system {
				t.Errorf("environment: %s", env)
			}
		})
	}
	t.Run("links in a circle", func(t *testing.T) {
		root, roots := tree(t)
		link(t, root, "usr/bin/"+smi, smi)
		if _, err := roots.Program(smi); !errors.Is(err, unix.ELOOP) || !strings.Contains(err.Error(), root) {
			t.Errorf("got %v", err)
		}
	})
	// The loader of such a system does not look there by itself.
	t.Run("beside libraries in a folder of NVIDIA's", func(t *testing.T) {
		root, roots := tree(t)
		install(t, root, loader, "")
		install(t, root, "usr/local/nvidia/bin/"+smi, "#!/bin/sh\n")
		write(t, root, "usr/local/nvidia/lib64/"+nvmlLibrary, "")
		got, err := roots.Program(smi)
		if err != nil || got.Root != root || got.Path != "/usr/local/nvidia/bin/"+smi || !slices.Contains(got.Env, "LD_LIBRARY_PATH=/usr/local/nvidia/lib64") {
			t.Errorf("%+v, %v", got, err)
		}
		// Where the system has them itself, another version may lie there.
		write(t, root, "usr/lib64/"+nvmlLibrary, "")
		if got, err := roots.Program(smi); err != nil || len(got.Env) != 1 {
			t.Errorf("%+v, %v", got, err)
		}
	})
	t.Run("of the running system", func(t *testing.T) {
		got, err := Roots{}.Program("sh")
		if err != nil || got.Root != "" || !strings.HasSuffix(got.Path, "/bin/sh") || len(got.Env) != 1 {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

func TestResolveIn(t *testing.T) {
	root := t.TempDir()
	write(t, root, "a/b/file", "")
	link(t, root, "a/up", "../../../../a/./b//")
	link(t, root, "a/absolute", "/a/up")
	link(t, root, "relative", "a/absolute/file")
	for path, want := range map[string]string{
		"a/b/file": "a/b/file", "/a/up/file": "a/b/file", "a/absolute/../b": "a/b", "relative": "a/b/file", "../..": "", "": "",
	} {
		if got, err := PathIn(root, path); err != nil || got != filepath.Join(root, want) {
			t.Errorf("%q: got %s, %v, want %s", path, got, err, want)
		}
	}
	for path, want := range map[string]error{"a/c": fs.ErrNotExist, "a/c/../b": fs.ErrNotExist, "relative/x": unix.ENOTDIR} {
		if got, err := PathIn(root, path); !errors.Is(err, want) {
			t.Errorf("%q: got %s, %v, want %v", path, got, err, want)
		}
	}
}

// A program runs in its root, with its environment and nothing else.
func TestCommandInRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can enter another root")
	}
	root, roots := tree(t)
	self := must.Get(os.ReadFile("/proc/self/exe"))(t)
	install(t, root, "usr/bin/probe", string(self))
	install(t, root, "lib64/ld-linux-x86-64.so.2", "")
	write(t, root, "marker", "")
	program := must.Get(roots.Program("probe"))(t)
	cmd := program.Command(t.Context(), "-x", "1")
	cmd.Env = append(cmd.Env, probing+"=1")
	out, err := cmd.CombinedOutput()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EIO) {
		// As with -race. The loader in this root is an empty file.
		t.Skipf("this test binary needs a dynamic loader: %v", err)
	}
	if want := "/ <nil> true 2 [-x 1]\n"; err != nil || string(out) != want {
		t.Errorf("got %q, %v, want %q", out, err, want)
	}
}

// At the end of the context nothing of it is left.
func TestCommandEnds(t *testing.T) {
	root, roots := tree(t)
	install(t, root, "usr/bin/slow", "#!/bin/sh\nPATH=/usr/bin:/bin\nsleep 1000 &\necho $!\nwait\n")
	program := must.Get(roots.Program("slow"))(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := program.Command(ctx)
	out := must.Get(cmd.StdoutPipe())(t)
	must.Do(t, cmd.Start())
	lines := bufio.NewScanner(out)
	lines.Scan()
	child := must.Get(strconv.Atoi(lines.Text()))(t)
	pidfd, err := unix.PidfdOpen(child, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	cancel()
	var ended *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &ended) && !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
	// A pidfd can be read from when its process has ended.
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 10_000)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 10_000)
	}
	if n != 1 || err != nil {
		t.Errorf("what it started runs on: %v", err)
	}
	// A context that ends later does no harm.
	if err := cmd.Cancel(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("again: %v", err)
	}
}
