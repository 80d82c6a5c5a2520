// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/usage"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/steptime"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

var update = flag.Bool("update", false, "rewrite golden files and the documentation")

const golden = "testdata/everything.txt"

// busyNode is a node with so many H100, each cut into seven partitions that claims use.
func busyNode(t testing.TB, gpus int) (*device.Inventory, usage.Snapshot) {
	t.Helper()
	node := must.Get(boards.Load("h100-80-sxm"))(t)
	board := node.GPUs[0]
	node.GPUs = nil
	snapshot := usage.Snapshot{GPUs: map[string]usage.GPU{}, Records: map[string]int{"preparing": 0, "prepared": 7 * gpus, "releasing": 0, "earlier": 0, "unreadable": 0}, Sessions: map[mps.Phase]int{mps.Running: 1}}
	for n := range gpus {
		g := board
		g.PCIAddress, g.UUID = fmt.Sprintf("0000:%02x:00.0", 0x10+n), fmt.Sprintf("GPU-%08d-0000-4000-8000-000000000000", n)
		node.GPUs = append(node.GPUs, g)
		used := gpu.Usage{UsedBytes: 7 << 30}
		snapshot.GPUs[g.PCIAddress] = usage.GPU{Sampled: time.Unix(1_800_000_000, 0), Usage: &used, UnattributedBytes: 1 << 20}
	}
	inventory := must.Get(device.NewInventory(node, device.Terms{}))(t)
	for _, g := range inventory.Summaries() {
		for _, d := range g.Devices {
			if d.Kind == device.Partition && d.Partition.Profile.Name == "1g.10gb" {
				snapshot.Claims = append(snapshot.Claims, claimOf(d, len(snapshot.Claims)))
			}
		}
	}
	return inventory, snapshot
}

func claimOf(d device.Device, n int) usage.Claim {
	return usage.Claim{
		Holding: usage.Holding{
			Claim:  claim.Ref{Namespace: "team", Name: fmt.Sprint("claim-", n), UID: types.UID(fmt.Sprintf("%08d-0000-4000-8000-000000000000", n))},
			Device: d.Name, PCIAddress: d.GPU.PCIAddress, Kind: d.Kind, UUID: fmt.Sprintf("MIG-%08d-0000-4000-8000-000000000000", n),
			Partition:        &claim.LivePartition{Profile: d.Partition.Profile.Name, Placement: d.Partition.Placement},
			MemoryLimitBytes: int64(d.Partition.Profile.Resources.MemoryBytes),
		},
		Measured: usage.Measured{MemoryBytes: new(uint64(1 << 30)), Processes: new(1)},
		Pods:     []string{fmt.Sprint("pod-", n)}, PeakBytes: new(uint64(2 << 30)),
		RequestedBytes: new(int64(d.Partition.Profile.Resources.MemoryBytes)), Idle: new(3 * time.Second),
	}
}

