// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/host/hosttest"
)

// A file system that does not answer, as that of a stopped server in the network, holds up
// nobody for ever.
func TestOpenersBesideHungFileSystem(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	folder, proc := hosttest.HungFolder(t), t.TempDir()
	files := proc + "/5000001/fd" // no process has this ID, so that it is not the test itself, which is left out
	if err := os.MkdirAll(files, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(folder, files+"/3"); err != nil {
		t.Fatal(err)
	}
	looked := make(chan error, 1)
	go func() {
		_, err := Roots{Proc: proc}.Openers("/dev/null")
		looked <- err
	}()
	select {
	case err := <-looked:
		if err == nil || !strings.Contains(err.Error(), "does not answer") {
			t.Errorf("got %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("it hangs")
	}
}
