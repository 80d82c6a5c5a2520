// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package ui is a page in the browser that shows the GPUs of a cluster, and what they are used
// for, while it changes. It is served on the loopback interface, with the rights of the
// kubeconfig, and changes nothing.
package ui

import (
	"bytes"
	"context"
	"crypto/rand"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

//go:embed assets
var embedded embed.FS

const (
	// sendLimit is how long a browser may take to accept an answer.
	sendLimit = 30 * time.Second
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
	page *page
	// token is a path element that nobody can guess: 130 bits.
	token   string
	handler http.Handler
}

// New returns a server that follows a cluster from Serve on.
func New(client kubernetes.Interface, c Config) (*Server, error) {
	assets, err := fs.Sub(embedded, "assets")
	if err != nil {
		return nil, fmt.Errorf("open the page's files: %w", err)
	}
	s := &Server{page: newPage(client, c), token: rand.Text()}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(assets))
	mux.HandleFunc("GET /model.json", s.serveModel)
	s.handler = guard(s.token, mux)
	return s, nil
}

// Path returns the path of the page, which has the token.
func (s *Server) Path() string { return "/" + s.token + "/" }

// Serve follows the cluster and answers requests until the context ends.
func (s *Server) Serve(ctx context.Context, listener net.Listener) error {
	all, ctx := errgroup.WithContext(ctx)
	server := &http.Server{Handler: s.handler, ReadHeaderTimeout: headerLimit, WriteTimeout: sendLimit, MaxHeaderBytes: maxHeader}
	all.Go(func() error { return s.page.run(ctx) })
	all.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve the page: %w", err)
		}
		return nil
	})
	all.Go(func() error {
		<-ctx.Done()
		return server.Close()
	})
	return all.Wait()
}

// serveModel answers with all that there is, unless the browser has it.
func (s *Server) serveModel(w http.ResponseWriter, r *http.Request) {
	state, version := s.page.current()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("ETag", strconv.Quote(strconv.Itoa(version)))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(state))
}
