// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"maps"
	"slices"
)

// Backup returns what an administrator has from etcd at this moment: a function that puts
// it back. Objects and resource versions are then those of now, and the API server starts
// anew, which ends all watches. Those that begin again with a version of the future hear
// nothing until it is passed.
func (s *Server) Backup() (restore func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Stored objects are replaced and never changed.
	version, nodes, claims, stored := s.version, maps.Clone(s.nodes), maps.Clone(s.claims), maps.Clone(s.slices)
	events := slices.Clone(s.events)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.version, s.events = version, slices.Clone(events)
		s.nodes, s.claims, s.slices = maps.Clone(nodes), maps.Clone(claims), maps.Clone(stored)
		close(s.restored)
		s.restored = make(chan struct{})
	}
}
