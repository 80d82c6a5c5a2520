// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/exposure"
)

// TestExposure: what is open is an event that is repeated before the API server forgets it,
// and one more when it is closed. The node is read again each time, after the first.
func TestExposure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		type answer struct {
			finding exposure.Finding
			err     error
		}
		open := answer{finding: exposure.Finding{Runtime: "/bin/x", Through: "/bin/x", Config: "/etc/x", Accepts: true}}
		closed := answer{finding: exposure.Finding{Runtime: "/bin/x", Through: "/bin/x", Config: "/etc/x"}}
		unknown := answer{err: errors.New("no process")}
		nodeErrs, questions, answers := make(chan error), make(chan []string), make(chan answer)
		events := &fakeEvents{}
		l := exposureLoop{
			events: events,
			check: func(names []string) (exposure.Finding, error) {
				questions <- names
				a := <-answers
				return a.finding, a.err
			},
			node: func(context.Context) (*corev1.Node, error) { return nodeWithHandlers("later"), <-nodeErrs },
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); l.run(ctx, nodeWithHandlers("", "first")) }()

		warning, over := reasonExposed+": Every container", reasonNotExposed+": Containers have"
		asked := time.Now()
		for i, step := range []struct {
			answer   answer
			nodeErr  error
			event    string
			handlers []string
		}{
			{answer: open, event: warning, handlers: []string{"first"}},
			{answer: open, event: warning, handlers: []string{"first"}, nodeErr: errors.New("no API server")},
			{answer: unknown, handlers: []string{"later"}},
			{answer: closed, event: over, handlers: []string{"later"}},
			{answer: closed, handlers: []string{"later"}},
			{answer: open, event: warning, handlers: []string{"later"}},
		} {
			before := events.list()
			if i > 0 {
				nodeErrs <- step.nodeErr // when the loop asks
				if between := time.Since(asked); between > repeatAfter {
					t.Errorf("step %d: asked after %s", i, between)
				}
			}
			asked = time.Now()
			handlers := <-questions
			answers <- step.answer
			synctest.Wait()
			var got string
			if all := events.list(); len(all) == len(before)+1 {
				got = all[len(before)]
			} else if len(all) != len(before) {
				t.Errorf("step %d: events %q after %q", i, all, before)
			}
			if (got == "") != (step.event == "") || !strings.HasPrefix(got, step.event) {
				t.Errorf("step %d: event %q, want %q", i, got, step.event)
			}
			if !slices.Equal(handlers, step.handlers) {
				t.Errorf("step %d: handlers %q, want %q", i, handlers, step.handlers)
			}
		}
		cancel()
		<-done
	})
}

func nodeWithHandlers(names ...string) *corev1.Node {
	node := &corev1.Node{}
	for _, name := range names {
		node.Status.RuntimeHandlers = append(node.Status.RuntimeHandlers, corev1.NodeRuntimeHandler{Name: name})
	}
	return node
}

// TestExposureIsReported: the running plugin tells what a check finds, with the handlers of
// its own node.
func TestExposureIsReported(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.api.AddNode(testNode, "own")
	r.options.Exposure = func(handlers []string) (exposure.Finding, error) {
		return exposure.Finding{Runtime: "runc", Handlers: append(handlers, "nvidia"), Config: "/etc/x", Accepts: true}, nil
	}
	r.start(t)
	r.until(t, "an event about GPUs without claims", func(context.Context) error {
		want := reasonExposed + ": Pods can have all GPUs of this node without a claim: a RuntimeClass with handler own or nvidia"
		if all := r.events.list(); !slices.ContainsFunc(all, func(event string) bool { return strings.HasPrefix(event, want) }) {
			return fmt.Errorf("events %q", all)
		}
		return nil
	})
}
