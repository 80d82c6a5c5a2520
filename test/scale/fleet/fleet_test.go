// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/sliceset/template"
	"github.com/partage-dev/partage/pkg/policy"
)

func TestMachine(t *testing.T) {
	facts, err := template.Machine{Model: "h100", Count: 8}.Facts()
	if err != nil {
		t.Fatal(err)
	}
	uuids := map[string]bool{}
	for i := range 3 {
		for _, g := range factsOf(facts, i).GPUs {
			uuids[g.UUID] = true
		}
	}
	if len(uuids) != 24 {
		t.Errorf("3 nodes have %d GPUs, want 24", len(uuids))
	}
	driver := &NVIDIADriver{}
	m := &machine{facts: factsOf(facts, 1), driver: driver}
	if _, err := m.Discover(t.Context()); !errors.Is(err, gpu.ErrDriverNotLoaded) {
		t.Errorf("without a driver: %v", err)
	}
	if status, _ := (noClaims{m}).Reconcile(t.Context()); len(status.Conditions) != 8 {
		t.Errorf("without a driver: %v", status.Conditions)
	}
	driver.Load("1.2.3")
	found, err := m.Discover(t.Context())
	if err != nil || found.DriverVersion != "1.2.3" || len(found.GPUs) != 8 {
		t.Errorf("with a driver: %v, %v", found, err)
	}
	if status, _ := (noClaims{m}).Reconcile(t.Context()); len(status.Conditions) != 0 {
		t.Errorf("with a driver: %v", status.Conditions)
	}
	driver.Unload()
	if m.Open(t.Context()) == nil {
		t.Error("the driver can be used although it is unloaded")
	}
}

func TestPolicies(t *testing.T) {
	b := &bench{Options: Options{Dir: t.TempDir()}}
	for _, clients := range []int{10, 11} {
		if err := b.setPolicy(clients); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(b.Dir + "/policy")
		if err != nil {
			t.Fatal(err)
		}
		p, err := policy.Decode(text)
		if err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if got := p.For(&gpu.GPU{}).TimeSlice; got == nil || got.Clients != clients {
			t.Errorf("time slices are %+v, want %d clients", got, clients)
		}
	}
}

func TestForEach(t *testing.T) {
	done := make(chan int, 100)
	if err := forEach(t.Context(), 100, func(_ context.Context, i int) error { done <- i; return nil }); err != nil || len(done) != 100 {
		t.Errorf("%d of 100 done: %v", len(done), err)
	}
	want := errors.New("the one")
	if err := forEach(t.Context(), 1000, func(_ context.Context, i int) error {
		if i == 3 {
			return want
		}
		return nil
	}); !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
	if some := sampled(200); len(some) != 10 || some[9] >= 200 {
		t.Errorf("200 nodes: looks at %v", some)
	}
	if some := sampled(3); len(some) != 3 {
		t.Errorf("3 nodes: looks at %v", some)
	}
}

func TestProcesses(t *testing.T) {
	// The name may have brackets and spaces.
	if d, err := cpuTime("12 (a) b) S 1 12 12 0 -1 4194560 1 2 3 4 150 50 7 8 20 0 9 0 1 2 3"); err != nil || d != 2*time.Second {
		t.Errorf("got %s, %v, want 2s", d, err)
	}
	if _, err := cpuTime("12 (a) S"); err == nil {
		t.Error("a line that is too short was read")
	}
	if n := kilobytes([]byte("VmHWM:\t   20 kB\nVmRSS:\t    12 kB\n"), "VmRSS:"); n != 12<<10 {
		t.Errorf("%d bytes, want 12 KiB", n)
	}
	if n := metric([]byte("# HELP x_y text\nx_y{a=\"1\"} 3\nx_y 1.5e+06\n"), "x_y"); n != 1_500_000 {
		t.Errorf("x_y is %d, want 1500000", n)
	}
	self := processes{own: os.Getpid()}
	before, err := self.cpu()
	if err != nil {
		t.Fatal(err)
	}
	m, err := self.memory(t.Context(), nil)
	if err != nil || m[own].resident < 1<<20 || m[own].peak < m[own].resident {
		t.Errorf("memory %v, %v", m, err)
	}
	if after, err := self.cpu(); err != nil || after[own] < before[own] {
		t.Errorf("CPU time %s, then %s, %v", before[own], after[own], err)
	}
}

