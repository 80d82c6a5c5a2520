// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// from opens a connection from another address of this machine.
func from(t *testing.T, host, to string) net.Conn {
	t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
	conn := must.Get(dialer.DialContext(t.Context(), "tcp", to))(t)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ask sends a request, and does not read the answer.
func ask(t *testing.T, conn net.Conn) {
	t.Helper()
	must.Get(fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", Path))(t)
}

// serving serves metrics with so many bytes, and returns the address. A scrape takes little time.
func serving(t *testing.T, bytes int) (address string) {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "many_bytes", Help: strings.Repeat("x", bytes)}))
	return serveFrom(t, registry)
}

func serveFrom(t *testing.T, from prometheus.Gatherer) (address string) {
	t.Helper()
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	t.Cleanup(serve(context.WithoutCancel(t.Context()), smallBuffers{listener}, Path, from))
	return listener.Addr().String()
}

// smallBuffers are those of connections to clients: what these do not read soon fills them.
type smallBuffers struct{ net.Listener }

// Accept implements net.Listener.
func (l smallBuffers) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if conn, is := conn.(*net.TCPConn); is {
		_ = conn.SetWriteBuffer(1)
	}
	return conn, err
}

// TestOneClientKeepsNobodyOut: a client with many connections, each of which asks for more than it reads, is in nobody's way.
func TestOneClientKeepsNobodyOut(t *testing.T) { // not beside TestScrapesInTurns, which asks all the time
	address := serving(t, 256<<10) // more than sockets take, see smallBuffers
	for range 4 * maxConnections {
		conn := from(t, "127.0.0.2", address)
		if tcp, is := conn.(*net.TCPConn); !is || tcp.SetReadBuffer(1) != nil {
			t.Fatal("the buffer cannot be made small")
		}
		_, _ = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", Path) // it may be closed already
	}
	for range 3 {
		conn := from(t, "127.0.0.3", address)
		ask(t, conn)
		must.Do(t, conn.SetReadDeadline(time.Now().Add(answerTime/2)))
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		must.Do(t, err, "another client has no answer")
		_ = response.Body.Close()
		if response.StatusCode != http.StatusOK || !strings.HasPrefix(response.Header.Get("Content-Type"), "text/plain") {
			t.Errorf("another client gets %s", response.Status)
		}
	}
}

// TestScrapesInTurns: an address that asks all the time, on as many connections as it may have, has only its turns.
func TestScrapesInTurns(t *testing.T) {
	t.Parallel()
	address := serving(t, 1<<10)
	for range maxOfOne {
		conn := from(t, "127.0.0.2", address)
		go func() { _, _ = io.Copy(io.Discard, conn) }()
		go func() {
			for err := error(nil); err == nil; { // requests in a row, without waiting for answers
				_, err = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", Path)
			}
		}()
	}
	for range 20 {
		if status := statusOf(t, from(t, "127.0.0.3", address)); status != http.StatusOK {
			t.Fatalf("another client gets %d", status)
		}
	}
}

// statusOf asks and returns the status of an answer.
func statusOf(t *testing.T, conn net.Conn) (status int) {
	t.Helper()
	ask(t, conn)
	response := must.Get(http.ReadResponse(bufio.NewReader(conn), nil))(t)
	_ = response.Body.Close()
	_ = conn.Close()
	return response.StatusCode
}

// TestScrapeAfterPanic: a scrape that has ended badly keeps its turn from nobody.
func TestScrapeAfterPanic(t *testing.T) {
	t.Parallel()
	var once sync.Once
	address := serveFrom(t, prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		once.Do(func() { panic("a defect") })
		return nil, nil
	}))
	first := from(t, "127.0.0.1", address)
	ask(t, first)
	_, _ = io.Copy(io.Discard, first)
	expect.Equal(t, statusOf(t, from(t, "127.0.0.1", address)), http.StatusOK, "after a panic")
}
