// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish_test

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

// This file has all that the tests of package publish_test know of the package. They look at
// nothing but what the API server has, and what is said about it.

const (
	driverName = "gpu.nvidia.com"
	nodeName   = "node-1"
)

// cluster is an API server without a network, so that time can be fake.
type cluster struct {
	*fakeapi.Server
	lockFile string

	mu sync.Mutex
	// watched is when the last watch began.
	watched time.Time
}

// inCluster runs a test in fake time.
func inCluster(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{Server: fakeapi.NewWithoutNetwork(t), lockFile: filepath.Join(t.TempDir(), "publish.lock")}
		c.AddNode(nodeName)
		test(t, c)
	})
}

// writer publishes until the test ends.
type writer struct {
	publisher *publish.Publisher

	mu       sync.Mutex
	notReady string
	slices   int
}

// start runs a writer that publishes the devices of an inventory.
func (c *cluster) start(t *testing.T, inventory *device.Inventory) *writer {
	t.Helper()
	config := &rest.Config{Host: "http://cluster", Transport: c.Transport(), QPS: -1}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	w := &writer{notReady: "nothing is said yet"}
	w.publisher = publish.New(publish.Options{
		DriverName: driverName, NodeName: nodeName, KubeClient: client, MetadataClient: metadataClient, LockFile: c.lockFile,
		Report:  func(_ context.Context, reason string) { w.note(func() { w.notReady = reason }) },
		Say:     func(context.Context, string, string) {},
		Observe: func(slices int, _ error) { w.note(func() { w.slices = slices }) },
	})
	// A logger of the test would be used by goroutines that client-go leaves behind.
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), ktesting.NewLogger(nopTL{}, ktesting.NewConfig())))
	w.publisher.SetOwner(c.Node(nodeName).UID)
	var running sync.WaitGroup
	running.Go(func() { w.publisher.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	w.publish(inventory)
	return w
}

type nopTL struct{}

func (nopTL) Helper()    {}
func (nopTL) Log(...any) {}

func (w *writer) note(change func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change()
}

// publish replaces what is to be published.
func (w *writer) publish(inventory *device.Inventory) { w.publisher.SetInventory(inventory) }

// registered tells the writer that the kubelet has registered the plugin.
func (w *writer) registered() { w.publisher.Registered() }

// says returns what readiness and the gauge of stored slices are told.
func (w *writer) says() (ready bool, slices int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.notReady == "", w.slices
}

// after lets time pass.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// within waits until a condition holds, and reports whether that was within a time.
func within(limit time.Duration, holds func() bool) (took time.Duration, ok bool) {
	began := time.Now()
	for {
		synctest.Wait()
		took = time.Since(began)
		if holds() {
			return took, true
		}
		if took >= limit {
			return took, false
		}
		time.Sleep(time.Second)
	}
}

// tainted are the devices that pods are kept away from for a reason, sorted.
func (c *cluster) tainted(reason device.Reason) (names []string) {
	c.EachDevice(func(d *resourceapi.Device) {
		if slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == driverName+"/"+string(reason) }) {
			names = append(names, d.Name)
		}
	})
	slices.Sort(names)
	return names
}

// offered are the devices that the scheduler would allocate: those of the newest generation of the
// pool, if all its slices are there.
func (c *cluster) offered() (devices []resourceapi.Device) {
	var newest, count, present int64
	for _, slice := range c.Slices() {
		pool := slice.Spec.Pool
		if pool.Generation < newest {
			continue
		}
		if pool.Generation > newest {
			newest, present, devices = pool.Generation, 0, nil
		}
		count = pool.ResourceSliceCount
		present++
		devices = append(devices, slice.Spec.Devices...)
	}
	if present != count {
		return nil
	}
	return devices
}

func (c *cluster) usable() bool { return len(c.offered()) > 0 }

// noteWatches has it known when watches begin.
func (c *cluster) noteWatches() {
	c.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.URL.Query().Has("watch") {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.watched = time.Now()
		}
		return nil
	})
}

// watchesAreOld waits until no watch has begun for half a minute: one that ends soon after it
// has begun is suspicious by itself.
func (c *cluster) watchesAreOld(t *testing.T) {
	t.Helper()
	if _, old := within(time.Hour, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return time.Since(c.watched) > 30*time.Second
	}); !old {
		t.Fatal("watches begin all the time")
	}
}

// onWrites calls look before each request that writes.
func (c *cluster) onWrites(look func(*http.Request)) {
	c.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method != http.MethodGet && !r.URL.Query().Has("dryRun") {
			look(r)
		}
		return nil
	})
}

// address is that of the GPU with a number.
func address(number int) string { return fmt.Sprintf("0000:%02x:00.0", 0x1b+number) }

// inventoryOf has GPUs that can be cut in two halves, and offers them whole and as partitions.
func inventoryOf(t *testing.T, gpus int) *device.Inventory {
	t.Helper()
	all := gpu.Resources{MemoryBytes: 8 << 30, Multiprocessors: 16}
	half := gpu.Resources{MemoryBytes: 4 << 30, Multiprocessors: 8}
	node := &gpu.Node{DriverVersion: "580.95.05"}
	for number := range gpus {
		node.GPUs = append(node.GPUs, gpu.GPU{
			PCIAddress: address(number), UUID: fmt.Sprintf("GPU-%08d", number), ProductName: "Test GPU", Architecture: "Hopper",
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
	inventory, err := device.NewInventory(node, device.Terms{Policy: &policy.Policy{Default: policy.Offer{Whole: true, Partition: &policy.PartitionOffer{}}}})
	if err != nil {
		t.Fatal(err)
	}
	return inventory
}

// with returns the inventory with conditions of the GPU with a number.
func with(inventory *device.Inventory, number int, reasons ...device.Reason) *device.Inventory {
	var status device.Status
	for _, reason := range reasons {
		status.Conditions = append(status.Conditions, device.Condition{PCIAddress: address(number), Reason: reason})
	}
	return inventory.With(status)
}

// isOf reports whether a device is of the GPU with a number.
func isOf(d *resourceapi.Device, number int) bool {
	return strings.HasPrefix(d.Name, "gpu-"+strings.NewReplacer(":", "-", ".", "-").Replace(address(number)))
}
