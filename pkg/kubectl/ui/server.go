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
	"crypto/subtle"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
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

// guard lets only requests through that the page itself makes, or the person who has its URL.
// The token is the first element of every path. So it is in no cookie, which the browser would
// send to any other port of this machine, too, and in no Referer, which a header forbids.
func guard(token string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setSecurityHeaders(w.Header())
		switch {
		// A name that somebody else's DNS resolves to this machine.
		case !isLoopback(r.Host):
			http.Error(w, "this server answers to 127.0.0.1 and localhost only", http.StatusMisdirectedRequest)
		case !sameOrigin(r):
			http.Error(w, "another page may not read this one", http.StatusForbidden)
		case !hasToken(r.URL.Path, token):
			http.Error(w, "the address lacks the token, or has an old one: use the one that kubectl gpu ui printed", http.StatusForbidden)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "nothing can be changed here", http.StatusMethodNotAllowed)
		default:
			http.StripPrefix("/"+token, next).ServeHTTP(w, r)
		}
	})
}

func setSecurityHeaders(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "+
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}

// isLoopback reports whether a Host header names this machine. The port may be another than the
// server's: that of a tunnel.
func isLoopback(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return name == "127.0.0.1" || name == "localhost"
}

// sameOrigin reports whether a request was made by the page itself or by a person. Another page
// may link here, which shows it nothing, but not load anything.
func sameOrigin(r *http.Request) bool {
	if origin := r.Header.Get("Origin"); origin != "" {
		u, err := url.Parse(origin)
		return err == nil && u.Scheme == "http" && u.Host == r.Host
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
		return true
	default:
		return r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	}
}

// hasToken compares in a time that says nothing of the token.
func hasToken(path, token string) bool {
	first, _, below := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return below && subtle.ConstantTimeCompare([]byte(first), []byte(token)) == 1
}
