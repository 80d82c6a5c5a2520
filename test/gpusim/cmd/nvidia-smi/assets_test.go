// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// built is where the assets are built, once for all tests.
var built struct {
	sync.Once
	dir string
	err error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

// assets builds the simulated library, this program and those of MPS.
func assets(t *testing.T) sysroot.Assets {
	t.Helper()
	built.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "gpusim"); built.err != nil {
			return
		}
		for _, command := range [][]string{
			{"make", "-s", "-C", "../../lib", "OUT=" + filepath.Join(built.dir, "lib")},
			{"go", "build", "-o", filepath.Join(built.dir, "bin") + "/", ".", "../nvidia-cuda-mps-control", "../nvidia-cuda-mps-server"},
		} {
			if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
				t.Logf("%s", out)
				built.err = err
				return
			}
		}
	})
	if built.err != nil {
		t.Fatalf("build the library and nvidia-smi: %v", built.err)
	}
	a, err := sysroot.AssetsIn(built.dir)
	if err != nil {
		t.Fatal(err)
	}
	return a
}
