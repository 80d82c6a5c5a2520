// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// TestPartitionInPlaceOfIntention checks that a partition stays that an administrator makes where the driver was going to make
// one when it died: it had not even turned MIG mode on.
func TestPartitionInPlaceOfIntention(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	p.Ready(t)
	fault := n.Inject(t, machine.Fault{Function: "nvmlDeviceSetMigMode", GPU: 0, Effect: machine.KillBefore})
	c := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	if _, err := p.TryPrepare(t.Context(), c, harness.KubeletTimeout); err == nil {
		t.Fatal("the driver answered although it was killed")
	}
	<-p.Exited
	fault.Remove(t)
	n.RunSMI(t, "-i 0 -mig 1")
	n.RunSMI(t, "mig -i 0 -cgi 1g.10gb:4 -C")
	p = n.Start(t, harness.Frequent...)
	p.Ready(t)
	p.MustUnprepare(t, c)
	if len(n.Instances(t)) == 0 {
		t.Error("the administrator's partition is destroyed as if the driver had made it")
	}
}

// TestLockFilesRemoved checks that two instances of the driver, as during an update, do not change one GPU at the same time
// although somebody has removed the files with which they keep off each other.
func TestLockFilesRemoved(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	old := n.Start(t, harness.Quiet...)
	old.Ready(t)
	gate := n.Hold(t, "nvmlDeviceCreateGpuInstanceWithPlacement", 0)
	first := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 4)}))
	prepared := make(chan error, 1)
	go func() {
		_, err := old.TryPrepare(t.Context(), first, harness.Patience)
		prepared <- err
	}()
	gate.UntilHeld(t, 1)
	removeOpenFiles(t, n, old)
	next := n.Start(t, harness.Quiet...)
	next.WantLog(t, `"Discovered"`) // it is not ready while the GPU cannot be looked at
	second := n.AllocateNamed(n.DeviceNames(t, []harness.Device{harness.Partition(0, "1g.10gb", 5)}))
	refused := make(chan error, 1)
	go func() {
		_, err := next.TryPrepare(t.Context(), second, harness.RefusalTimeout)
		refused <- err
	}()
	next.Until(t, "the second call", func(context.Context) error {
		select {
		case err := <-refused:
			refused <- err
			return nil
		default:
			return gate.CheckHeld(2)
		}
	})
	if gate.CheckHeld(2) == nil {
		t.Error("2 instances of the driver make a partition on one GPU at the same time")
	}
	gate.Remove(t)
	t.Logf("the second claim: %v", <-refused)
	if err := <-prepared; err != nil {
		t.Errorf("the first claim: %v", err)
	}
}

// removeOpenFiles removes the files in the driver's folder that it has open and nothing in them: those that it locks.
func removeOpenFiles(t *testing.T, n *harness.Node, p *harness.Driver) {
	t.Helper()
	fds := filepath.Join("/proc", strconv.Itoa(p.Cmd.Process.Pid), "fd")
	removed := 0
	for _, fd := range harness.List(t, fds) {
		path, err := os.Readlink(filepath.Join(fds, fd))
		if err != nil || !strings.HasPrefix(path, n.DataDir()+"/") {
			continue
		}
		if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() && info.Size() == 0 && os.Remove(path) == nil {
			removed++
		}
	}
	if removed == 0 {
		t.Fatal("the driver has no file open in its folder")
	}
}
