// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"

	gpusim "github.com/partage-dev/partage/test/gpusim/mps"
)

const (
	serverName       = "nvidia-cuda-mps-server"
	clientName       = "cuda-client"
	superviseCommand = "supervise"
	// idleVariable makes the server's program do nothing.
	idleVariable = "PARTAGE_TEST_IDLE"
	testsPerCore = 3
)

// TestMain makes the test program also the simulated driver's programs, the
// supervisor's launcher, and a supervisor that can be killed.
func TestMain(m *testing.M) {
	switch name := filepath.Base(os.Args[0]); {
	case name == programName && len(os.Args) == 1:
		os.Exit(exitCode(runControlClient()))
	case name == programName:
		os.Exit(exitCode(runControlDaemon(os.Args[1:])))
	case name == serverName && os.Getenv(idleVariable) != "":
		<-terminated()
	case name == serverName:
		os.Exit(exitCode(runServer()))
	case name == clientName:
		os.Exit(exitCode(runClient(os.Args[1], os.Args[2])))
	case len(os.Args) > 1 && os.Args[1] == tenantCommand:
		os.Exit(exitCode(runTenant(os.Args[2], os.Args[3:])))
	case len(os.Args) > 1 && os.Args[1] == LaunchCommand:
		os.Exit(exitCode(Launch(os.Args[2:])))
	case len(os.Args) > 1 && os.Args[1] == containerCommand:
		os.Exit(exitCode(runContainer(os.Args[2], os.Args[3])))
	case len(os.Args) > 1 && os.Args[1] == fewFilesCommand:
		os.Exit(exitCode(superviseWithFewFiles(os.Args[2], os.Args[3], os.Args[4], os.Args[5:])))
	case len(os.Args) > 1 && os.Args[1] == superviseCommand:
		os.Exit(exitCode(supervise(os.Args[2], os.Args[3])))
	default:
		flag.Parse()
		// Most of their time goes into waiting.
		if given := flag.Lookup("test.parallel"); given.Value.String() == given.DefValue {
			_ = given.Value.Set(strconv.Itoa(testsPerCore * runtime.GOMAXPROCS(0)))
		}
		os.Exit(m.Run())
	}
}

// exitCode prints an error, where a daemon's log has it.
func exitCode(err error) int {
	if err == nil {
		return 0
	}
	if !errors.Is(err, gpusim.ErrCommand) {
		fmt.Println(err)
	}
	return 1
}

func terminated() <-chan os.Signal {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	return signals
}

// supervise is a supervisor in a process of its own.
func supervise(dir, root string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := Run(ctx, options(dir, root)); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
