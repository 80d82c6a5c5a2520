// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"slices"
	"testing"

	"github.com/partage-dev/partage/pkg/node/host/hosttest"
)

// A file system that does not answer, as that of a stopped server in the network, holds up nobody who asks for something else.
func TestOpenersBesideHungFileSystem(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	folder, proc := hosttest.HungFolder(t), t.TempDir()
	files := proc + "/5000001/fd" // no process has this ID, so that it is not the test itself, which is left out
	must(t, os.MkdirAll(files, 0o755))
	must(t, os.Symlink(folder, files+"/3"))
	must(t, os.Symlink("/dev/null", files+"/4"))
	got, err := Roots{Proc: proc}.Openers("/dev/null")
	if err != nil || !slices.Equal(got, []int{5000001}) {
		t.Errorf("got %v, %v", got, err)
	}
}
