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
)

// Build makes libnvidia-ml.so and libcuda.so in folder out, which becomes
// absolute, and returns the path of the former. Where the environment's
// GPUSIM_LIB names a libnvidia-ml.so, it builds nothing and returns that.
// It needs make and a C compiler, and takes about two seconds.
func Build(ctx context.Context, out string) (string, error) {
	if given := os.Getenv("GPUSIM_LIB"); given != "" {
		return given, nil
	}
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
