// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/gpu/call"
)

// TestFileThatHangs: a read of one GPU's file that does not return takes no longer than its caller has, and keeps
// back no read of another's.
func TestFileThatHangs(t *testing.T) {
	proc := t.TempDir()
	const hung, well = "0000:1b:00.0", "0000:2c:00.0"
	file := func(pci string) string { return filepath.Join(proc, "driver/nvidia/gpus", pci, "information") }
	for _, pci := range []string{hung, well} {
		must(t, os.MkdirAll(filepath.Dir(file(pci)), 0o755))
	}
	must(t, errors.Join(unix.Mkfifo(file(hung), 0o600), os.WriteFile(file(well), []byte("Device Minor: \t 3\n"), 0o600)))
	roots := Roots{Proc: proc, Calls: call.New(0)}
	for range 2 { // the second one waits behind the first
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := roots.Within(ctx).GPUMinor(hung)
		cancel()
		if !errors.Is(err, call.ErrNoAnswer) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "on GPU "+hung) {
			t.Errorf("got %v", err)
		}
	}
	if minor, err := roots.Within(t.Context()).GPUMinor(well); minor != 3 || err != nil {
		t.Errorf("another GPU: %d, %v", minor, err)
	}
	if _, err := roots.GPUMinor("0000:3d:00.0"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no GPU: %v", err)
	}
	// It goes on.
	writer, err := os.OpenFile(file(hung), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = writer.WriteString("Device Minor: 1\n")
	must(t, errors.Join(err, writer.Close(), os.Remove(file(hung)), os.WriteFile(file(hung), []byte("Device Minor: 1\n"), 0o600)))
	if minor, err := roots.Within(t.Context()).GPUMinor(hung); minor != 1 || err != nil {
		t.Errorf("afterwards: %d, %v", minor, err)
	}
}
