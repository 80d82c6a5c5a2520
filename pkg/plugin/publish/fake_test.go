// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
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
	// eventually bounds waits that a passing test never comes near.
	eventually = 30 * time.Second
)

// apiServer is a fake one.
type apiServer = fakeapi.Server

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	api := fakeapi.New(t)
	api.AddNode(testNode)
	return api
}

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

// controller is the slice controller as kubeletplugin.Helper runs it.
type controller struct {
	client    kubernetes.Interface
	publisher *Publisher

	mu        sync.Mutex
	running   *resourceslice.Controller
	published int
}

func (c *controller) PublishResources(ctx context.Context, resources resourceslice.DriverResources) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.published++
	if c.running != nil {
		c.running.Update(&resources)
		return nil
	}
	running, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: testDriver, KubeClient: c.client, Resources: &resources,
		Owner: &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: testNode},
		ErrorHandler: func(ctx context.Context, err error, _ string) {
			var dropped *resourceslice.DroppedFieldsError
			if errors.As(err, &dropped) {
				c.publisher.HandleDroppedFields(ctx, dropped)
			}
		},
	})
	c.running = running
	return err
}

// publications counts how often something was published.
func (c *controller) publications() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.published
}

// rig is a publisher that runs until the test ends.
type rig struct {
	api        *apiServer
	publisher  *Publisher
	controller *controller

	mu      sync.Mutex
	reports []string
}

// start runs a publisher whose requests have the name as user agent.
func start(t *testing.T, api *apiServer, name string, inventory *device.Inventory) *rig {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: api.URL(), QPS: -1, UserAgent: name})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{api: api}
	r.publisher = New(Options{
		DriverName: testDriver, NodeName: testNode, KubeClient: client,
		Report: r.report, Retry: wait.Backoff{Duration: 5 * time.Millisecond},
	})
	r.controller = &controller{client: client, publisher: r.publisher}
	// A logger of the test would be used by goroutines that client-go leaves behind.
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), ktesting.NewLogger(nopTL{}, ktesting.NewConfig())))
	done := make(chan error, 1)
	go func() { done <- r.publisher.Run(ctx, r.controller) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		if r.controller.running != nil {
			r.controller.running.Stop()
		}
	})
	r.publisher.SetInventory(inventory)
	return r
}

type nopTL struct{}

func (nopTL) Helper()    {}
func (nopTL) Log(...any) {}

func (r *rig) report(_ context.Context, reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reports = append(r.reports, reason)
}

// reported returns the last report.
func (r *rig) reported() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.reports) == 0 {
		return "nothing yet"
	}
	return r.reports[len(r.reports)-1]
}

// until repeats try until it succeeds.
func until(t *testing.T, what string, try func() error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(context.Context) (bool, error) {
		last = try()
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, last)
	}
}

// untilPublished waits until the API server holds exactly these.
func (r *rig) untilPublished(t *testing.T, devices, counterSets int) {
	t.Helper()
	until(t, "publication", func() error {
		if d, c := count(r.api.Slices()); d != devices || c != counterSets {
			return fmt.Errorf("%d devices and %d counter sets, want %d and %d", d, c, devices, counterSets)
		}
		if reason := r.reported(); reason != "" {
			return errors.New(reason)
		}
		return nil
	})
}

func count(slices []resourceapi.ResourceSlice) (devices, counterSets int) {
	for _, slice := range slices {
		devices += len(slice.Spec.Devices)
		counterSets += len(slice.Spec.SharedCounters)
	}
	return devices, counterSets
}
