// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"fmt"
	"io"
	"net/http"
	"sync"
)

// Transport carries requests to the server without a network, for tests with fake
// time: a goroutine that waits for the network counts as running there.
func (s *Server) Transport() http.RoundTripper { return transport{s} }

type transport struct{ server *Server }

// RoundTrip returns as soon as the answer begins, as a watch needs it.
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if r.Body == nil {
		r.Body = http.NoBody
	}
	body, answer := io.Pipe()
	w := &pipeWriter{header: http.Header{}, begun: make(chan struct{}), body: answer}
	t.server.requests.Go(func() {
		t.server.handler.ServeHTTP(w, r)
		w.WriteHeader(http.StatusOK)
		_ = answer.Close()
	})
	select {
	case <-w.begun:
	case <-r.Context().Done():
		_ = body.CloseWithError(r.Context().Err())
		return nil, fmt.Errorf("%s %s: %w", r.Method, r.URL, r.Context().Err())
	}
	return &http.Response{
		Status: http.StatusText(w.code), StatusCode: w.code, Header: w.header, Body: body, Request: r,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: -1,
	}, nil
}

// pipeWriter is an http.ResponseWriter.
type pipeWriter struct {
	header http.Header
	once   sync.Once
	code   int
	begun  chan struct{}
	body   *io.PipeWriter
}

func (w *pipeWriter) Header() http.Header { return w.header }

func (w *pipeWriter) WriteHeader(code int) {
	w.once.Do(func() {
		w.code = code
		close(w.begun)
	})
}

func (w *pipeWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}

func (w *pipeWriter) Flush() {}
