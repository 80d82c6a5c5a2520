// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"strings"
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

func handler(ctx context.Context, path string, from prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET "+path, promhttp.HandlerFor(from, promhttp.HandlerOpts{
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
