// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"
	"k8s.io/klog/v2"
)

// Path is where the metrics are.
const Path = "/metrics"

// Anybody in the network may ask, so connections and scrapes are limited. A scrape takes some
// milliseconds.
const (
	maxConnections = 16
	maxScrapes     = 4
	headerTime     = 5 * time.Second
	answerTime     = 30 * time.Second
	idleTime       = 2 * time.Minute
	maxHeader      = 16 << 10
	closeTime      = 2 * time.Second
)

// Serve answers on a listener until stop is called, which closes the listener. If it ends
// before, that is logged: no pod has to fail because nobody can see what the driver does.
func (m *Metrics) Serve(ctx context.Context, listener net.Listener) (stop func()) {
	server := &http.Server{
		Handler: m.handler(ctx), ReadHeaderTimeout: headerTime, ReadTimeout: headerTime, WriteTimeout: answerTime, IdleTimeout: idleTime,
		MaxHeaderBytes: maxHeader, DisableGeneralOptionsHandler: true,
	}
	klog.FromContext(ctx).Info("Serving metrics", "address", listener.Addr().String(), "path", Path)
	go func() {
		if err := server.Serve(netutil.LimitListener(listener, maxConnections)); err != nil && !errors.Is(err, http.ErrServerClosed) {
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

func (m *Metrics) handler(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+Path, promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: maxScrapes, ErrorLog: errorLog{ctx},
	}))
	return mux
}

// errorLog is for metrics that contradict each other.
type errorLog struct{ ctx context.Context } //nolint:containedctx // for its logger

// Println implements promhttp.Logger.
func (l errorLog) Println(v ...any) {
	klog.FromContext(l.ctx).Info("Some metrics are left out", "reason", v)
}
