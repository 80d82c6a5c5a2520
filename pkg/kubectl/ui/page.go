// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// settle is how long changes are collected before the page is made anew, at least: never less than
// making it took, so that a large cluster leaves half of a processor to others.
const settle = 250 * time.Millisecond

// readInterval is how often the cluster is read, and pace how many times as long as that took is waited at least: the API server of a large
// cluster is to have little to do for a page that is left open.
const (
	readInterval = 2 * time.Second
	pace         = 10
)

// rest is how long nothing is explained after everything was, at least: in a large cluster where much
// happens the allocator would be busy all the time, and the API server asked for the events of many pods.
const rest = 2 * time.Second

// measureInterval is how often the driver's pods are asked what claims use, at most: as often as they measure.
const measureInterval = 15 * time.Second

// page follows a cluster and publishes what the browser shows.
type page struct {
	Config
	client kubernetes.Interface
	// changed receives a value when what goes with the objects has changed, and toExplain the newest model.
	changed   chan struct{}
	toExplain chan *fleet.Model

	mu sync.Mutex
	// state is what the browser gets, and version how often it has changed.
	state        []byte
	version      int
	explanations map[string]view.Explanation
	measured     view.Measured
	// unmeasured says why nothing could be measured.
	unmeasured []view.Gap
}

func newPage(client kubernetes.Interface, c Config) *page {
	return &page{
		Config: c, client: client, state: []byte("{}"), explanations: map[string]view.Explanation{},
		changed: make(chan struct{}, 1), toExplain: make(chan *fleet.Model, 1),
	}
}

// run reads and publishes until the context ends.
func (p *page) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	if p.Explain != nil {
		all.Go(func() { p.explainAll(ctx) })
	}
	if p.Measure != nil {
		all.Go(func() { p.measureAll(ctx) })
	}
	snapshot, meta := &fleet.Snapshot{}, view.Meta{Context: p.Context, Driver: p.Driver, Loading: true}
	for due := time.NewTimer(0); ; {
		start := time.Now()
		if err := p.publish(snapshot, meta); err != nil {
			return err
		}
		if !meta.Loading && !sleep(ctx, max(settle, time.Since(start))) {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.changed:
		case start := <-due.C:
			read, err := fleet.Read(ctx, p.client, p.Namespace)
			if err == nil {
				snapshot, meta.Loading = read, false
			}
			meta.Problems = problemsOf(snapshot, err)
			due.Reset(max(readInterval, pace*time.Since(start)))
		}
	}
}

// problemsOf returns what could not be read, and with an error why what is shown may be old.
func problemsOf(s *fleet.Snapshot, err error) (gaps []view.Gap) {
	if err != nil {
		gaps = append(gaps, view.Gap{Verb: "list", Resource: "the cluster", Message: err.Error()})
	}
	for _, m := range s.Missing {
		gaps = append(gaps, view.Gap{
			Verb: "list", Resource: m.Resource, Namespace: m.Namespace, Forbidden: apierrors.IsForbidden(m.Err), Message: m.Err.Error(),
			Unknown: m.Unknown("Without it is unknown ") + ".",
		})
	}
	return gaps
}

// sleep reports whether the context goes on after a pause.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}

// publish makes the page of what is known now.
func (p *page) publish(snapshot *fleet.Snapshot, meta view.Meta) error {
	model := fleet.New(snapshot, p.Driver)
	p.mu.Lock()
	explanations, measured := maps.Clone(p.explanations), p.measured
	meta.Problems = slices.Concat(meta.Problems, p.unmeasured)
	p.mu.Unlock()
	objects, err := view.New(view.Input{Model: model, Explanations: explanations, Measured: measured, Meta: meta})
	if err != nil {
		return fmt.Errorf("make the page: %w", err)
	}
	state, err := json.Marshal(objects)
	if err != nil {
		return fmt.Errorf("encode the page: %w", err)
	}
	if p.replace(state) && p.Explain != nil && !meta.Loading {
		select { // only the newest is of interest
		case <-p.toExplain:
		default:
		}
		p.toExplain <- model
	}
	return nil
}

// replace reports whether the page differs from the one before.
func (p *page) replace(state []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes.Equal(p.state, state) {
		return false
	}
	p.state, p.version = state, p.version+1
	return true
}

// current returns the page, which must not be changed.
func (p *page) current() (state []byte, version int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state, p.version
}

// notify has the page made anew.
func (p *page) notify() {
	select {
	case p.changed <- struct{}{}:
	default: // one is waiting to be received
	}
}

// explainAll explains the pods that wait or are stuck of each model that it receives. Those that
// are stuck it explains again after a while: new events do not make a new model.
func (p *page) explainAll(ctx context.Context) {
	var model *fleet.Model
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case model = <-p.toExplain:
		case <-again:
		}
		again = nil
		start := time.Now()
		explanation := p.Explain(ctx, model)
		waiting := map[string]bool{}
		for _, pod := range model.Pods {
			if ctx.Err() != nil {
				return
			}
			stuck := view.Stuck(model, pod)
			if stuck && again == nil {
				again = time.After(fresh)
			}
			if stuck || view.Waits(model, pod) {
				key := view.PodKey(pod)
				waiting[key] = true
				p.explains(key, explanation(pod))
			}
		}
		p.mu.Lock()
		maps.DeleteFunc(p.explanations, func(key string, _ view.Explanation) bool { return !waiting[key] })
		p.mu.Unlock()
		if !sleep(ctx, max(rest, pace*time.Since(start))) {
			return
		}
	}
}

// explains notes an explanation, and has the page made anew if it differs from the one before.
func (p *page) explains(key string, e view.Explanation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.explanations[key] != e {
		p.explanations[key] = e
		p.notify()
	}
}

// measureAll asks what is used, again and again.
func (p *page) measureAll(ctx context.Context) {
	for {
		start := time.Now()
		told, err := p.Measure(ctx)
		if err == nil {
			err = told.Silence()
		}
		if ctx.Err() != nil {
			return
		}
		p.mu.Lock()
		p.unmeasured, p.measured = nil, view.Measured{At: time.Now(), Told: told}
		if err != nil {
			p.unmeasured = []view.Gap{{
				Verb: "get", Resource: "pods/proxy", Forbidden: apierrors.IsForbidden(err), Message: err.Error(),
				Unknown: "How much memory claims use, and whether they are idle, is unknown.",
			}}
		}
		p.mu.Unlock()
		p.notify()
		if !sleep(ctx, max(measureInterval, pace*time.Since(start))) {
			return
		}
	}
}
