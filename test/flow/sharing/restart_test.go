// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"slices"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestSupervisorKilled checks that daemons and programs live on, and that the next
// supervisor takes them over.
func TestSupervisorKilled(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t, harness.Frequent...)
	s.supervisor.Kill()
	first := s.n.Servers(t, 0)
	s.supervisor = s.n.StartSupervisor(t)
	another := s.n.Allocate(t, []harness.Device{{GPU: 0, Kind: harness.MPS, Memory: 20 << 30, Percent: 50}})
	ids := s.p.MustPrepare(t, another)
	wantOutput(t, s.n, s.n.Container(t, ids...), []string{"limit 20480 MiB", "(50 %)"}, "info")
	if now := s.n.Servers(t, 0); !slices.Equal(now, first) {
		t.Errorf("the server was %v and is %v", first, now)
	}
	s.p.MustUnprepare(t, another)
	s.neighbourWorks(t)
	if err := s.users[0].Check(); err != nil {
		t.Error(err)
	}
	for id, session := range s.n.Sessions(t) {
		if session.Losses != 0 {
			t.Errorf("session %s: %d losses", id, session.Losses)
		}
	}
	s.release(t)
}

// TestSupervisorStopped checks that a supervisor stops its daemons, and that the next one
// starts them again for existing claims.
func TestSupervisorStopped(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t, harness.Frequent...)
	for _, u := range s.users {
		u.Kill()
	}
	s.supervisor.Stop(t)
	if left, err := s.n.MPSProcesses(); err != nil || len(left) > 0 {
		t.Errorf("processes are left: %v, %v", left, err)
	}
	if left, err := s.n.MPSMounts(); err != nil || len(left) > 0 {
		t.Errorf("mounts are left: %v, %v", left, err)
	}
	s.supervisor = s.n.StartSupervisor(t)
	for gpu := range s.claims {
		s.p.Until(t, "a new program", s.n.CheckContainerStarts(t, s.ids[gpu]))
		s.n.WantMode(t, gpu, harness.ExclusiveProcess)
	}
	s.release(t)
}

// TestMPSAndNewPlugin checks that programs do not notice when the driver is killed or
// replaced.
func TestMPSAndNewPlugin(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(t *testing.T, s *mpsScene){
		"killed":  func(t *testing.T, s *mpsScene) { s.p.Kill(); s.p = s.n.Start(t) },
		"stopped": func(t *testing.T, s *mpsScene) { s.p.Stop(t); s.p = s.n.Start(t) },
		"upgraded": func(t *testing.T, s *mpsScene) {
			old := s.p
			s.p = s.n.Start(t)
			s.p.Ready(t)
			old.Stop(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newMPSScene(t)
			first := s.n.Servers(t, 0)
			replace(t, s)
			s.p.Ready(t)
			for gpu := range s.claims {
				if ids := s.p.MustPrepare(t, s.claims[gpu]); !slices.Equal(ids, s.ids[gpu]) {
					t.Errorf("another process gives other CDI ids: %v, before %v", ids, s.ids[gpu])
				}
			}
			if err := s.users[0].Check(); err != nil {
				t.Error(err)
			}
			if now := s.n.Servers(t, 0); !slices.Equal(now, first) {
				t.Errorf("the server was %v and is %v", first, now)
			}
			s.neighbourWorks(t)
			s.release(t)
		})
	}
}

// TestMPSReboot checks that claims that the kubelet prepares again after a reboot get their
// sessions again.
func TestMPSReboot(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t)
	s.p.Kill()
	s.supervisor.Kill()
	s.n.Reboot(t)
	s.supervisor = s.n.StartSupervisor(t)
	s.n.WantMode(t, 0, harness.DefaultMode)
	s.p = s.n.Start(t)
	s.p.Ready(t)
	ids := s.p.MustPrepare(t, s.claims[0])
	s.n.WantMode(t, 0, harness.ExclusiveProcess)
	s.n.WantMode(t, 1, harness.DefaultMode)
	wantOutput(t, s.n, s.n.Container(t, ids...), []string{"limit 4096 MiB", "as a client"}, "info")
	// The other is released without having been prepared again.
	s.release(t)
}