func TestInsides(t *testing.T) {
	var asked []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.String())
		_, _ = w.Write([]byte("go_memstats_heap_alloc_bytes 7\netcd_mvcc_db_total_size_in_bytes 8\n"))
	}))
	defer server.Close()
	heap, database, err := insides(t.Context(), &rest.Config{Host: server.URL}, apiserver, "")
	if err != nil || heap != 7 || database != 8 {
		t.Errorf("heap %d, database %d, %v", heap, database, err)
	}
	if got := strings.Join(asked, " "); got != "/debug/pprof/heap?gc=1 /metrics" {
		t.Errorf("asked for %s", got)
	}
	if _, _, err := insides(t.Context(), &rest.Config{Host: server.URL}, etcd, "http://127.0.0.1:1"); err == nil {
		t.Error("no error although nobody answers")
	}
}

// TestPhase ends when enough was asked for and nothing happens any more.
func TestPhase(t *testing.T) {
	traffic := NewTraffic()
	// The fourth had no success: it counts, since it might have been the answer that was lost.
	p := Phase{Name: "phase", Kind: "update resourceslices", AtLeast: 4, Begin: func(context.Context) error {
		for range 3 {
			traffic.count("update resourceslices", "")
		}
		traffic.count("update resourceslices", "409")
		return nil
	}}
	result, err := p.run(t.Context(), traffic, processes{own: os.Getpid()})
	if err != nil || result.Counts.Requests() != 4 || result.Took >= silence || result.CPU[own] < 0 {
		t.Errorf("got %+v, %v", result, err)
	}
	p.AtLeast = 10
	ctx, cancel := context.WithCancel(t.Context())
	p.Begin = func(context.Context) error { cancel(); return nil }
	if _, err := p.run(ctx, traffic, processes{own: os.Getpid()}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v although it was cancelled", err)
	}
	p.AtLeast, p.Check = 0, func(context.Context) error { return errors.New("wrong") }
	p.Begin = func(context.Context) error { return nil }
	if _, err := p.run(t.Context(), traffic, processes{own: os.Getpid()}); err == nil || !strings.Contains(err.Error(), "wrong") {
		t.Errorf("got %v although not everything is as it should be", err)
	}
}

func TestReport(t *testing.T) {
	r := &Report{
		Options: Options{Nodes: 5, GPUs: 8, Model: "h100"},
		Stages:  []Stage{{"before", map[string]memory{apiserver: {resident: 3e6, peak: 4e6, heap: 2e6}, etcd: {database: 9e6}}}},
		Phases: []Result{{Name: "storm", Took: 2 * time.Second, CPU: map[string]time.Duration{apiserver: 1500 * time.Millisecond}, Counts: Counts{
			Answered: map[string]int{"update resourceslices": 40, "create events": 5}, Refused: map[string]int{"update resourceslices: 409": 1}, Sent: 1e6, Received: 2e6, Peak: 33,
		}}},
	}
	var out bytes.Buffer
	if err := r.Write(&out); err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{"5 nodes with 8 h100", "kube-apiserver 3 / 2 4", "etcd, its database 9", "storm 2.0 46 1 23 33 1.0 2.0 1.5, 0.0",
		"storm 40 update resourceslices, 5 create events, 1 update resourceslices: 409"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}

// TestNode runs the plugin of a node against an API server that refuses everything.
func TestNode(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "not today", http.StatusInternalServerError)
	}))
	defer server.Close()
	facts, err := template.Machine{Model: "h100", Count: 2}.Facts()
	if err != nil {
		t.Fatal(err)
	}
	traffic, driver, dir := NewTraffic(), &NVIDIADriver{}, t.TempDir()
	driver.Load(driverBefore)
	b := &bench{Options: Options{Dir: dir}, traffic: traffic}
	if err := b.setPolicy(10); err != nil {
		t.Fatal(err)
	}
	b.nodes = []*Node{{
		Name: nodeName(0), Facts: factsOf(facts, 0), Driver: driver, Dir: dir + "/0", PolicyFile: dir + "/policy",
		Config: &rest.Config{Host: server.URL, WrapTransport: traffic.Transport, Dial: traffic.Dial},
	}}
	for range 2 {
		before := traffic.Counts().Refused["list resourceslices: 500"]
		if err := b.roll(t.Context(), time.Second, "list resourceslices", 1); err != nil {
			t.Fatal(err)
		}
		for traffic.Counts().Refused["list resourceslices: 500"] == before {
			select {
			case <-t.Context().Done():
				t.Fatal("the plugin asks for nothing")
			case <-time.After(look):
			}
		}
	}
	if traffic.Counts().Sent == 0 {
		t.Error("no byte was counted")
	}
	for range 2 {
		if err := b.stopAll(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
