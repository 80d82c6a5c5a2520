// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/hardware/settings"
)

// hangLimit is what only a wait without a bound reaches.
const hangLimit = 30 * time.Second

// TestHungSMI: an nvidia-smi that does not end when it is killed is left behind, and said to be.
func TestHungSMI(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	smi, err := settings.NewSMI(host.Roots{Driver: n.Root})
	if err != nil {
		t.Fatal(err)
	}
	gate := n.Inject(t, machine.Fault{Function: "nvidia-smi", GPU: -1, Hang: true, Effect: machine.Proceed})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answer := make(chan error, 1)
	go func() {
		_, err := smi.Read(ctx)
		answer <- err
	}()
	if err := harness.Eventually(t.Context(), gate.CheckStruck); err != nil {
		t.Fatal(err)
	}
	pid := runs(t, filepath.Join(n.Root, "usr/bin/nvidia-smi"))
	thaw := harness.Freeze(t, pid)
	cancel()
	select {
	case err = <-answer:
	case <-time.After(hangLimit):
		t.Fatal("it is waited for without a bound")
	}
	if err == nil || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "process "+strconv.Itoa(pid)+" WAS LEFT BEHIND") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat("/proc/" + strconv.Itoa(pid)); err != nil {
		t.Errorf("it has ended, so this shows nothing: %v", err)
	}
	thaw()
	gate.Remove(t)
}

// runs returns the process of a program.
func runs(t *testing.T, program string) int {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if path, err := os.Readlink(link); err == nil && path == program {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("%s does not run", program)
	return 0
}
