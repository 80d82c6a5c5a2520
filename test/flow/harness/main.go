// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/knownfailures"
	"github.com/partage-dev/partage/test/must"
)

// Programs are the files that the tests run.
type Programs struct {
	Driver, Supervisor string
	// Probe is the CUDA program that the conformance command runs.
	Probe string
	// Client is the stand-in of a program that uses CUDA.
	Client string
	// Hook checks limits before a container starts. NVIDIAHook does nothing.
	Hook, NVIDIAHook string
	// HealthProbe is what the kubelet's probes run.
	HealthProbe string
	Assets      sysroot.Assets
}

// BuildTags are those of releases.
const BuildTags = "grpcnotrace,urfave_cli_no_template"

// StaticTags and StaticLDFlags are those with which releases build NVIDIA's hook.
const (
	StaticTags    = "netgo,osusergo"
	StaticLDFlags = "-linkmode external -extldflags -static"
)

// Built is what Main has built.
var Built Programs

// Main is TestMain of each package of flow tests.
func Main(m *testing.M) {
	killpoint.LaunchIfAsked()
	enterContainerIfAsked()
	runAlone()
	flag.Parse()
	shareCores()
	fmt.Println("enumerations:", TheSample())
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "flow:", err)
		code = 1
	}
	os.Exit(code)
}

// shareCores lets more tests run at the same time than there are cores, unless the
// command line says how many: most of their time goes into waiting.
func shareCores() {
	const testsPerCore = 3
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		// It fails for what is no number.
		_ = flag.Set("test.parallel", strconv.Itoa(testsPerCore*runtime.GOMAXPROCS(0)))
	}
}

func run(m *testing.M) (int, error) {
	root, err := moduleRoot()
	if err != nil {
		return 0, err
	}
	dir := filepath.Join(root, "_output/flow")
	if err := build(root, dir); err != nil {
		return 0, err
	}
	code := m.Run()
	now := time.Now()
	return code, os.Chtimes(lockPath(dir), now, now)
}

// lockPath is the file that serializes builds into a folder.
func lockPath(dir string) string { return filepath.Join(dir, ".lock") }

// keepOutOfCache keeps go test from caching the result of a test: it does not know the
// sources of the programs that the test runs. It never caches where a file that the
// test has opened is as new as run leaves this one.
func keepOutOfCache(t testing.TB) {
	t.Helper()
	file := must.Get(os.Open(lockPath(filepath.Dir(Built.Driver))))(t)
	_ = file.Close()
}

// moduleRoot is the folder of the module that the tests belong to.
func moduleRoot() (string, error) {
	out, err := exec.CommandContext(context.Background(), "go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// build compiles the driver and the simulator from the sources that are tested. The
// programs stay in the folder, so that nothing is linked again that has not changed.
// Test programs of several packages may do this at the same time.
func build(root, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	Built = Programs{
		Driver:      filepath.Join(dir, "gpu-kubelet-plugin"),
		Supervisor:  filepath.Join(dir, "mps-supervisor"),
		Probe:       filepath.Join(dir, "cuda-probe"),
		Client:      filepath.Join(dir, "cuda-client"),
		Hook:        filepath.Join(dir, "partage-hook"),
		NVIDIAHook:  filepath.Join(dir, "nvidia-cdi-hook"),
		HealthProbe: filepath.Join(dir, "health-probe"),
		Assets: sysroot.Assets{
			NVML:       filepath.Join(dir, "libnvidia-ml.so"),
			CUDA:       filepath.Join(dir, "libcuda.so"),
			NVIDIASMI:  filepath.Join(dir, "nvidia-smi"),
			MPSControl: filepath.Join(dir, "nvidia-cuda-mps-control"),
			MPSServer:  filepath.Join(dir, "nvidia-cuda-mps-server"),
		},
	}
	if knownfailures.InChild() {
		return nil
	}
	lock, err := os.Create(lockPath(dir))
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", dir, err)
	}
	// What it does in a container is not for these tests.
	if _, err := os.Stat(Built.NVIDIAHook); err != nil {
		if err := os.WriteFile(Built.NVIDIAHook, []byte("#!/bin/sh\n"), 0o755); err != nil {
			return err
		}
	}
	const simulator, tags = "./test/gpusim/cmd/", "-tags=" + BuildTags
	for _, command := range [][]string{
		{"make", "-s", "-C", "test/gpusim/lib", "OUT=" + dir},
		{
			"go", "build", tags, "-o", dir, simulator + "nvidia-smi", simulator + "nvidia-cuda-mps-control",
			simulator + "nvidia-cuda-mps-server", simulator + "cuda-client", "./cmd/gpu-kubelet-plugin", "./cmd/cuda-probe",
		},
		{"env", "CGO_ENABLED=0", "go", "build", tags, "-o", dir, "./cmd/mps-supervisor", "./cmd/partage-hook", "./cmd/health-probe"},
	} {
		cmd := exec.CommandContext(context.Background(), command[0], command[1:]...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", command, err, out)
		}
	}
	return nil
}
