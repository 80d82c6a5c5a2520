// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

const (
	testDriver = "gpu.nvidia.com"
	testNode   = "node-1"
	firstGPU   = "0000:1b:00.0"
	secondGPU  = "0000:2c:00.0"
)

// withoutShares offers what one claim has alone.
func withoutShares() *policy.Policy {
	return &policy.Policy{Default: policy.Offer{Whole: true, Partition: &policy.PartitionOffer{}}}
}

// inventoryOf has GPUs that can be cut in two halves. Each is four devices, and two
// more if the policy offers shares.
func inventoryOf(t *testing.T, p *policy.Policy, pciAddresses ...string) *device.Inventory {
	t.Helper()
	all := gpu.Resources{MemoryBytes: 8 << 30, Multiprocessors: 16}
	half := gpu.Resources{MemoryBytes: 4 << 30, Multiprocessors: 8}
	node := &gpu.Node{DriverVersion: "580.95.05"}
	for _, address := range pciAddresses {
		node.GPUs = append(node.GPUs, gpu.GPU{
			PCIAddress: address, UUID: "GPU-" + address, ProductName: "Test GPU", Architecture: "Hopper",
			ComputeCapability: gpu.Version{Major: 9}, Resources: all,
			MIG: &gpu.MIG{Dynamic: true, MemorySlices: 2, Profiles: []gpu.Profile{
				{ID: 0, Name: "2g.8gb", Slices: 2, MaxInstances: 1, Resources: all, Placements: []gpu.Placement{{Start: 0, Size: 2}}},
				{
					ID: 19, Name: "1g.4gb", Slices: 1, MaxInstances: 2, Resources: half,
					Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 1, Size: 1}},
				},
			}},
		})
	}
	inventory, err := device.NewInventory(node, device.Terms{Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	return inventory
}

// TestMain removes what slows down the reporting of errors: it would sleep from the
// beginning of fake time until now.
func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil //nolint:reassign // that is how it is configured
	os.Exit(m.Run())
}

// cluster has an API server without a network, so that time can be fake.
type cluster struct {
	*fakeapi.Server
	lockFile string
	// beforeRun is called before a publisher runs. Optional.
	beforeRun func(*Publisher)

	mu sync.Mutex
	// publishers are told what becomes of the node, unless it cannot be read.
	publishers []*Publisher
	unread     bool
	// latency is how long a request takes.
	latency time.Duration
	// fail makes requests fail for which it returns an error.
	fail func(*http.Request) *apierrors.StatusError
	// requests counts what was asked for, by user agent and kind.
	requests map[string]int
}

// inCluster runs a test in fake time.
func inCluster(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{Server: fakeapi.NewWithoutNetwork(t), lockFile: filepath.Join(t.TempDir(), "publish.lock"), requests: map[string]int{}}
		c.AddNode()
		c.Refuse(c.handle)
		test(t, c)
	})
}

// AddNode makes the node, or another one in its place.
func (c *cluster) AddNode() {
	c.Server.AddNode(testNode)
	c.tellOwner()
}

// DeleteNode removes the node.
func (c *cluster) DeleteNode() {
	c.Server.DeleteNode(testNode)
	c.tellOwner()
}

// tellOwner does what a watch of the node does.
func (c *cluster) tellOwner(more ...*Publisher) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.publishers = append(c.publishers, more...)
	var owner types.UID
	if node := c.Node(testNode); node != nil {
		owner = node.UID
	}
	for _, p := range c.publishers {
		if !c.unread {
			p.SetOwner(owner)
		}
	}
}

func (c *cluster) handle(r *http.Request) *apierrors.StatusError {
	c.mu.Lock()
	latency, fail := c.latency, c.fail
	c.requests[r.UserAgent()+" "+kindOf(r)]++
	c.mu.Unlock()
	if kindOf(r) != "watch" {
		time.Sleep(latency)
	}
	if fail == nil {
		return nil
	}
	return fail(r)
}

