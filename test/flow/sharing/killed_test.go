// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

const (
	endingPod types.UID = "8b3f0e6e-7a59-4c8a-9d3c-2f1f4a1f0b11"
	otherPod  types.UID = "0c1d2e3f-4a5b-4c6d-8e7f-8a9bacbdcedf"
)

// neighbours are two pods that share a GPU through MPS: one is busy, ignores SIGTERM and is
// about to be killed.
type neighbours struct {
	n    *harness.Node
	p    *harness.Driver
	pods *harness.PodsAPI
	// supervisor has -v=4.
	supervisor *harness.Supervisor
	session    string
	claims     [2]*drapb.Claim
	ids        [2][]string
	// ending is the busy one.
	ending, other *harness.Program
	servers       []int
	before        harness.Snapshot
}

func newNeighbours(t *testing.T, flags func(n *harness.Node) []string) *neighbours {
	t.Helper()
	s := &neighbours{n: harness.NewNode(t, "h100x2")}
	s.pods = s.n.StartPodsAPI(t)
	s.supervisor = s.n.StartSupervisor(t, s.pods.Flag)
	s.before = s.n.Snapshot(t)
	s.p = s.n.Run(t, append(slices.Clone(harness.Frequent), flags(s.n)...)...)
	for i := range s.claims {
		s.claims[i] = s.n.Allocate(t, []harness.Device{{Kind: harness.MPS}})
		s.ids[i] = s.p.MustPrepare(t, s.claims[i])
	}
	s.session = s.n.DeviceName(t, 0, "", 0)
	s.ending = s.start(t, 0, endingPod, "--busy", "--ignore-sigterm", "--stay")
	s.other = s.start(t, 1, otherPod, "--stay")
	s.servers = s.n.Servers(t, 0)
	s.settled(t)
	return s
}

func (s *neighbours) start(t *testing.T, claim int, pod types.UID, args ...string) *harness.Program {
	t.Helper()
	u := must.Get(s.n.TryStartProgram(t.Context(), t, s.n.Container(t, s.ids[claim]...), args...))(t)
	u.InPod(t, pod)
	return u
}

// settled waits until the supervisor watches both programs: it has looked at the session
// since they were in their pods.
func (s *neighbours) settled(t *testing.T) {
	t.Helper()
	s.p.Until(t, "the supervisor to know both", func(context.Context) error {
		if got := len(s.n.Sessions(t)[s.session].Clients); got != 2 {
			return fmt.Errorf("it knows %d", got)
		}
		return nil
	})
	looks := func() int { return strings.Count(s.supervisor.Log.String(), "get_client_list") }
	seen := looks()
	s.p.UntilTrue(t, "the supervisor to look again", func() bool { return looks() >= seen+3 })
}

// told returns the claims that have an event.
func (s *neighbours) told(t *testing.T, reason string) []string {
	t.Helper()
	var names []string
	for _, e := range s.n.Events(t) {
		if e.Reason == reason && e.InvolvedObject.Kind == "ResourceClaim" {
			names = append(names, e.InvolvedObject.Name)
		}
	}
	slices.Sort(names)
	return names
}

func (s *neighbours) untilTold(t *testing.T, reason string) {
	t.Helper()
	want := []string{s.claims[0].GetName(), s.claims[1].GetName()}
	slices.Sort(want)
	s.p.Until(t, "the event "+reason, func(context.Context) error {
		if got := s.told(t, reason); !slices.Equal(got, want) {
			return fmt.Errorf("claims %v have it, want %v", got, want)
		}
		return nil
	})
}

func (s *neighbours) release(t *testing.T) {
	t.Helper()
	s.ending.Kill()
	s.other.Kill()
	s.p.MustUnprepare(t, s.claims[:]...)
	s.p.Until(t, "nothing to be left", func(context.Context) error { return harness.AsError(s.before.Diff(s.n.Snapshot(t))) })
}

func noFlags(*harness.Node) []string { return nil }

// TestPodEnds: the clients of a pod that is deleted are terminated before the kubelet kills
// it, and the others go on.
func TestPodEnds(t *testing.T) {
	s := newNeighbours(t, noFlags)
	s.pods.Delete(t, endingPod, 1)
	s.p.Until(t, "the client to be terminated", func(context.Context) error {
		if err := s.ending.Check(); err == nil || !strings.Contains(err.Error(), "CUDA_ERROR_MPS_CLIENT_TERMINATED") {
			return fmt.Errorf("it says: %w", errors.Join(err, errors.New("not terminated")))
		}
		return nil
	})
	s.ending.Kill()
	s.p.Until(t, "a new program", s.n.CheckContainerStarts(t, s.ids[1]))
	expect.Do(t, s.other.Check(), "the other pod")
	expect.Same(t, s.n.Servers(t, 0), s.servers, "the server")
	if got := s.n.Sessions(t)[s.session]; got.Losses > 0 || got.Kills > 0 {
		t.Errorf("got %+v", got)
	}
	s.release(t)
}

// TestPodKilled: both claims are told when a pod is killed that is busy, and the server is
// replaced when nobody uses it any more.
func TestPodKilled(t *testing.T) {
	s := newNeighbours(t, noFlags)
	s.ending.Kill()
	s.untilTold(t, "MPSClientKilled")
	expect.Same(t, s.n.Servers(t, 0), s.servers, "the server was replaced while it had clients")
	s.other.Kill() // it is idle
	s.p.Until(t, "a new program", s.n.CheckContainerStarts(t, s.ids[1]))
	if got := s.n.Sessions(t)[s.session]; got.Losses > 0 || got.Kills != 1 {
		t.Errorf("got %+v", got)
	}
	expect.Len(t, s.told(t, "MPSServerLost"), 0, "claims that have lost nothing")
	s.release(t)
}

// TestPodKilledRestarts: by policy the server is replaced at once, which is told both claims.
func TestPodKilledRestarts(t *testing.T) {
	s := newNeighbours(t, func(n *harness.Node) []string {
		return []string{n.Policy(t, "default: {mps: {onClientKilled: Restart}}\n")}
	})
	s.ending.Kill()
	s.untilTold(t, "MPSServerLost")
	s.p.UntilEvent(t, s.n, "MPSServerLost", "was killed", "sharing policy")
	s.p.Until(t, "a new program", s.n.CheckContainerStarts(t, s.ids[1]))
	if s.other.Check() == nil {
		t.Error("the other pod has not lost its server")
	}
	if got := s.n.Sessions(t)[s.session]; got.Losses != 1 || got.Kills > 0 {
		t.Errorf("got %+v", got)
	}
	s.release(t)
}
