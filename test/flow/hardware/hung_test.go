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
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/hardware/settings"
	"github.com/partage-dev/partage/test/must"
)

// hangLimit is what only a wait without a bound reaches.
const hangLimit = 30 * time.Second

// TestHungSMI: an nvidia-smi that does not end when it is killed is left behind, and said to be.
func TestHungSMI(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	smi := must.Get(settings.NewSMI(host.Roots{Driver: n.Root}))(t)
	gate := n.Inject(t, machine.Fault{Function: "nvidia-smi", GPU: -1, Hang: true, Effect: machine.Proceed})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answer := make(chan error, 1)
	go func() {
		_, err := smi.Read(ctx)
		answer <- err
	}()
	must.Do(t, harness.Eventually(t.Context(), gate.CheckStruck))
	pid := runs(t, filepath.Join(n.Root, "usr/bin/nvidia-smi"))
	thaw := harness.Freeze(t, pid)
	cancel()
	var err error
	select {
	case err = <-answer:
	case <-time.After(hangLimit):
		t.Fatal("it is waited for without a bound")
	}
	if err == nil || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "process "+strconv.Itoa(pid)+" WAS LEFT BEHIND") {
		t.Errorf("got %v", err)
	}
	expect.Do(t, expect.Err(os.Stat("/proc/"+strconv.Itoa(pid))), "it has ended, so this shows nothing")
	thaw()
	gate.Remove(t)
}

// runs returns the process of a program.
func runs(t *testing.T, program string) int {
	t.Helper()
	for _, link := range must.Get(filepath.Glob("/proc/[0-9]*/exe"))(t) {
		if path, err := os.Readlink(link); err == nil && path == program {
			return must.Get(strconv.Atoi(filepath.Base(filepath.Dir(link))))(t)
		}
	}
	t.Fatalf("%s does not run", program)
	return 0
}
