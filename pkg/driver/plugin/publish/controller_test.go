// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
)

// startController runs what other drivers publish with, NVIDIA's among them: the slice
// controller of Kubernetes, which publishes again when slices were deleted and the pool
// is not complete. Slices may be added to those of the inventory. It returns what ends it.
func (c *cluster) startController(t *testing.T, inventory *device.Inventory, more ...resourceslice.Slice) (stop func()) {
	t.Helper()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://cluster", Transport: c.Transport(), QPS: -1, UserAgent: "controller"})
	if err != nil {
		t.Fatal(err)
	}
	resources := Resources(testDriver, testNode, inventory, AllFeatures)
	resources.Pools[testNode] = resourceslice.Pool{Slices: append(resources.Pools[testNode].Slices, more...)}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), ktesting.NewLogger(nopTL{}, ktesting.NewConfig())))
	controller, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: testDriver, KubeClient: client, Resources: &resources,
		Owner:        &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: testNode},
		ErrorHandler: func(context.Context, error, string) {},
		Queue:        lateQueue{workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]())},
	})
	if err != nil {
		t.Fatal(err)
	}
	var rechecking sync.WaitGroup
	rechecking.Go(func() { recheck(ctx, client, func() { controller.Update(&resources) }) })
	stop = sync.OnceFunc(func() {
		cancel()
		controller.Stop()
		rechecking.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// lateQueue is late, as queues are where time is real: the controller looks again and
// again as long as it is as late as it wanted to be, and not later.
type lateQueue struct {
	workqueue.TypedRateLimitingInterface[string]
}

func (q lateQueue) AddAfter(pool string, d time.Duration) {
	q.TypedRateLimitingInterface.AddAfter(pool, d+time.Millisecond)
}

// recheck calls update whenever a slice was deleted and the newest generation of the pool
// is not complete.
func recheck(ctx context.Context, client kubernetes.Interface, update func()) {
	of := metav1.ListOptions{FieldSelector: pool{driverName: testDriver, nodeName: testNode}.selector()}
	watcher, err := client.ResourceV1().ResourceSlices().Watch(ctx, of)
	if err != nil {
		return
	}
	defer watcher.Stop()
	for event := range watcher.ResultChan() {
		if event.Type != watch.Deleted {
			continue
		}
		time.Sleep(200 * time.Millisecond)
		list, err := client.ResourceV1().ResourceSlices().List(ctx, of)
		if err == nil && !complete(list.Items) {
			update()
		}
	}
}

// newest is the newest generation of the pool.
func newest(stored []resourceapi.ResourceSlice) int64 {
	generation := int64(-1)
	for _, slice := range stored {
		generation = max(generation, slice.Spec.Pool.Generation)
	}
	return generation
}

// complete reports whether all slices of the newest generation are there.
func complete(stored []resourceapi.ResourceSlice) bool {
	generation := newest(stored)
	stored = slices.DeleteFunc(slices.Clone(stored), func(s resourceapi.ResourceSlice) bool { return s.Spec.Pool.Generation != generation })
	return len(stored) > 0 && int64(len(stored)) == stored[0].Spec.Pool.ResourceSliceCount
}

// neverLost fails the test if a device is in no slice when some request arrives, once it
// was published.
func (c *cluster) neverLost(t *testing.T, name string) {
	t.Helper()
	seen, lostAt := false, ""
	c.setFail(func(r *http.Request) *apierrors.StatusError {
		found := false
		c.EachDevice(func(d *resourceapi.Device) { found = found || d.Name == name })
		c.mu.Lock()
		defer c.mu.Unlock()
		if seen && !found && lostAt == "" {
			lostAt = r.UserAgent() + " " + r.Method + " " + r.URL.Path
		}
		seen = seen || found
		return nil
	})
	t.Cleanup(func() {
		if !seen || lostAt != "" {
			t.Errorf("device %s: published %t, lost before %q", name, seen, lostAt)
		}
	})
}

// TestOverlapWithSliceController: a plugin that publishes through the slice controller is replaced, or comes back, while
// both run for some time. It knows a GPU that the other one does not, or the same ones.
func TestOverlapWithSliceController(t *testing.T) {
	for _, latency := range []time.Duration{0, 40 * time.Millisecond, time.Second} {
		for _, overlap := range []time.Duration{25 * time.Second, 5 * time.Minute, time.Hour} {
			for _, same := range []bool{false, true} {
				for way, run := range map[string]func(t *testing.T, c *cluster, both, own *device.Inventory, overlap time.Duration, most int){
					"upgrade": upgradeFromController, "roll back": rollBackToController,
				} {
					t.Run(fmt.Sprintf("%s, %s latency, %s overlap, same devices %t", way, latency, overlap, same), func(t *testing.T) {
						inCluster(t, func(t *testing.T, c *cluster) {
							c.setLatency(latency)
							c.neverLost(t, "gpu-0000-1b-00-0")
							both := inventoryOf(t, withoutShares(), firstGPU, secondGPU)
							own := both
							if !same {
								own = inventoryOf(t, withoutShares(), firstGPU)
							}
							run(t, c, both, own, overlap, mostWrites(overlap, same))
						})
					})
				}
			}
		}
	}
}

func upgradeFromController(t *testing.T, c *cluster, both, own *device.Inventory, overlap time.Duration, most int) {
	t.Helper()
	stop := c.startController(t, both)
	after(2 * time.Minute)
	c.holds(t, both, AllFeatures)
	c.take("")
	r := c.start(t, "new", own)
	time.Sleep(20 * time.Second)
	r.ready(t)
	time.Sleep(overlap - 20*time.Second)
	c.wrote(t, overlap, most)
	stop()
	c.converges(t, own, AllFeatures, rules.Usual.RepairMost+time.Minute)
	c.rests(t, own)
	for i, slice := range c.Slices() {
		if want := r.publisher.pool.sliceName(i); slice.Name != want {
			t.Errorf("slice %s, want the name %s", slice.Name, want)
		}
	}
}

func rollBackToController(t *testing.T, c *cluster, both, own *device.Inventory, overlap time.Duration, most int) {
	t.Helper()
	r := c.start(t, "new", own)
	after(time.Minute)
	c.take("")
	c.startController(t, both)
	time.Sleep(overlap)
	c.wrote(t, overlap, most)
	r.stop()
	// The controller looks again 30 s after the last change.
	c.converges(t, both, AllFeatures, 2*time.Minute)
	after(10 * time.Minute)
	c.rests(t, both)
}

// wrote fails if there were more writes in an overlap.
func (c *cluster) wrote(t *testing.T, overlap time.Duration, most int) {
	t.Helper()
	writes := c.take("write")
	t.Logf("%d writes in an overlap of %s", writes, overlap)
	if writes > most {
		t.Errorf("%d writes, want %d at most", writes, most)
	}
}

// mostWrites of both plugins together, with at most three slices: all are replaced once, and
// where they differ, every 30 seconds plus the growing delay of repairs.
func mostWrites(overlap time.Duration, same bool) int {
	switch {
	case same, overlap < resourceslice.DefaultSyncDelay:
		return 12
	case overlap < time.Hour:
		return 60
	}
	return 150
}