func (c *cluster) setLatency(latency time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.latency = latency
}

func (c *cluster) setFail(fail func(*http.Request) *apierrors.StatusError) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = fail
}

// kindOf tells requests apart by what they cost.
func kindOf(r *http.Request) string {
	query := r.URL.Query()
	switch {
	case r.URL.Path == "/version":
		return "version"
	case query.Has("watch"):
		return "watch"
	case query.Has("dryRun"):
		return "dry run"
	case r.Method != http.MethodGet:
		return "write"
	case strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata"):
		return "list of metadata"
	}
	return "list"
}

// take returns how many requests of a kind there were, of all clients, since the last
// call; of all kinds with "".
func (c *cluster) take(kind string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	sum := 0
	for key, n := range c.requests {
		if strings.HasSuffix(key, " "+kind) || kind == "" {
			sum += n
			delete(c.requests, key)
		}
	}
	return sum
}

// rig is a publisher that runs until the test ends.
type rig struct {
	publisher *Publisher
	stop      func()

	mu       sync.Mutex
	reason   string
	stored   int
	warnings []string
	said     map[string]string
}

// start runs a publisher whose requests have the name as user agent.
func (c *cluster) start(t *testing.T, name string, inventory *device.Inventory) *rig {
	t.Helper()
	return c.startOver(t, c.Transport(), name, inventory)
}

// startOver runs a publisher whose requests go over a network.
func (c *cluster) startOver(t *testing.T, network http.RoundTripper, name string, inventory *device.Inventory) *rig {
	t.Helper()
	config := &rest.Config{Host: "http://cluster", Transport: network, QPS: -1, UserAgent: name}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{reason: "nothing yet", said: map[string]string{}}
	r.publisher = New(Options{
		DriverName: testDriver, NodeName: testNode, KubeClient: client, MetadataClient: metadataClient, LockFile: c.lockFile, Say: r.say,
		Report:  func(_ context.Context, reason string) { r.note(func() { r.reason = reason }) },
		Observe: func(slices int, _ error) { r.note(func() { r.stored = slices }) },
	})
	// A logger of the test would be used by goroutines that client-go leaves behind.
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), ktesting.NewLogger(nopTL{}, ktesting.NewConfig())))
	if c.beforeRun != nil {
		c.beforeRun(r.publisher)
	}
	c.tellOwner(r.publisher)
	var running sync.WaitGroup
	running.Go(func() { r.publisher.Run(ctx) })
	r.stop = func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(r.stop)
	r.publisher.SetInventory(inventory)
	return r
}

type nopTL struct{}

func (nopTL) Helper()    {}
func (nopTL) Log(...any) {}

func (r *rig) note(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

func (r *rig) say(_ context.Context, reason, message string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.said[reason] != message && message != "" {
		r.warnings = append(r.warnings, reason+": "+message)
	}
	r.said[reason] = message
}

// warned returns the warnings with a reason.
func (r *rig) warned(reason string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(r.warnings), func(w string) bool { return !strings.HasPrefix(w, reason+": ") })
}

// reported returns the last report.
func (r *rig) reported() (reason string) {
	r.note(func() { reason = r.reason })
	return reason
}

// ready fails unless the last report is that everything is stored.
func (r *rig) ready(t *testing.T) {
	t.Helper()
	if got := r.reported(); got != "" {
		t.Errorf("not ready: %s", got)
	}
}

// after lets time pass.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// holds fails unless the API server holds exactly this inventory.
func (c *cluster) holds(t *testing.T, inventory *device.Inventory, f Features) {
	t.Helper()
	if problem := c.differs(inventory, f); problem != "" {
		t.Error(problem)
	}
}

