// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/cdi"
	"github.com/partage-dev/partage/pkg/host"
)

func TestReboot(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	mustPrepare(t, m, newClaim("goes", sliceA4))
	b.boot("boot-2")

	m = b.manager()
	// A spec that has survived names device numbers of the earlier boot.
	b.specs["stays"] = []cdi.Device{{Name: "stale"}}
	mustReconcile(t, m)
	if len(b.specs) != 0 || b.count(pciA) != 0 {
		t.Errorf("left or made: %v", b.state())
	}
	// The place of a claim that was not released is taken by another: that one
	// must keep it.
	mustPrepare(t, m, newClaim("new", sliceA4))
	mustUnprepare(t, m, "goes")
	if _, found := b.look(addressA4); !found {
		t.Error("the release of a claim of an earlier boot destroyed another claim's partition")
	}
	mustPrepare(t, m, newClaim("stays", sliceA0, wholeC))
	if len(b.specs["stays"]) != 2 || b.count(pciA) != 2 {
		t.Errorf("not made again: %v", b.state())
	}
	mustUnprepare(t, m, "stays")
	mustUnprepare(t, m, "new")
	b.wantNothing()
}

func TestReconcileRewritesSpecs(t *testing.T) {
	b := newBox(t)
	mustPrepare(t, b.manager(), newClaim("u1", sliceA0, wholeC))
	want := b.specs["u1"]
	b.mu.Lock()
	clear(b.specs)
	b.mu.Unlock()
	_ = b.bareManager().Reconcile(t.Context()) // it knows no GPU
	m := b.manager()
	mustReconcile(t, m)
	if diff := cmp.Diff(want, b.specs["u1"]); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	b.specs["u1"] = nil
	mustReconcile(t, m)
	if diff := cmp.Diff(want, b.specs["u1"]); diff != "" {
		t.Errorf("again: -want +got:\n%s", diff)
	}
}

// A claim that a call is at work on is left to it, and does not hold up others.
func TestReconcilePassesOverCalls(t *testing.T) {
	b := newBox(t)
	m := b.manager()
	entered, leave := make(chan struct{}), make(chan struct{})
	b.hooks(func(e string) error {
		if e == "create compute instance" {
			close(entered)
			<-leave
		}
		return nil
	}, nil)
	done := make(chan error)
	go func() {
		_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
		done <- err
	}()
	<-entered
	write(t, host.TemporaryName(m.store.Path("u2")), "{")
	for _, other := range []*Manager{m, b.manager()} {
		mustReconcile(t, other)
	}
	if diff := cmp.Diff([]string{"instance " + addressA0.String() + " complete=false", "record of u1"}, b.state()[1:]); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	close(leave)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o750), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}
