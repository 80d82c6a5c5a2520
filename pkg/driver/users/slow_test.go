// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package users

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/gpu"
)

// TestServersBesideSlowFiles: open files that cannot be read in time leave time to ask which processes are MPS servers.
func TestServersBesideSlowFiles(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(5000001, gone, time.Minute, true)
	n.listed, n.servers = []gpu.Process{{PID: 5000001, InstanceID: -1}}, []int{5000001}
	slow := filepath.Join(n.dir, "processes/2/cgroup")
	n.write("processes/2/comm", "slow\n")
	if err := unix.Mkfifo(slow, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		writer, err := os.OpenFile(slow, os.O_RDWR, 0)
		if err != nil {
			t.Error(err)
			return
		}
		_ = writer.Close()
	})
	n.users.Servers = func(ctx context.Context) ([]int, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Millisecond): // a question to another process
			return n.servers, nil
		}
	}
	for range 2 {
		if got, instances, opened := n.users.Users(t.Context(), pci, nil, nil); got != "" || len(instances) > 0 || opened != "" {
			t.Errorf("got %q, %v, %q", got, instances, opened)
		}
	}
}