func (c *cluster) differs(inventory *device.Inventory, f Features) string {
	wanted := Resources(testDriver, testNode, inventory, f).Pools[testNode].Slices
	stored := c.Slices()
	if len(stored) != len(wanted) {
		return fmt.Sprintf("%d slices, want %d", len(stored), len(wanted))
	}
	for i, slice := range stored {
		pool := slice.Spec.Pool
		switch {
		case pool.ResourceSliceCount != int64(len(wanted)) || pool.Generation != stored[0].Spec.Pool.Generation:
			return fmt.Sprintf("slice %d has pool %+v", i, pool)
		case !resourceslice.DevicesDeepEqual(slice.Spec.Devices, wanted[i].Devices),
			!apiequality.Semantic.DeepEqual(slice.Spec.SharedCounters, wanted[i].SharedCounters):
			return fmt.Sprintf("slice %d has another content", i)
		}
	}
	return ""
}

// converges waits until the API server holds exactly this inventory, and returns how
// long that took.
func (c *cluster) converges(t *testing.T, inventory *device.Inventory, f Features, limit time.Duration) time.Duration {
	t.Helper()
	began := time.Now()
	for {
		synctest.Wait()
		problem := c.differs(inventory, f)
		if problem == "" {
			return time.Since(began)
		}
		if time.Since(began) > limit {
			t.Fatalf("after %s: %s", limit, problem)
		}
		time.Sleep(max(100*time.Millisecond, limit/300))
	}
}

// rests fails unless the API server holds this inventory for an hour without a write.
func (c *cluster) rests(t *testing.T, inventory *device.Inventory) {
	t.Helper()
	c.take("")
	after(time.Hour)
	c.holds(t, inventory, AllFeatures)
	if writes := c.take("write"); writes > 0 {
		t.Errorf("%d more writes", writes)
	}
}

// edit changes a slice by its place.
func (c *cluster) edit(index int, edit func(*resourceapi.ResourceSlice)) {
	c.EditSlice(c.Slices()[index].Name, edit)
}

// offered are the devices that the scheduler would allocate, without observers: those of the newest generation of the pool, if all
// its slices are there.
func (c *cluster) offered() (devices []resourceapi.Device) {
	stored := c.Slices()
	if !complete(stored) {
		return nil
	}
	for _, slice := range stored {
		if slice.Spec.Pool.Generation == newest(stored) {
			devices = append(devices, slice.Spec.Devices...)
		}
	}
	return slices.DeleteFunc(devices, func(d resourceapi.Device) bool { return *d.Attributes["type"].StringValue == "observer" })
}

// overlaps reports whether several devices of the only GPU are offered and some draw on no counters, so that all of them
// may be allocated.
func (c *cluster) overlaps() bool {
	offered := c.offered()
	return len(offered) > 1 && slices.ContainsFunc(offered, func(d resourceapi.Device) bool { return len(d.ConsumesCounters) == 0 })
}

// tainted counts the devices that have a taint.
func (c *cluster) tainted(taint func(resourceapi.DeviceTaint) bool) (n int) {
	c.EachDevice(func(d *resourceapi.Device) {
		if slices.ContainsFunc(d.Taints, taint) {
			n++
		}
	})
	return n
}

func isLost(t resourceapi.DeviceTaint) bool { return t.Key == testDriver+"/gpu-lost" }

func etcdIsAway(*http.Request) *apierrors.StatusError {
	return apierrors.NewInternalError(errors.New("etcd is away"))
}

// requestsFail makes requests of a kind fail.
func requestsFail(kind string, err *apierrors.StatusError) func(*http.Request) *apierrors.StatusError {
	return func(r *http.Request) *apierrors.StatusError {
		if kindOf(r) == kind {
			return err
		}
		return nil
	}
}

func forbidden() *apierrors.StatusError {
	return apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("no right to write"))
}

// lost has GPUs with a taint.
func lost(inventory *device.Inventory, pciAddresses ...string) *device.Inventory {
	var status device.Status
	for _, address := range pciAddresses {
		status.Conditions = append(status.Conditions, device.Condition{PCIAddress: address, Reason: device.Lost})
	}
	return inventory.With(status)
}
