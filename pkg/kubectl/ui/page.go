// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/ui/feed"
	"github.com/partage-dev/partage/pkg/kubectl/ui/live"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// settle is how long changes are collected before the page is made anew, at least: never less than
// making it took, so that a large cluster leaves half of a processor to others.
const settle = 250 * time.Millisecond

// rest is how long nothing is explained after everything was: in a large cluster where much
// happens the allocator would be busy all the time. It is never less than explaining took.
const rest = 2 * time.Second

// measureInterval is how often the driver's pods are asked what claims use: as often as they measure. It is never less than ten times what
// asking took, so that a large cluster's API server has little to do for a page that is left open.
const measureInterval = 15 * time.Second

// page follows a cluster and publishes what the browser shows.
type page struct {
	source  *live.Source
	driver  string
	context string
	// explain may be nil: then the scheduler's own words are all there is.
	explain Explain
	// measure may be nil: then nothing is said of what is used.
	measure Measure
	feed    feed.Feed

	mu           sync.Mutex
	explanations map[string]view.Explanation
	measured     view.Measured
	// unmeasured says why nothing could be measured.
	unmeasured *view.Gap
	// toExplain receives the newest model.
	toExplain chan *fleet.Model
}

func newPage(client kubernetes.Interface, c Config) *page {
	return &page{
		source: live.New(client, c.Namespace), driver: c.Driver, context: c.Context, explain: c.Explain, measure: c.Measure,
		explanations: map[string]view.Explanation{}, toExplain: make(chan *fleet.Model, 1),
	}
}

// run publishes until the context ends.
func (p *page) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	all.Go(func() { p.source.Run(ctx) })
	if p.explain != nil {
		all.Go(func() { p.explainAll(ctx) })
	}
	if p.measure != nil {
		all.Go(func() { p.measureAll(ctx) })
	}
	for {
		start := time.Now()
		if err := p.publish(); err != nil {
			return err
		}
		pause := max(settle, time.Since(start))
		select {
		case <-ctx.Done():
			return nil
		case <-p.source.Changed():
		}
		if !sleep(ctx, pause) {
			return nil
		}
	}
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
func (p *page) publish() error {
	// Asked before the snapshot is taken: what is read in between must not make a page that
	// lacks it look complete.
	loading := !p.source.Ready()
	gaps := p.source.Gaps()
	model := fleet.New(p.source.Snapshot(), p.driver)
	meta := view.Meta{Context: p.context, Driver: p.driver, Loading: loading, Problems: gaps}
	p.mu.Lock()
	explanations, measured := maps.Clone(p.explanations), p.measured
	if p.unmeasured != nil {
		meta.Problems = append(meta.Problems, *p.unmeasured)
	}
	p.mu.Unlock()
	objects, err := view.New(view.Input{Model: model, Explanations: explanations, Measured: measured, Meta: meta})
	if err != nil {
		return fmt.Errorf("make the page: %w", err)
	}
	if p.feed.Publish(objects) && p.explain != nil && !meta.Loading {
		select { // only the newest is of interest
		case <-p.toExplain:
		default:
		}
		p.toExplain <- model
	}
	return nil
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
		explanation := p.explain(ctx, model)
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
		if !sleep(ctx, max(rest, time.Since(start))) {
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
		p.source.Notify()
	}
}

// measureAll asks what is used, again and again.
func (p *page) measureAll(ctx context.Context) {
	for {
		start := time.Now()
		told, err := p.measure(ctx)
		if err == nil {
			err = told.Silence()
		}
		if ctx.Err() != nil {
			return
		}
		p.mu.Lock()
		p.unmeasured, p.measured = nil, view.Measured{At: time.Now(), Told: told}
		if err != nil {
			p.unmeasured = &view.Gap{
				Verb: "get", Resource: "pods/proxy", Forbidden: apierrors.IsForbidden(err), Message: err.Error(),
				Unknown: "How much memory claims use, and whether they are idle, is unknown.",
			}
		}
		p.mu.Unlock()
		p.source.Notify()
		if !sleep(ctx, max(measureInterval, 10*time.Since(start))) {
			return
		}
	}
}
