// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// TestSupervisorKilled checks that daemons and programs live on, and that the next
// supervisor takes them over.
func TestSupervisorKilled(t *testing.T) {
	t.Parallel()
	s := newMPSNode(t, harness.Frequent...)
	s.supervisor.Kill()
	first := s.n.Servers(t, 0)
	s.supervisor = s.n.StartSupervisor(t)
	another, ids := s.p.NewClaim(t, s.n, harness.Device{GPU: 0, Kind: harness.MPS, Memory: 20 << 30, Percent: 50})
	wantOutput(t, s.n, s.n.Container(t, ids...), []string{"limit 20480 MiB", "(50 %)"}, "info")
	expect.Same(t, s.n.Servers(t, 0), first, "the server")
	s.p.MustUnprepare(t, another)
	s.neighbourWorks(t)
	expect.Do(t, s.users[0].Check())
	for id, session := range s.n.Sessions(t) {
		expect.Equal(t, session.Losses, 0, "session", id, "losses")
	}
	s.release(t)
}

// TestSupervisorStopped checks that a supervisor stops its daemons, and that the next one
// starts them again for existing claims.
func TestSupervisorStopped(t *testing.T) {
	t.Parallel()
	s := newMPSNode(t, harness.Frequent...)
	for _, u := range s.users {
		u.Kill()
	}
	s.supervisor.Stop(t)
	expect.Len(t, must.Get(s.n.MPSProcesses())(t), 0, "processes are left")
	expect.Len(t, must.Get(s.n.MPSMounts())(t), 0, "mounts are left")
	s.supervisor = s.n.StartSupervisor(t)
	for gpu := range s.claims {
		s.p.Until(t, "a new program", s.n.CheckContainerStarts(t, s.ids[gpu]))
		s.n.WantMode(t, gpu, harness.ExclusiveProcess)
	}
	s.release(t)
}

// TestReleaseWhileSupervisorStandsStill checks that pods end although the supervisor takes requests and answers none, and that their
// sessions end when it goes on.
func TestReleaseWhileSupervisorStandsStill(t *testing.T) {
	t.Parallel()
	s := newMPSNode(t, harness.Frequent...)
	s.unnoticed(t, func() {
		for _, c := range s.claims {
			expect.Do(t, s.p.TryUnprepare(t.Context(), c, harness.ReleaseTimeout), "release while the supervisor stands still")
		}
	})
	s.release(t)
}

// TestMPSAndNewPlugin checks that programs do not notice when the driver is killed or
// replaced.
func TestMPSAndNewPlugin(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(t *testing.T, s *mpsNode){
		"killed":  func(t *testing.T, s *mpsNode) { s.p.Kill(); s.p = s.n.Start(t) },
		"stopped": func(t *testing.T, s *mpsNode) { s.p.Stop(t); s.p = s.n.Start(t) },
		"upgraded": func(t *testing.T, s *mpsNode) {
			old := s.p
			s.p = s.n.Run(t)
			old.Stop(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newMPSNode(t)
			first := s.n.Servers(t, 0)
			replace(t, s)
			s.p.Ready(t)
			for gpu := range s.claims {
				expect.Same(t, s.p.MustPrepare(t, s.claims[gpu]), s.ids[gpu], "CDI ids of another process")
			}
			expect.Do(t, s.users[0].Check())
			expect.Same(t, s.n.Servers(t, 0), first, "the server")
			s.neighbourWorks(t)
			s.release(t)
		})
	}
}

// TestMPSReboot checks that claims that the kubelet prepares again after a reboot get their
// sessions again.
func TestMPSReboot(t *testing.T) {
	t.Parallel()
	s := newMPSNode(t)
	s.p.Kill()
	s.supervisor.Kill()
	s.n.Reboot(t)
	s.supervisor = s.n.StartSupervisor(t)
	s.n.WantMode(t, 0, harness.DefaultMode)
	s.p = s.n.Run(t)
	ids := s.p.MustPrepare(t, s.claims[0])
	s.n.WantMode(t, 0, harness.ExclusiveProcess)
	s.n.WantMode(t, 1, harness.DefaultMode)
	wantOutput(t, s.n, s.n.Container(t, ids...), []string{"limit 4096 MiB", "as a client"}, "info")
	// The other is released without having been prepared again.
	s.release(t)
}