// everything has each metric at least once.
func everything(t testing.TB) *Metrics {
	t.Helper()
	inventory, snapshot := busyNode(t, 2)
	snapshot.Claims = snapshot.Claims[:3]
	m := New(Options{
		Driver: "gpu.nvidia.com", Node: "node-1", Version: "v1", Reasons: []string{"overlap", "other"}, XIDs: []uint64{48, 79},
		Usage: func() usage.Snapshot { return snapshot },
	})
	whole, share := snapshot.Claims[2], snapshot.Claims[2]
	whole.Holding = usage.Holding{
		Claim: claim.Ref{Namespace: "team", Name: "whole", UID: "1"}, Kind: device.Whole, PCIAddress: "0000:11:00.0",
		Device: "gpu-0000-11-00-0", UUID: "GPU-00000001-0000-4000-8000-000000000000", MemoryLimitBytes: 80 << 30,
	}
	whole.Utilization, whole.Pods = new(0.5), []string{"a", "b"}
	share.Holding = whole.Holding
	share.Claim.Name, share.Kind, share.Device, share.MemoryLimitBytes = "share", device.TimeSlice, "gpu-0000-11-00-0-timeslice", 0
	share.Measured, share.RequestedBytes, share.PeakBytes, share.Idle, share.Pods = usage.Measured{}, nil, nil, nil, nil
	twice := share
	twice.Claim.UID = "another claim of the same name"
	snapshot.Claims = append(snapshot.Claims, whole, share, twice)
	used := snapshot.GPUs["0000:11:00.0"].Usage
	used.Utilization, used.PowerWatts = new(0.5), new(412.5)
	used.NVLink, used.PCIe = &gpu.Traffic{Sent: 1 << 40, Received: 1 << 41}, &gpu.Traffic{Sent: 3_000_000}

	at := gpu.Placement{Start: 4, Size: 4}
	status := device.Status{Conditions: []device.Condition{
		{PCIAddress: "0000:10:00.0", Where: &at, Reason: device.Occupied}, {PCIAddress: "0000:11:00.0", Reason: device.ResetRequired},
		{PCIAddress: "0000:11:00.0", Reason: device.ResetRequired, Message: "twice"},
	}}
	m.SetGPUs(inventory.With(status), status)
	m.SetHealth("0000:10:00.0", gpu.Health{Throttling: []gpu.Throttling{gpu.ThrottlingPowerBrake}, Temperature: new(55)}, nil)
	m.XID("0000:10:00.0", 79)
	m.XID("0000:10:00.0", 31)
	_, times := steptime.With(t.Context())
	times.Add(steptime.NVML, 3*time.Millisecond)
	for _, operation := range []Operation{Prepare, Unprepare} {
		m.Begin(operation)("", times)
		m.Begin(operation)("overlap", times)
	}
	m.SetNeighbour("device-plugin", ptr.To(true))
	m.SetNeighbour("dra-driver", ptr.To(false))
	m.SetNeighbour("container-runtime", ptr.To(true))
	m.SetNeighbour("container-runtime", nil)
	m.SetExtendedResources(nil)
	m.SetExtendedResources(ptr.To(true))
	m.ReconcileFailed()
	m.PublishFailed()
	m.Published(3)
	return m
}

// scrape asks over HTTP, as Prometheus does.
func scrape(t testing.TB, m *Metrics) string {
	t.Helper()
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	defer m.Serve(t.Context(), listener)()
	return bodyOf(t, "http://"+listener.Addr().String()+Path)
}

func bodyOf(t testing.TB, url string) string {
	t.Helper()
	answer := must.Get(http.Get(url))(t)
	body, err := io.ReadAll(answer.Body)
	if err = errors.Join(err, answer.Body.Close()); err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v", answer.Status, err)
	}
	return string(body)
}

// changing are values that no two runs have in common.
var changing = regexp.MustCompile(`(?m)^(process_\S+|go_\S+|# (HELP|TYPE) process_.*|partage_build_info.*|\S+_sum.*|\S+_bucket.*|promhttp_\S+).*\n`)

// TestEverything compares with a golden file, in which somebody looks at what is told.
func TestEverything(t *testing.T) {
	t.Parallel()
	got := changing.ReplaceAllString(scrape(t, everything(t)), "")
	if *update {
		must.Do(t, os.WriteFile(golden, []byte(got), 0o600))
	}
	want, err := os.ReadFile(golden)
	if err != nil || got != string(want) {
		t.Errorf("%s is out of date, %v; rewrite it with: make golden\n%s", golden, err, got)
	}
}

// TestNotUTF8: a name that the hardware has garbled costs a letter, and not the metric.
func TestNotUTF8(t *testing.T) {
	t.Parallel()
	inventory, _ := busyNode(t, 1)
	node := *inventory.Summaries()[0].GPU
	node.ProductName = "NVIDIA \xff\x00\"\n"
	garbled := must.Get(device.NewInventory(&gpu.Node{DriverVersion: "580.65.06", GPUs: []gpu.GPU{node}}, device.Terms{}))(t)
	m := New(Options{})
	m.SetGPUs(garbled, device.Status{})
	expect.Contains(t, scrape(t, m), `product="NVIDIA �`)
}

// TestReferenceIsComplete: every metric is in the reference, with its type and labels, and
// everything in the reference is exported.
func TestReferenceIsComplete(t *testing.T) {
	t.Parallel()
	families := must.Get(everything(t).registry.Gather())(t)
	documented := map[string]Definition{}
	for _, g := range Reference() {
		for _, d := range g.Definitions {
			documented[d.Name] = d
		}
	}
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "process_") {
			continue
		}
		d, ok := documented[f.GetName()]
		if !ok {
			t.Errorf("%s is not in the reference", f.GetName())
			continue
		}
		delete(documented, f.GetName())
		if got := strings.ToLower(f.GetType().String()); got != string(d.Type) || f.GetHelp() != d.Help {
			t.Errorf("%s is a %s, %q", f.GetName(), got, f.GetHelp())
		}
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, l.GetName())
			}
			if want := slices.Sorted(slices.Values(d.Labels)); !slices.Equal(labels, want) {
				t.Errorf("%s has the labels %v, want %v", f.GetName(), labels, want)
			}
		}
	}
	for name := range documented {
		t.Errorf("%s is not exported", name)
	}
}

