// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"slices"
	"testing"
)

// TestSupervisorKilled: daemons and programs live on, and the next supervisor has
// them as they are.
func TestSupervisorKilled(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t, frequent...)
	s.supervisor.kill()
	first := s.n.servers(t, 0)
	s.supervisor = s.n.startSupervisor(t)
	another := s.n.claim(t, []request{{gpu: 0, kind: asMPS, memory: 20 << 30, percent: 50}})
	ids := s.p.mustPrepare(t, another)
	s.n.wantSays(t, s.n.container(t, ids...), []string{"limit 20480 MiB", "(50 %)"}, "info")
	if now := s.n.servers(t, 0); !slices.Equal(now, first) {
		t.Errorf("the server was %v and is %v", first, now)
	}
	s.p.mustUnprepare(t, another)
	s.neighbourWorks(t)
	if err := s.users[0].works(); err != nil {
		t.Error(err)
	}
	for id, session := range s.n.sessions(t) {
		if session.Losses != 0 {
			t.Errorf("session %s: %d losses", id, session.Losses)
		}
	}
	s.release(t)
}

// TestSupervisorStopped: it takes its daemons with it, in order; its successor
// starts them again for the claims that there are.
func TestSupervisorStopped(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t, frequent...)
	for _, u := range s.users {
		u.end()
	}
	s.supervisor.stop(t)
	if left, err := s.n.mpsProcesses(); err != nil || len(left) > 0 {
		t.Errorf("processes are left: %v, %v", left, err)
	}
	if left, err := s.n.mpsMounts(); err != nil || len(left) > 0 {
		t.Errorf("mounts are left: %v, %v", left, err)
	}
	s.supervisor = s.n.startSupervisor(t)
	for gpu := range s.claims {
		s.p.until(t, "a new program", s.n.containerStarts(t, s.ids[gpu]))
		s.n.wantMode(t, gpu, exclusiveProcess)
	}
	s.release(t)
}

// TestMPSAndNewPlugin: programs do not notice that the driver is killed, or
// replaced by another version.
func TestMPSAndNewPlugin(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(t *testing.T, s *mpsScene){
		"killed":  func(t *testing.T, s *mpsScene) { s.p.kill(); s.p = s.n.start(t) },
		"stopped": func(t *testing.T, s *mpsScene) { s.p.stop(t); s.p = s.n.start(t) },
		"upgraded": func(t *testing.T, s *mpsScene) {
			old := s.p
			s.p = s.n.start(t)
			s.p.ready(t)
			old.stop(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newMPSScene(t)
			first := s.n.servers(t, 0)
			replace(t, s)
			s.p.ready(t)
			for gpu := range s.claims {
				if ids := s.p.mustPrepare(t, s.claims[gpu]); !slices.Equal(ids, s.ids[gpu]) {
					t.Errorf("another process gives other CDI ids: %v, before %v", ids, s.ids[gpu])
				}
			}
			if err := s.users[0].works(); err != nil {
				t.Error(err)
			}
			if now := s.n.servers(t, 0); !slices.Equal(now, first) {
				t.Errorf("the server was %v and is %v", first, now)
			}
			s.neighbourWorks(t)
			s.release(t)
		})
	}
}

// TestMPSReboot: after a reboot nothing is there, and claims that the kubelet
// prepares again get all of it again.
func TestMPSReboot(t *testing.T) {
	t.Parallel()
	s := newMPSScene(t)
	s.p.kill()
	s.supervisor.kill()
	scene := &crashScene{t: t, n: s.n, layout: crashLayout{supervised: true}}
	scene.reboot(t)
	s.n.wantMode(t, 0, defaultMode)
	s.p = s.n.start(t)
	s.p.ready(t)
	ids := s.p.mustPrepare(t, s.claims[0])
	s.n.wantMode(t, 0, exclusiveProcess)
	s.n.wantMode(t, 1, defaultMode)
	s.n.wantSays(t, s.n.container(t, ids...), []string{"limit 4096 MiB", "as a client"}, "info")
	// The other is released without having been prepared again.
	s.release(t)
}
