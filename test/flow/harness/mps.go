// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/test/must"
)

// Session is an MPS session as the supervisor has it. This file is the only one of
// these tests that knows the supervisor's client.
type Session = mps.Status

const (
	// SessionRunning is the phase of a session that is well.
	SessionRunning   = mps.Running
	supervisorSocket = mps.SocketName
)

// TrySessions asks the supervisor for its sessions.
func (n *MPSFolder) TrySessions(ctx context.Context) ([]Session, error) {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	client, err := mps.NewClient(filepath.Join(n.MPSDir, mps.SocketName))
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Close() }()
	return client.List(ctx)
}

// Sessions are the MPS sessions by ID.
func (n *MPSFolder) Sessions(t testing.TB) map[string]Session {
	t.Helper()
	var all []Session
	err := Eventually(t.Context(), func() (err error) {
		all, err = n.TrySessions(t.Context())
		return err
	})
	must.Do(t, err)
	sessions := map[string]Session{}
	for _, s := range all {
		sessions[s.Spec.ID] = s
	}
	return sessions
}
