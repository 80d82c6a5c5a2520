// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Traffic counts what goes through transports and connections. Its methods may be called
// concurrently.
type Traffic struct {
	sent, received atomic.Int64

	mu sync.Mutex
	// answered are requests by what they are, and refused those with an error as the answer,
	// by its status; "no answer" is one of them.
	answered, refused map[string]int
	// last is when slices or events were last asked about.
	last time.Time
	// second is the present one, inSecond the requests in it, and peak the most in one.
	second         int64
	inSecond, peak int
}

// NewTraffic makes a Traffic.
func NewTraffic() *Traffic {
	return &Traffic{answered: map[string]int{}, refused: map[string]int{}}
}

// Counts are what was counted up to a moment.
type Counts struct {
	Answered, Refused map[string]int
	Sent, Received    int64
	Peak              int
	Last              time.Time
}

// Requests is how many there were.
func (c Counts) Requests() int {
	sum := 0
	for _, n := range c.Answered {
		sum += n
	}
	for _, n := range c.Refused {
		sum += n
	}
	return sum
}

// asked is how many requests of a kind there were.
func (c Counts) asked(kind string) int {
	sum := c.Answered[kind]
	for what, n := range c.Refused {
		if strings.HasPrefix(what, kind+": ") {
			sum += n
		}
	}
	return sum
}

// Counts returns what was counted until now. The peak is that since the last call of Restart.
func (t *Traffic) Counts() Counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Counts{
		Answered: clone(t.answered), Refused: clone(t.refused),
		Sent: t.sent.Load(), Received: t.received.Load(), Peak: t.peak, Last: t.last,
	}
}

// Restart forgets the peak, and when anything was last asked.
func (t *Traffic) Restart() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.inSecond, t.peak, t.last = 0, 0, time.Now()
}

func clone(counts map[string]int) map[string]int {
	other := make(map[string]int, len(counts))
	for what, n := range counts {
		other[what] = n
	}
	return other
}

// Since returns what was added since an earlier moment.
func (c Counts) Since(before Counts) Counts {
	less := func(now, then map[string]int) map[string]int {
		added := map[string]int{}
		for what, n := range now {
			if n > then[what] {
				added[what] = n - then[what]
			}
		}
		return added
	}
	return Counts{
		Answered: less(c.Answered, before.Answered), Refused: less(c.Refused, before.Refused),
		Sent: c.Sent - before.Sent, Received: c.Received - before.Received, Peak: c.Peak, Last: c.Last,
	}
}

// Transport counts requests.
func (t *Traffic) Transport(next http.RoundTripper) http.RoundTripper {
	return transport{traffic: t, next: next}
}

type transport struct {
	traffic *Traffic
	next    http.RoundTripper
}

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	what := kindOf(r)
	response, err := t.next.RoundTrip(r)
	switch {
	case err != nil:
		t.traffic.count(what, "no answer")
	case response.StatusCode >= http.StatusBadRequest:
		t.traffic.count(what, fmt.Sprint(response.StatusCode))
	default:
		t.traffic.count(what, "")
	}
	return response, err
}

func (t *Traffic) count(what, refused string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if second := now.Unix(); second != t.second {
		t.second, t.inSecond = second, 0
	}
	t.inSecond++
	t.peak = max(t.peak, t.inSecond)
	if refused != "" {
		t.refused[what+": "+refused]++
	} else {
		t.answered[what]++
	}
	if !strings.HasPrefix(what, "watch ") && (strings.HasSuffix(what, " resourceslices") || strings.HasSuffix(what, " events")) {
		t.last = now
	}
}

// kindOf says what a request is: a verb of Kubernetes and the resource.
func kindOf(r *http.Request) string {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case parts[0] == "apis" && len(parts) > 3:
		parts = parts[3:]
	case parts[0] == "api" && len(parts) > 2:
		parts = parts[2:]
	default:
		return "get /" + strings.Join(parts, "/")
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		parts = parts[2:]
	}
	verb := map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method]
	query := r.URL.Query()
	switch {
	case query.Get("watch") == "true" || query.Get("watch") == "1":
		verb = "watch"
	case verb != "" && query.Has("dryRun"):
		verb = "try to " + verb
	case verb == "" && len(parts) > 1:
		verb = "get"
	case verb == "":
		verb = "list"
	}
	return verb + " " + parts[0]
}

// Dial makes connections whose bytes are counted.
func (t *Traffic) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}
	c, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return connection{Conn: c, traffic: t}, nil
}

type connection struct {
	net.Conn
	traffic *Traffic
}

func (c connection) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.traffic.received.Add(int64(n))
	return n, err
}

func (c connection) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.traffic.sent.Add(int64(n))
	return n, err
}
