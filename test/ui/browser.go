// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package ui tries the page of kubectl gpu ui in a real browser, and takes its pictures.
package ui

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
	"github.com/partage-dev/partage/pkg/kubectl/ui"
	"github.com/partage-dev/partage/test/kubectl/fleets"
)

// startLimit is how long the browser may take to start.
const startLimit = 2 * time.Minute

// look is how often Wait looks.
const look = 50 * time.Millisecond

// browserName is Debian's.
const browserName = "chromium-headless-shell"

// noon is when the page believes to be opened: that of the day of the fleets.
var noon = time.Date(2026, time.November, 22, 12, 0, 0, 0, time.UTC)

// Page is a page of a server over a made-up fleet.
type Page struct {
	// Client has the fleet. What it changes, the page shows.
	Client *fake.Clientset
	// Context is the browser's tab.
	Context context.Context
	// URL is the address with the token.
	URL string
	// StopServer ends the server, as a person does who presses Ctrl-C.
	StopServer func()
	// Cut ends all connections, as a tunnel does that breaks. The server goes on.
	Cut func()

	cancels []func()
	served  chan error

	mu     sync.Mutex
	errors []string
}

// Open serves a fleet and opens a tab of the given size. The page believes that it is noon of
// the day of the fleets.
func Open(ctx context.Context, objects []apiruntime.Object, width, height int, prepare ...func(*fake.Clientset)) (*Page, error) {
	p := &Page{Client: fake.NewClientset(objects...), served: make(chan error, 1)}
	for _, f := range prepare {
		f(p.Client)
	}
	ctx, cancel := context.WithCancel(ctx)
	p.cancels = append(p.cancels, cancel)
	server, err := ui.New(p.Client, ui.Config{Driver: fleets.Driver, Context: "demo", Namespace: "research", Explain: ui.ByAllocator(p.Client), Measure: p.measure})
	if err != nil {
		return nil, err
	}
	tcp, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for the browser: %w", err)
	}
	listener := &cutter{Listener: tcp}
	p.Cut = listener.cut
	serving, stopServer := context.WithCancel(ctx)
	p.StopServer = stopServer
	go func() { p.served <- server.Serve(serving, listener) }()
	p.URL = "http://" + listener.Addr().String() + server.Path()

	profile, err := os.MkdirTemp("", "partage-ui")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the browser: %w", err)
	}
	p.cancels = append(p.cancels, func() { _ = os.RemoveAll(profile) })
	flags := append(chromedp.DefaultExecAllocatorOptions[:len(chromedp.DefaultExecAllocatorOptions):len(chromedp.DefaultExecAllocatorOptions)],
		chromedp.ExecPath(browserName), chromedp.NoSandbox, chromedp.WindowSize(width, height), chromedp.UserDataDir(filepath.Join(profile, "browser")),
		// A machine that does much else may take long to start it.
		chromedp.WSURLReadTimeout(startLimit))
	allocator, stop := chromedp.NewExecAllocator(ctx, flags...)
	p.cancels = append(p.cancels, stop)
	tab, leave := chromedp.NewContext(allocator, chromedp.WithListener(p.listen))
	p.cancels = append(p.cancels, leave)
	p.Context = tab
	atNoon := func(ctx context.Context, t *chromedp.Target) (chromedp.Void, error) {
		_, err := cdp.Call(ctx, t, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{
			Source: fmt.Sprintf("Date.now = () => %d", noon.UnixMilli()),
		})
		return chromedp.Void{}, err
	}
	if err := chromedp.Do(tab, atNoon); err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", browserName, err), p.Close())
	}
	return p, nil
}

// measure makes up what claims use: each another part of what it has, and some nothing for hours.
func (p *Page) measure(ctx context.Context) (*scrape.Result, error) {
	snapshot, err := fleet.Read(ctx, p.Client, "")
	if err != nil {
		return nil, err
	}
	told := &scrape.Result{Claims: map[scrape.ID]*scrape.Claim{}}
	model := fleet.New(snapshot, fleets.Driver)
	used := map[*fleet.GPU]int64{}
	for i, h := range model.Holdings {
		if len(h.Pods) == 0 {
			continue // no pod is there, for which it would be prepared
		}
		c := scrape.Claim{ID: scrape.IDOf(h), Utilization: new(float64(23*i%97) / 100), Idle: new(time.Duration(0))}
		if i%6 == 4 {
			c.Utilization, c.Idle = new(0.0), new(time.Since(noon)+time.Duration(i)*time.Hour)
		}
		if h.Device != nil && !h.Admin() {
			memory := h.Device.Published.Capacity[fleet.CapacityMemory].Value
			if consumed, has := h.Result.ConsumedCapacity[fleet.CapacityMemory]; has {
				memory, c.LimitBytes = consumed, new(consumed.Value())
			}
			c.UsedBytes = new(memory.Value() / 100 * int64(15+37*i%80))
			used[h.Device.GPU] += *c.UsedBytes
		}
		told.Claims[c.ID] = &c
	}
	for _, n := range model.Nodes {
		for _, g := range n.GPUs {
			told.GPUs = append(told.GPUs, scrape.GPU{Node: n.Name, PCIBusID: g.PCIBusID, UsedBytes: new(used[g]), MemoryBytes: new(g.MemoryBytes)})
		}
	}
	return told, nil
}

// cutter is a listener whose connections can be ended.
type cutter struct {
	net.Listener
	mu          sync.Mutex
	connections []net.Conn
}

// Accept waits for a connection.
func (c *cutter) Accept() (net.Conn, error) {
	connection, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.connections = append(c.connections, connection)
	return connection, nil
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, connection := range c.connections {
		_ = connection.Close() // the server may have closed it
	}
	c.connections = nil
}

// listen notes what the page complains about: a script that fails, a policy that is violated.
func (p *Page) listen(event any) {
	var text string
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		text = e.ExceptionDetails.Text
		if e.ExceptionDetails.Exception != nil {
			text += ": " + e.ExceptionDetails.Exception.Description
		}
	case *log.EventEntryAdded:
		if e.Entry.Level != log.EntryLevelError {
			return
		}
		text = e.Entry.Text
	default:
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.errors = append(p.errors, text)
}

// Do lets the browser do something.
func (p *Page) Do(steps ...chromedp.Action[chromedp.Void]) error {
	return chromedp.Do(p.Context, steps...)
}

// Wait waits until a JavaScript expression is true. The page's policy forbids what chromedp
// has for that.
func (p *Page) Wait(expression string) error {
	again := time.NewTicker(look)
	defer again.Stop()
	for {
		is, err := chromedp.Run(p.Context, chromedp.Evaluate[bool]("Boolean("+expression+")"))
		if err != nil {
			return fmt.Errorf("wait for %s: %w", expression, err)
		}
		if is {
			return nil
		}
		select {
		case <-p.Context.Done():
			return fmt.Errorf("wait for %s: %w; the page has complained: %q", expression, context.Cause(p.Context), p.Errors())
		case <-again.C:
		}
	}
}

// Dark has the page believe that the person prefers dark colours.
func (p *Page) Dark() error {
	_, err := chromedp.Call(p.Context, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}},
	})
	return err
}

// Errors returns what the page has complained about.
func (p *Page) Errors() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.errors...)
}

// Close ends browser and server, and returns the server's error.
func (p *Page) Close() error {
	for i := len(p.cancels) - 1; i > 0; i-- {
		p.cancels[i]()
	}
	p.cancels[0]()
	return <-p.served
}
