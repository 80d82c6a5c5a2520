// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package libtest builds the simulated libnvidia-ml.so for tests, and holds the
// library's own tests.
package libtest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/partage-dev/partage/test/must"
)

// Build makes libnvidia-ml.so and libcuda.so in folder out, which becomes
// absolute, and returns the path of the former. Where the environment's
// GPUSIM_LIB names a libnvidia-ml.so, it builds nothing and returns that.
// It needs make and a C compiler, and takes about two seconds.
func Build(ctx context.Context, out string) (string, error) {
	if given := os.Getenv("GPUSIM_LIB"); given != "" {
		return given, nil
	}
	return build(ctx, out)
}

func build(ctx context.Context, out string) (string, error) {
	sources, err := sources()
	if err != nil {
		return "", err
	}
	out, err = filepath.Abs(out)
	if err != nil {
		return "", fmt.Errorf("build the simulated library: %w", err)
	}
	cmd := exec.CommandContext(ctx, "make", "-s", "-j2", "-C", sources, "OUT="+out)
	// The tests may run below make, whose flags are not meant for this one.
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MFLAGS=")
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the simulated library: %w\n%s", err, text)
	}
	return filepath.Join(out, "libnvidia-ml.so"), nil
}

// Node is where the simulated library and programs of a node are built, once for all tests of a package.
type Node struct {
	once sync.Once
	dir  string
	err  error
}

// Dir builds them unless that was done, the programs from their packages' folders, and returns where they are.
func (n *Node) Dir(t testing.TB, programs ...string) string {
	t.Helper()
	n.once.Do(func() {
		if n.dir, n.err = os.MkdirTemp("", "gpusim"); n.err != nil {
			return
		}
		n.err = os.Chmod(n.dir, 0o755) // for other users
		_, err := build(context.Background(), filepath.Join(n.dir, "lib"))
		out, buildErr := exec.CommandContext(context.Background(), "go", append([]string{"build", "-o", filepath.Join(n.dir, "bin") + "/"}, programs...)...).CombinedOutput()
		if n.err = errors.Join(n.err, err, buildErr); n.err != nil {
			n.err = fmt.Errorf("%w\n%s", n.err, out)
		}
	})
	must.Do(t, n.err, "build a node's programs")
	return n.dir
}

// Remove removes what was built.
func (n *Node) Remove() { _ = os.RemoveAll(n.dir) }

// sources finds the library's folder from the working folder, which in a test
// is the package's. It reads all of the sources, so that go test knows that a
// result depends on them and does not take it from its cache after a change.
func sources() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the simulated library's sources: %w", err)
	}
	for {
		lib := filepath.Join(dir, "test", "gpusim", "lib")
		if _, err := os.Stat(filepath.Join(lib, "Makefile")); err == nil {
			return lib, errors.Join(readAll(lib), readAll(filepath.Join(lib, "..", "state")))
		}
		if parent := filepath.Dir(dir); parent != dir {
			dir = parent
			continue
		}
		return "", errors.New("find the simulated library's sources: not inside the repository")
	}
}

func readAll(dir string) error {
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		_, err = os.ReadFile(path)
		return err
	})
	if err != nil {
		return fmt.Errorf("read the simulated library's sources: %w", err)
	}
	return nil
}
