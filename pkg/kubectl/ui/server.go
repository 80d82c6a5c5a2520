// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package ui is a page in the browser that shows the GPUs of a cluster, and what they are used
// for, while it changes. It is served on the loopback interface, with the rights of the
// kubeconfig, and changes nothing.
package ui

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/scrape"
	"github.com/partage-dev/partage/pkg/kubectl/ui/feed"
)

//go:embed assets
var embedded embed.FS

const (
	// beat is how often something is sent to a page when nothing happens. A page that hears
	// nothing for longer says that it is not up to date.
	beat = 10 * time.Second
	// sendLimit is how long a browser may take to accept what is sent to it.
	sendLimit = 30 * time.Second
	// closeLimit is how long the server waits for answers when it ends.
	closeLimit = 2 * time.Second
	// headerLimit and maxHeader bound requests.
	headerLimit = 10 * time.Second
	maxHeader   = 16 << 10
)

// Config says what the page shows.
type Config struct {
	// Driver is the driver's name.
	Driver string
	// Namespace is read where not all may be read.
	Namespace string
	// Context is the name of the cluster for people.
	Context string
	// Explain and Measure may be nil.
	Explain Explain
	Measure Measure
}

// Measure asks the driver's pods what claims use.
type Measure func(context.Context) (*scrape.Result, error)

// Server serves the page.
type Server struct {
	page    *page
	token   string
	handler http.Handler
	ended   chan struct{}
}

// New returns a server that follows a cluster from Run on.
func New(client kubernetes.Interface, c Config) (*Server, error) {
	assets, err := fs.Sub(embedded, "assets")
	if err != nil {
		return nil, fmt.Errorf("open the page's files: %w", err)
	}
	s := &Server{page: newPage(client, c), token: newToken(), ended: make(chan struct{})}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(assets))
	mux.HandleFunc("GET /model.json", s.serveModel)
	mux.HandleFunc("GET /events", s.serveEvents)
	s.handler = guard(s.token, mux)
	return s, nil
}

// Handler returns what answers requests.
func (s *Server) Handler() http.Handler { return s.handler }

// Path returns the path of the page, which has the token.
func (s *Server) Path() string { return "/" + s.token + "/" }

// Run follows the cluster until the context ends.
func (s *Server) Run(ctx context.Context) error {
	defer close(s.ended)
	return s.page.run(ctx)
}

// Serve follows the cluster and answers requests until the context ends.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server := &http.Server{Handler: s.handler, ReadHeaderTimeout: headerLimit, MaxHeaderBytes: maxHeader}
	running := make(chan error, 1)
	serving := make(chan error, 1)
	go func() { running <- s.Run(ctx) }()
	go func() { serving <- server.Serve(listener) }()
	var failed error
	select {
	case <-ctx.Done():
		failed = <-running
	case failed = <-running:
	case err := <-serving:
		cancel()
		return errors.Join(fmt.Errorf("serve the page: %w", err), <-running)
	}
	// Streams end with s.ended, so that this does not wait for them.
	stop, done := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer done()
	if err := server.Shutdown(stop); err != nil {
		failed = errors.Join(failed, server.Close())
	}
	return failed
}

// serveModel answers with all that there is.
func (s *Server) serveModel(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	state := s.page.feed.State()
	if state == nil {
		state = feed.State{}
	}
	// An error here is a browser that is gone.
	_ = json.NewEncoder(w).Encode(state)
}

// serveEvents sends all that there is, and then what changes.
func (s *Server) serveEvents(w http.ResponseWriter, r *http.Request) {
	stream := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	events, end := s.page.feed.Subscribe()
	defer end()
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for {
		name, data := "beat", []byte("{}")
		select {
		case <-r.Context().Done():
			return
		case <-s.ended:
			return
		case <-tick.C:
		case event, open := <-events:
			if !open {
				return // too slow: the browser connects again
			}
			name = "change"
			if event.Full {
				name = "all"
			}
			var err error
			if data, err = json.Marshal(event); err != nil {
				return // not possible: every part is JSON
			}
		}
		if err := send(w, stream, name, data); err != nil {
			return
		}
	}
}

func send(w http.ResponseWriter, stream *http.ResponseController, name string, data []byte) error {
	// A recorder in tests has no deadlines.
	if err := stream.SetWriteDeadline(time.Now().Add(sendLimit)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return fmt.Errorf("limit an answer: %w", err)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "event: %s\ndata: %s\n\n", name, data)
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("send an event: %w", err)
	}
	return stream.Flush()
}
