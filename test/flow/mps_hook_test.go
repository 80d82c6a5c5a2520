// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// wantNoContainer fails unless the hooks of a container refuse it and say why.
func (n *node) wantNoContainer(t testing.TB, spec *oci.Spec, texts ...string) {
	t.Helper()
	_, err := n.newUser(t.Context(), t, spec, "info")
	if err == nil {
		t.Error("the container starts")
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error lacks %q: %v", text, err)
		}
	}
}

// TestHookRefusesTwoShares: a program can be a client of one daemon only, so that
// it would use the other GPU without its limits, or not at all.
func TestHookRefusesTwoShares(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x2")
	n.startSupervisor(t)
	p := n.start(t)
	one := p.mustPrepare(t, n.claim(t, []request{{gpu: 0, kind: asMPS}}))
	other := p.mustPrepare(t, n.claim(t, []request{{gpu: 1, kind: asMPS}}))
	same := p.mustPrepare(t, n.claim(t, []request{{gpu: 0, kind: asMPS}}))
	n.wantNoContainer(t, n.container(t, slices.Concat(one, other)...), "one MPS share")
	n.wantNoContainer(t, n.container(t, slices.Concat(one, same)...), "one MPS share")
	for _, ids := range [][]string{one, other, same} {
		n.wantSays(t, n.container(t, ids...), []string{"as a client"}, "info")
	}
}

// TestHookRefusesDeadDaemon: a program that did not reach its daemon would have no
// limits.
func TestHookRefusesDeadDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x1")
	s := n.startSupervisor(t)
	p := n.start(t)
	c := n.claim(t, []request{{kind: asMPS}})
	ids := p.mustPrepare(t, c)
	n.wantSays(t, n.container(t, ids...), []string{"as a client"}, "info")
	s.kill()
	if err := n.killMPS(); err != nil {
		t.Fatal(err)
	}
	n.wantNoContainer(t, n.container(t, ids...), n.device(t, 0, "", 0))
	n.startSupervisor(t)
	p.until(t, "the daemon", n.containerStarts(t, ids))
	p.mustUnprepare(t, c)
	p.untilClean(t, n)
}