// TestLint has Prometheus's linter judge names, types and help, and its tool as well where
// that is installed.
func TestLint(t *testing.T) {
	t.Parallel()
	body := scrape(t, everything(t))
	expect.Len(t, must.Get(promlint.New(strings.NewReader(body)).Lint())(t), 0)
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not installed")
	}
	check := exec.CommandContext(t.Context(), promtool, "check", "metrics")
	check.Stdin = strings.NewReader(body)
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v: %s", err, out)
	}
}

// TestNVIDIAMetrics: the second listener has what NVIDIA's driver tells, by its names, labels and buckets, and nothing else.
func TestNVIDIAMetrics(t *testing.T) {
	t.Parallel()
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	defer everything(t).ServeNVIDIA(t.Context(), listener, "/nvidia/metrics")()
	body := bodyOf(t, "http://"+listener.Addr().String()+"/nvidia/metrics")
	for _, line := range []string{
		`nvidia_dra_requests_total{driver="gpu.nvidia.com",operation="prepare"} 2`,
		`nvidia_dra_request_duration_seconds_bucket{driver="gpu.nvidia.com",operation="unprepare",le="0.05"} 2`,
		`nvidia_dra_request_duration_seconds_bucket{driver="gpu.nvidia.com",operation="unprepare",le="12.8"} 2`,
		`nvidia_dra_requests_inflight{driver="gpu.nvidia.com",operation="prepare"} 0`,
		`nvidia_dra_prepared_devices{device_type="mig",driver="gpu.nvidia.com",node="node-1"} 3`,
		`nvidia_dra_node_prepare_errors_total{driver="gpu.nvidia.com",error_type="overlap"} 1`,
		`nvidia_dra_node_unprepare_errors_total{driver="gpu.nvidia.com",error_type="overlap"} 1`,
	} {
		expect.Contains(t, body, line+"\n", "there is no", line)
	}
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "nvidia_dra_") {
			t.Errorf("there is %s", line)
		}
	}
	expect.Equal(t, strings.Count(body, "# TYPE"), 6, "metrics")
}

