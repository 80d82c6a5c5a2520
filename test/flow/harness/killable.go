// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/partage-dev/partage/test/flow/killpoint"
	"github.com/partage-dev/partage/test/must"
)

// KillableDriver is a driver that can be killed at an effect. Close ends it, unless it
// was started for a test.
type KillableDriver struct {
	*Driver
	*killpoint.Supervisor
	uid string
}

// Spawn starts a driver that can be killed at an effect, and does not wait for
// anything.
func (n *Node) Spawn(flags ...string) (*KillableDriver, error) {
	uid := "uid-" + strconv.Itoa(int(starts.add()))
	process := newProcess(n.command(uid, flags...))
	s := &KillableDriver{Driver: &Driver{Process: process}, uid: uid}
	var err error
	if s.Supervisor, err = killpoint.Start(s.Cmd); err != nil {
		return nil, fmt.Errorf("start the driver: %w\n%s", err, s.Log)
	}
	s.reap()
	return s, nil
}

// Connect registers the driver as the kubelet does. It fails when the driver ends
// before that.
func (s *KillableDriver) Connect(ctx context.Context, registrar string) error {
	return s.connect(ctx, registrationSocket(registrar, s.uid))
}

// Close kills the driver if it runs.
func (s *KillableDriver) Close() {
	s.Kill()
	s.disconnect()
}

// StartKillable is Start for a driver that can be killed at an effect.
func (n *Node) StartKillable(t testing.TB, flags ...string) *KillableDriver {
	t.Helper()
	s := n.MustSpawn(t, flags...)
	must.Do(t, s.Connect(t.Context(), n.RegistrarDir))
	return s
}

// MustSpawn is Spawn for a driver that ends with the test.
func (n *Node) MustSpawn(t testing.TB, flags ...string) *KillableDriver {
	t.Helper()
	s, err := n.Spawn(flags...)
	allowed(t, err)
	t.Cleanup(func() {
		s.Close()
		if t.Failed() {
			t.Logf("log of the driver:\n%s", s.Log)
		}
	})
	return s
}

// allowed ends the test at an error, and skips it where nobody may be killed at an effect.
func allowed(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, killpoint.ErrForbidden) {
		t.Skip(err)
	}
	must.Do(t, err)
}
