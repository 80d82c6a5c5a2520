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

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
)

// readInterval is how often the cluster is read, and pods are explained, at most, and measureInterval how often the driver's pods are asked
// what claims use: as often as they measure.
const (
	readInterval    = 2 * time.Second
	measureInterval = 15 * time.Second
)

// pace is how many times as long as something took is waited at least until it is done again: a page that is left open is to leave API
// server and processor to others, also where the cluster is large.
const pace = 10

// page follows a cluster and publishes what the browser shows.
type page struct {
	Config
	client kubernetes.Interface

	mu sync.Mutex
	// state is what the browser gets, version how often it has changed, and changed when it did last.
	state   []byte
	version int
	changed time.Time
	// Input is what the state is made of. unread and unmeasured say what could not be found out.
	view.Input
	unread, unmeasured []view.Gap

	// explained is when pods were explained, and hasStuck whether some were stuck. They are those of explain.
	explained time.Time
	hasStuck  bool
}

func newPage(client kubernetes.Interface, c Config) *page {
	return &page{
		Config: c, client: client, state: []byte("{}"), Input: view.Input{
			Model: fleet.New(&fleet.Snapshot{}, c.Driver), Explanations: map[string]view.Explanation{},
			Meta: view.Meta{Context: c.Context, Driver: c.Driver, Loading: true},
		},
	}
}

// run reads and publishes until the context ends.
func (p *page) run(ctx context.Context) error {
	if err := p.publish(func() {}); err != nil {
		return err
	}
	all, ctx := errgroup.WithContext(ctx)
	again := func(interval time.Duration, do func(context.Context) error) {
		all.Go(func() error {
			for {
				start := time.Now()
				if err := do(ctx); err != nil {
					return err
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(max(interval, pace*time.Since(start))):
				}
			}
		})
	}
	again(readInterval, p.read)
	if p.Explain != nil {
		again(readInterval, p.explain)
	}
	if p.Measure != nil {
		again(measureInterval, p.measure)
	}
	return all.Wait()
}

// publish makes the page anew after a change of what is known.
func (p *page) publish(change func()) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	p.Meta.Problems = slices.Concat(p.unread, p.unmeasured)
	state, err := json.Marshal(view.New(p.Input))
	if err != nil {
		return fmt.Errorf("make the page: %w", err)
	}
	if !bytes.Equal(p.state, state) {
		p.state, p.version, p.changed = state, p.version+1, time.Now()
	}
	return nil
}

// current returns the page, which must not be changed.
func (p *page) current() (state []byte, version int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state, p.version
}

// read reads the cluster.
func (p *page) read(ctx context.Context) error {
	snapshot, err := fleet.Read(ctx, p.client, p.Namespace)
	return p.publish(func() {
		if err == nil {
			p.Model, p.Meta.Loading = fleet.New(snapshot, p.Driver), false
		}
		p.unread = problemsOf(p.Model.Snapshot, err)
	})
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

// explain explains the pods that wait or are stuck when the page has changed. Those that are stuck it explains again after a while: new
// events do not change the page.
func (p *page) explain(ctx context.Context) error {
	p.mu.Lock()
	model, isNew, now := p.Model, p.changed.After(p.explained), time.Now()
	p.mu.Unlock()
	if !isNew && (!p.hasStuck || now.Sub(p.explained) < fresh) {
		return nil
	}
	p.explained, p.hasStuck = now, false // a model that comes after it is another one
	explanation, waiting := p.Explain(ctx, model), map[string]bool{}
	for _, pod := range model.Pods {
		isStuck := view.Stuck(model, pod)
		if ctx.Err() != nil || !isStuck && !view.Waits(model, pod) {
			continue
		}
		p.hasStuck = p.hasStuck || isStuck
		key, why := view.PodKey(pod), explanation(pod)
		waiting[key] = true
		p.mu.Lock()
		p.Explanations[key] = why // the others may take long
		p.mu.Unlock()
	}
	return p.publish(func() {
		maps.DeleteFunc(p.Explanations, func(key string, _ view.Explanation) bool { return !waiting[key] })
	})
}

// measure asks what is used.
func (p *page) measure(ctx context.Context) error {
	told, err := p.Measure(ctx)
	if err == nil {
		err = told.Silence()
	}
	return p.publish(func() {
		p.unmeasured, p.Measured = nil, view.Measured{At: time.Now(), Told: told}
		if err != nil {
			p.unmeasured = []view.Gap{{
				Verb: "get", Resource: "pods/proxy", Forbidden: apierrors.IsForbidden(err), Message: err.Error(),
				Unknown: "How much memory claims use, and whether they are idle, is unknown.",
			}}
		}
	})
}
