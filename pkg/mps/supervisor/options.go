// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"cmp"
	"time"

	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/host"
)

// Options configure a Supervisor. Times that are zero have a default.
type Options struct {
	// Dir holds the sessions' folders. Containers mount what is in it, so it must be the path on the host.
	Dir string
	// Roots locate the driver, and the kernel's files about the node.
	Roots host.Roots
	// CheckInterval is the time between two checks of a session. The end of a daemon or a server is noticed at once.
	CheckInterval time.Duration
	// LeftoverInterval is the time between two searches for what ended containers left in the memory of sessions. Something is that
	// if it has not changed for ten of them.
	LeftoverInterval time.Duration
	// StartLimit is how long a start may take, unless the caller's context ends sooner.
	StartLimit time.Duration
	// CommandLimit is how long a daemon may take to answer: a busy machine is not a daemon that hangs.
	CommandLimit time.Duration
	// EndLimit is how long each step of a stop may take: a daemon that was asked to quit, processes that were killed.
	EndLimit time.Duration
	// FaultLimit is how long a server that accepts no clients after a fault may wait for the affected ones to end, before it is
	// replaced.
	FaultLimit time.Duration
	// PodsSocket is that of the kubelet's Pods API, which says when pods end. Empty: it is not asked, and no client is terminated
	// before its pod is killed.
	PodsSocket string
	// PodsRetry is how long a kubelet that does not answer is left alone.
	PodsRetry time.Duration
	// ExtraContainerFiles are names of files in the daemon's pipe folder that containers get beside its socket for programs.
	ExtraContainerFiles []string
	// MemoryPercent is how much of the node's memory what all sessions mount may take together. Default 50, what Linux gives a
	// single tmpfs.
	MemoryPercent int
	// SELinuxContext is that of what sessions mount, a setting for host.Roots.FileContext.
	SELinuxContext string
	// FirstPause follows the second failed start in a row, and doubles up to LongestPause.
	FirstPause, LongestPause time.Duration
}

func (o Options) withDefaults() Options {
	o.MemoryPercent = cmp.Or(o.MemoryPercent, 50)
	o.CheckInterval = cmp.Or(o.CheckInterval, 2*time.Second)
	o.LeftoverInterval = cmp.Or(o.LeftoverInterval, time.Minute)
	o.StartLimit = cmp.Or(o.StartLimit, time.Minute)
	o.CommandLimit = cmp.Or(o.CommandLimit, 10*time.Second)
	o.EndLimit = cmp.Or(o.EndLimit, 5*time.Second)
	o.FaultLimit = cmp.Or(o.FaultLimit, 2*time.Minute)
	o.PodsRetry = cmp.Or(o.PodsRetry, 5*time.Second)
	o.FirstPause = cmp.Or(o.FirstPause, time.Second)
	o.LongestPause = cmp.Or(o.LongestPause, 30*time.Second)
	return o
}

// times are what the rules need to know of them.
func (o Options) times() rules.Times {
	return rules.Times{Check: o.CheckInterval, Start: o.StartLimit, Fault: o.FaultLimit, FirstPause: o.FirstPause, LongestPause: o.LongestPause}
}
