// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
	"golang.org/x/net/netutil"
	"k8s.io/klog/v2"
)

// Path is where the metrics are.
const Path = "/metrics"

const nvidiaPrefix = "nvidia_dra_"

// Anybody in the network may ask, so connections are limited, and each address to a part of them.
const (
	maxConnections = 64
	maxOfOne       = 8
	headerTime     = 5 * time.Second
	answerTime     = 30 * time.Second
	idleTime       = 2 * time.Minute
	maxHeader      = 16 << 10
	closeTime      = 2 * time.Second
)

// Serve answers on a listener until stop is called, which closes the listener. If it ends
// before, that is logged: no pod has to fail because nobody can see what the driver does.
func (m *Metrics) Serve(ctx context.Context, listener net.Listener) (stop func()) {
	return serve(ctx, listener, Path, m.registry)
}

// ServeNVIDIA is Serve for the metrics that have the names of NVIDIA's own DRA driver. The others are left
// out, so that nobody has them twice.
func (m *Metrics) ServeNVIDIA(ctx context.Context, listener net.Listener, path string) (stop func()) {
	return serve(ctx, listener, path, prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		all, err := m.registry.Gather()
		return slices.DeleteFunc(all, func(f *dto.MetricFamily) bool { return !strings.HasPrefix(f.GetName(), nvidiaPrefix) }), err
	}))
}

func serve(ctx context.Context, listener net.Listener, path string, from prometheus.Gatherer) (stop func()) {
	server := &http.Server{
		Handler: handler(ctx, path, from), ReadHeaderTimeout: headerTime, ReadTimeout: headerTime, WriteTimeout: answerTime, IdleTimeout: idleTime,
		MaxHeaderBytes: maxHeader, DisableGeneralOptionsHandler: true,
	}
	klog.FromContext(ctx).Info("Serving metrics", "address", listener.Addr().String(), "path", path)
	go func() {
		if err := server.Serve(netutil.LimitListener(&fairListener{Listener: listener}, maxConnections)); err != nil && !errors.Is(err, http.ErrServerClosed) {
			klog.FromContext(ctx).Error(err, "Metrics are not served any more", "address", listener.Addr())
		}
	}()
	return func() {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
		defer cancel()
		if server.Shutdown(limited) != nil {
			_ = server.Close()
		}
	}
}

func handler(ctx context.Context, path string, from prometheus.Gatherer) http.Handler {
	scrape := promhttp.HandlerFor(from, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, ErrorLog: errorLog{ctx},
	})
	var turn sync.Mutex // a scrape takes some milliseconds: one after the other, so that who asks all the time has only its turns
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		answer := &answer{ResponseWriter: w, status: http.StatusOK}
		func() {
			turn.Lock()
			defer turn.Unlock() // the server goes on after a panic
			scrape.ServeHTTP(answer, r)
		}()
		w.WriteHeader(answer.status)
		_, _ = w.Write(answer.body.Bytes()) // nobody has to read it
	})
	return mux
}

// answer is complete before any of it is sent: who reads slowly keeps nobody from scraping.
type answer struct {
	http.ResponseWriter
	status int
	body   bytes.Buffer
}

func (a *answer) WriteHeader(status int) { a.status = status }

func (a *answer) Write(data []byte) (int, error) { return a.body.Write(data) }

// fairListener closes connections of addresses that have many.
type fairListener struct {
	net.Listener

	mu   sync.Mutex
	open map[string]int
}

// Accept implements net.Listener.
func (l *fairListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
		if l.count(host, 1) <= maxOfOne {
			return &countedConn{Conn: conn, done: sync.OnceFunc(func() { l.count(host, -1) })}, nil
		}
		l.count(host, -1)
		_ = conn.Close()
	}
}

func (l *fairListener) count(host string, change int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[string]int{}
	}
	l.open[host] += change
	n := l.open[host]
	if n == 0 {
		delete(l.open, host)
	}
	return n
}

type countedConn struct {
	net.Conn
	done func()
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.done()
	return c.Conn.Close()
}

// errorLog is for metrics that contradict each other.
type errorLog struct{ ctx context.Context } //nolint:containedctx // for its logger

// Println implements promhttp.Logger.
func (l errorLog) Println(v ...any) {
	klog.FromContext(l.ctx).Info("Some metrics are left out", "reason", v)
}
