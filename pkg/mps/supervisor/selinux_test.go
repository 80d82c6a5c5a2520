// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"strings"
	"testing"
)

// TestContextOfSessions: a session that containers could not use is not started.
func TestContextOfSessions(t *testing.T) {
	w := newWorld(t)
	w.options.SELinuxContext = "nobody_u:nothing_r:nowhere_t:s0"
	s := w.supervisor()
	if _, err := s.Ensure(t.Context(), one); err == nil || !strings.Contains(err.Error(), "nowhere_t") || !strings.Contains(err.Error(), "SELINUX_CONTEXT") {
		t.Errorf("got %v", err)
	}
	w.nothingLeft(one.ID)
}