// TestNothingElseIsServed: anybody in the network may ask the port.
func TestNothingElseIsServed(t *testing.T) {
	t.Parallel()
	listener := must.Get((&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	defer everything(t).Serve(t.Context(), listener)()
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{http.MethodGet, "/", http.StatusNotFound}, {http.MethodGet, "/debug/pprof/", http.StatusNotFound},
		{http.MethodPost, Path, http.StatusMethodNotAllowed}, {http.MethodGet, Path, http.StatusOK},
	} {
		request, err := http.NewRequestWithContext(t.Context(), c.method, "http://"+listener.Addr().String()+c.path, http.NoBody)
		must.Do(t, err)
		answer := must.Get(http.DefaultClient.Do(request))(t)
		_ = answer.Body.Close()
		expect.Equal(t, answer.StatusCode, c.want, c.method, c.path, answer.Status)
	}
}

// BenchmarkScrape measures an answer about eight GPUs with seven claims each, without the
// network: docs/reference/metrics.md has the figures.
func BenchmarkScrape(b *testing.B) {
	inventory, snapshot := busyNode(b, 8)
	m := New(Options{
		Driver: "gpu.nvidia.com", Node: "node-1", Reasons: make([]string, 20), XIDs: []uint64{48, 62, 63, 64, 74, 79, 92, 94, 95},
		Usage: func() usage.Snapshot { return snapshot },
	})
	m.SetGPUs(inventory, device.Status{})
	body := scrape(b, m)
	series := 0
	for line := range strings.Lines(body) {
		if !strings.HasPrefix(line, "#") {
			series++
		}
	}
	handler, request := handler(b.Context(), Path, m.registry), httptest.NewRequestWithContext(b.Context(), http.MethodGet, Path, http.NoBody)
	b.ReportAllocs()
	for b.Loop() {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		if answer.Code != http.StatusOK {
			b.Fatal(answer.Body)
		}
	}
	b.ReportMetric(float64(series), "series")
	b.ReportMetric(float64(len(body)), "body-bytes")
}

// TestCordoned: a cordoned GPU is healthy, and keeps its role while it is in use.
func TestCordoned(t *testing.T) {
	t.Parallel()
	inventory, snapshot := busyNode(t, 2)
	snapshot.Claims = snapshot.Claims[:1]
	m := New(Options{Driver: "gpu.nvidia.com", Usage: func() usage.Snapshot { return snapshot }})
	status := device.Status{Conditions: []device.Condition{
		{PCIAddress: "0000:10:00.0", Reason: device.Cordoned}, {PCIAddress: "0000:11:00.0", Reason: device.Cordoned},
	}}
	m.SetGPUs(inventory.With(status), status)
	text := scrape(t, m)
	for _, want := range []string{
		`partage_gpu_healthy{gpu="0000:10:00.0"} 1`, `partage_gpu_healthy{gpu="0000:11:00.0"} 1`,
		`partage_gpu_role{gpu="0000:10:00.0",role="partitioned"} 1`, `partage_gpu_role{gpu="0000:11:00.0",role="unavailable"} 1`,
	} {
		expect.Contains(t, text, want, "the text")
	}
}

// TestHealthNotKnown: a GPU that cannot be asked is not said to be cool.
func TestHealthNotKnown(t *testing.T) {
	t.Parallel()
	m := everything(t)
	m.SetHealth("0000:10:00.0", gpu.Health{}, gpu.ErrLost)
	if text := scrape(t, m); strings.Contains(text, "partage_gpu_throttled{") || strings.Contains(text, "partage_claim_throttled{") {
		t.Error("something is said of throttling")
	}
}

// TestUseOfAGPUThatIsGone: it may still answer something, such as that nothing is used. What is read of it is not told, whatever the
// condition does; what is known of it without asking, and what is read of others, is.
func TestUseOfAGPUThatIsGone(t *testing.T) {
	t.Parallel()
	for _, condition := range []device.Condition{
		{PCIAddress: "0000:11:00.0", Reason: device.Lost}, {PCIAddress: "0000:11:00.0", Reason: device.Unresponsive, Effect: policy.EffectNone},
	} {
		inventory, snapshot := busyNode(t, 2)
		for address, g := range snapshot.GPUs {
			g.Usage.Utilization = new(0.5)
			snapshot.GPUs[address] = g
		}
		taken := snapshot.Claims[0].Measured
		m := New(Options{Driver: "gpu.nvidia.com", Usage: func() usage.Snapshot { return snapshot }})
		for address := range snapshot.GPUs {
			m.SetHealth(address, gpu.Health{Temperature: new(55)}, nil)
		}
		status := device.Status{Conditions: []device.Condition{condition}}
		m.SetGPUs(inventory.With(status), status)
		text := scrape(t, m)
		for _, name := range []string{"memory_used_bytes", "memory_unattributed_bytes", "utilization_ratio", "temperature_celsius", "throttled"} {
			if strings.Contains(text, "partage_gpu_"+name+`{gpu="0000:11:00.0"`) || !strings.Contains(text, "partage_gpu_"+name+`{gpu="0000:10:00.0"`) {
				t.Errorf("%s: partage_gpu_%s", condition.Reason, name)
			}
		}
		for _, name := range []string{"memory_used_bytes", "processes", "idle_seconds", "throttled"} {
			if n := strings.Count(text, "\npartage_claim_"+name+"{"); n != 7 {
				t.Errorf("%s: partage_claim_%s: %d, want those of the other GPU", condition.Reason, name, n)
			}
		}
		for _, name := range []string{"info", "memory_peak_bytes", "memory_limit_bytes", "memory_requested_bytes"} {
			if n := strings.Count(text, "\npartage_claim_"+name+"{"); n != 14 {
				t.Errorf("%s: partage_claim_%s: %d, want all", condition.Reason, name, n)
			}
		}
		if !strings.Contains(text, `partage_gpu_sample_timestamp_seconds{gpu="0000:11:00.0"}`) || snapshot.GPUs["0000:11:00.0"].Usage == nil || snapshot.Claims[0].Measured != taken {
			t.Errorf("%s: what the sampler remembers was changed, or when it looked is not told", condition.Reason)
		}
	}
}
