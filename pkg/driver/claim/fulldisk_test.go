// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/node/host"
)

// A release needs no space on the disk, whatever kind of claim it is.
func TestReleaseOnFullDisk(t *testing.T) {
	cases := 0
	for name, l := range layouts {
		t.Run(name, func(t *testing.T) {
			b, want := scene(t, l)
			claims := l.newClaims()
			for _, claim := range claims {
				mustPrepare(t, b.manager(), claim)
			}
			m := b.manager()
			b.hooks(fullDisk, nil)
			for _, claim := range claims {
				mustUnprepare(t, m, claim.UID)
			}
			b.wantState(t, "released", want)
			// A call that is late is refused all the same.
			if _, err := m.Prepare(arrivedAt(t.Context(), -1), claims[0]); err == nil {
				t.Error("a call from before the release was let through")
			}
			b.hooks(nil, nil)
			cases++
		})
	}
	if cases < 20 {
		t.Errorf("%d cases", cases)
	}
}

// A release waits for no call of the claim that hangs in another process, and comes to its end on a full disk.
func TestReleaseWhileClaimIsHeldElsewhere(t *testing.T) {
	for name, hook := range map[string]func(string) error{"disk": nil, "full disk": fullDisk} {
		runInBubble(t, name, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
			giveBack, err := b.manager().locks.TryClaim("u1")
			if err != nil || giveBack == nil {
				t.Fatalf("the claim is not free: %v", err)
			}
			b.hooks(hook, nil)
			began := time.Now()
			mustUnprepare(t, m, "u1")
			if waited := time.Since(began); waited > 0 {
				t.Errorf("it waited for %s", waited)
			}
			b.wantNothing()
			b.hooks(nil, nil)
			giveBack()
			mustPrepare(t, m, newClaim("u1", sliceA0, sliceB0))
			mustUnprepare(t, m, "u1")
			b.wantNothing()
		})
	}
}

// fullDisk is a hook before effects.
func fullDisk(effect string) error {
	if strings.HasPrefix(effect, "write ") {
		return &os.PathError{Op: "write", Path: "journal", Err: unix.ENOSPC}
	}
	return nil
}

// A tenant cannot fill the disk that the journal is on through what its container can
// write to.
func TestTenantCannotFillTheJournal(t *testing.T) {
	b := newBox(t)
	if err := os.MkdirAll(b.dataDir(), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("disk", b.dataDir(), "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("cannot mount: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(b.dataDir(), unix.MNT_DETACH) })
	m := b.manager()
	m.engine.Specs.Unmount = host.RemoveTmpfs
	m.engine.Specs.Mount = func(path string, bytes int64) error { return host.MountTmpfs("partage", path, bytes, "") }
	mustPrepare(t, m, newClaim("attacker", turnsC))
	for _, d := range b.spec("attacker") {
		for _, mount := range d.Mounts {
			if !mount.ReadOnly {
				fill(t, filepath.Join(mount.HostPath, "fill"))
			}
		}
	}
	mustPrepare(t, m, newClaim("other", sliceB0))
	mustUnprepare(t, m, "other")
	mustUnprepare(t, m, "attacker")
	b.wantNothing()
	if entries, err := os.ReadDir(filepath.Join(b.dataDir(), "limits")); err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
}

// fill writes until there is no space.
func fill(t *testing.T, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for total := 0; err == nil; total += 4096 {
		if _, err = file.Write(make([]byte, 4096)); total > 1<<30 {
			t.Fatal("a gigabyte fits")
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v", err)
	}
}

// TestNotWrittenAfterReboot: a claim whose record is of an earlier boot, and cannot be written anew, has no CDI spec.
func TestNotWrittenAfterReboot(t *testing.T) {
	b := newBox(t)
	mustPrepare(t, b.manager(), newClaim("u1", wholeC))
	b.boot("boot-2")
	m := b.manager()
	b.hooks(failTimes("write prepared", 1, errFault), nil)
	if _, err := m.Prepare(t.Context(), newClaim("u1", wholeC)); !errors.Is(err, errFault) {
		t.Errorf("got %v", err)
	}
	if spec := b.spec("u1"); len(spec) > 0 {
		t.Errorf("there is a CDI spec: %v", spec)
	}
	mustPrepare(t, m, newClaim("u1", wholeC))
	mustUnprepare(t, m, "u1")
	b.wantNothing()
}
