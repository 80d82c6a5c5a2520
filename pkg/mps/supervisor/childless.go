// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"fmt"
	"time"

	"github.com/partage-dev/partage/pkg/mps/process"
)

// childlessLimit is how long a daemon that was told to start a server may have no child
// before the server counts as ended. That a server fails is rare, and a start that is given
// up is tried again.
const childlessLimit = 2 * time.Second

// childless notices that the server which a daemon has started is gone before the daemon
// ever listed it. The daemon's log would say so, too, but clients can write to it.
type childless struct {
	daemon int
	// since is when the daemon had a child the last time, or could have had.
	since, looked time.Time
}

func newChildless(daemon int) *childless {
	now := time.Now()
	return &childless{daemon: daemon, since: now, looked: now}
}

// check returns an error when the daemon has had no child for childlessLimit.
func (c *childless) check() error {
	// All processes of the node are looked at.
	if time.Since(c.looked) < childlessLimit/8 {
		return nil
	}
	now := time.Now()
	c.looked = now
	if children, err := process.Children(c.daemon); err != nil || len(children) > 0 {
		c.since = now
	}
	if now.Sub(c.since) >= childlessLimit {
		return fmt.Errorf("the control daemon (PID %d) has had no process for %s", c.daemon, childlessLimit)
	}
	return nil
}
