// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/partage-dev/partage/pkg/device"
)

func etcdIsAway(*http.Request) *apierrors.StatusError {
	return apierrors.NewInternalError(errors.New("etcd is away"))
}

// writesFail makes all writes fail.
func writesFail(err *apierrors.StatusError) func(*http.Request) *apierrors.StatusError {
	return func(r *http.Request) *apierrors.StatusError {
		if kindOf(r) == "write" {
			return err
		}
		return nil
	}
}

func forbidden() *apierrors.StatusError {
	return apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("no right to write"))
}

// lost has a GPU with a taint.
func lost(inventory *device.Inventory, pciAddress string) *device.Inventory {
	return inventory.With(device.Status{Conditions: []device.Condition{{PCIAddress: pciAddress, Reason: device.Lost}}})
}

// TestRequests: a node that nothing happens to asks for the server's version once
// or twice an hour, renews its watch every five to ten minutes with a list of metadata, and asks
// for nothing else.
func TestRequests(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU, secondGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		c.holds(t, inventory, AllFeatures)
		if got := r.reported(); got != "" {
			t.Errorf("reported %q", got)
		}
		// One slice of counters, and one for each GPU.
		for kind, want := range map[string]int{"write": 3, "list": 1, "dry run": 1, "version": 2, "watch": 1} {
			if got := c.take(kind); got > want {
				t.Errorf("%d requests of kind %q, want %d at most", got, kind, want)
			}
		}
		c.take("")
		after(10 * time.Hour)
		versions, watches, lists, all := c.take("version"), c.take("watch"), c.take("list of metadata"), c.take("")
		if versions < 10 || versions > 20 || watches > 120 || lists > watches || all > 0 {
			t.Errorf("in ten hours %d questions for the version, %d watches and %d other requests", versions, watches, all)
		}
		// A taint is one write. The question for the version and a renewed watch may fall into the same minute.
		r.publisher.SetInventory(lost(inventory, firstGPU))
		after(time.Minute)
		versions, watches, lists = c.take("version"), c.take("watch"), c.take("list of metadata")
		if writes, all := c.take("write"), c.take(""); writes != 1 || versions > 1 || watches > 1 || lists > watches || all > 0 {
			t.Errorf("a taint: %d writes, %d questions for the version, %d watches and %d other requests", writes, versions, watches, all)
		}
	})
}

// TestOverlap: the old instance of an upgrade knows a GPU that the new one does not.
func TestOverlap(t *testing.T) {
	for _, latency := range []time.Duration{0, 20 * time.Millisecond, 40 * time.Millisecond, time.Second, 2 * time.Second} {
		t.Run(latency.String(), func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				c.setLatency(latency)
				both, one := inventoryOf(t, withoutShares(), firstGPU, secondGPU), inventoryOf(t, withoutShares(), firstGPU)
				older := c.start(t, "old", both)
				after(time.Minute)
				c.holds(t, both, AllFeatures)
				c.take("")

				newer := c.start(t, "new", one)
				after(time.Millisecond)
				if older.publisher.Newest() || !newer.publisher.Newest() {
					t.Error("the new instance is not the newest")
				}
				after(time.Minute)
				c.holds(t, one, AllFeatures)
				if got := newer.reported(); got != "" {
					t.Errorf("the new instance is not ready: %s", got)
				}
				// The old one has news, which are not written now, and its reads of what
				// the new one has written.
				older.publisher.SetInventory(lost(both, secondGPU))
				older.publisher.Registered()
				after(time.Hour)
				c.holds(t, one, AllFeatures)
				// Two slices are updated and one is deleted.
				if writes := c.take("write"); writes != 3 {
					t.Errorf("%d writes in an hour of overlap, want 3", writes)
				}

				newer.stop()
				after(time.Minute)
				if !older.publisher.Newest() {
					t.Error("the old instance is not the newest again")
				}
				c.holds(t, lost(both, secondGPU), AllFeatures)
			})
		})
	}
}

// TestOldInstanceIsWriting: a new instance comes when the old one has written a part.
func TestOldInstanceIsWriting(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.setLatency(time.Second)
		both, one := inventoryOf(t, withoutShares(), firstGPU, secondGPU), inventoryOf(t, withoutShares(), firstGPU)
		c.start(t, "old", both)
		for len(c.Slices()) < 2 {
			time.Sleep(time.Millisecond)
		}
		c.start(t, "new", one)
		c.converges(t, one, AllFeatures, time.Minute)
		c.take("")
		after(time.Hour)
		c.holds(t, one, AllFeatures)
		if writes := c.take("write"); writes > 0 {
			t.Errorf("%d more writes", writes)
		}
	})
}

// TestOutageWhileTwoRun: afterwards it is the new one that publishes.
func TestOutageWhileTwoRun(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		both, one := inventoryOf(t, withoutShares(), firstGPU, secondGPU), inventoryOf(t, withoutShares(), firstGPU)
		c.start(t, "old", both)
		after(time.Minute)
		c.setFail(etcdIsAway)
		c.start(t, "new", one)
		after(10 * time.Minute)
		c.setFail(nil)
		c.converges(t, one, AllFeatures, time.Minute)
		after(time.Hour)
		c.holds(t, one, AllFeatures)
	})
}

// TestNotPublished: what is stored is counted right and wrong all the same.
func TestNotPublished(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		older := c.start(t, "old", inventory)
		after(time.Minute)
		older.stop()
		c.setFail(writesFail(forbidden()))
		r := c.start(t, "new", lost(inventory, firstGPU))
		for range 10 {
			after(time.Minute)
			if got := r.reported(); !strings.Contains(got, "no right to write") || !strings.Contains(got, "update ResourceSlice 00001-") {
				t.Fatalf("reported %q", got)
			}
		}
		c.setFail(nil)
		after(time.Minute)
		c.holds(t, lost(inventory, firstGPU), AllFeatures)
		if got := r.reported(); got != "" {
			t.Errorf("reported %q", got)
		}
	})
}

// TestOutage: however long the API server is away, what has changed meanwhile is
// stored soon after.
func TestOutage(t *testing.T) {
	for name, fail := range map[string]func(*http.Request) *apierrors.StatusError{
		"no writes":  writesFail(apierrors.NewInternalError(errors.New("etcd has no leader"))),
		"no answers": etcdIsAway,
	} {
		for _, outage := range []time.Duration{5 * time.Second, 22 * time.Second, 20 * time.Minute} {
			t.Run(name+" "+outage.String(), func(t *testing.T) {
				inCluster(t, func(t *testing.T, c *cluster) {
					inventory := inventoryOf(t, withoutShares(), firstGPU)
					r := c.start(t, "one", inventory)
					after(time.Minute)
					c.setFail(fail)
					r.publisher.SetInventory(lost(inventory, firstGPU))
					c.take("")
					after(outage)
					if got := r.reported(); (got == "") != (outage < usualTime) {
						t.Errorf("after %s: reported %q", outage, got)
					}
					if requests := c.take(""); outage > time.Hour && requests > 200 {
						t.Errorf("%d requests", requests)
					}
					c.setFail(nil)
					if took := c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Minute); took > 40*time.Second {
						t.Errorf("stored %s after the API server was back", took)
					}
					after(30 * time.Second)
					if got := r.reported(); got != "" {
						t.Errorf("reported %q", got)
					}
				})
			})
		}
	}
}

// TestLostAnswer: a write is done, and the client hears nothing of it.
func TestLostAnswer(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		c.setLatency(requestTimeout + time.Second)
		r.publisher.SetInventory(lost(inventory, firstGPU))
		after(requestTimeout - time.Millisecond)
		c.setLatency(0)
		if took := c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Minute); took > 10*time.Second {
			t.Errorf("took %s", took)
		}
		after(time.Minute)
		if got := r.reported(); got != "" {
			t.Errorf("reported %q", got)
		}
	})
}

// TestChangedByOthers: slices are put back, at once the first time.
func TestChangedByOthers(t *testing.T) {
	for name, change := range map[string]func(*cluster){
		// As a starting kubelet does.
		"all deleted": func(c *cluster) { c.DeleteSlices() },
		"one deleted": func(c *cluster) { c.DeleteSlice(c.Slices()[0].Name) },
		"edited":      func(c *cluster) { c.edit(1, func(s *resourceapi.ResourceSlice) { s.Spec.Devices[0].Name = "other" }) },
		"counters": func(c *cluster) {
			c.edit(0, func(s *resourceapi.ResourceSlice) { s.Spec.SharedCounters[0].Name = "other" })
		},
		"generation": func(c *cluster) { c.edit(0, func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Generation += 1000 }) },
		"owner":      func(c *cluster) { c.edit(0, func(s *resourceapi.ResourceSlice) { s.OwnerReferences = nil }) },
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				inventory := inventoryOf(t, withoutShares(), firstGPU)
				r := c.start(t, "one", inventory)
				after(time.Minute)
				c.take("")
				change(c)
				if took := c.converges(t, inventory, AllFeatures, time.Minute); took > time.Second {
					t.Errorf("put back after %s", took)
				}
				// Somebody else does not give up.
				repairs := 0
				for range 2 * 60 {
					if c.differs(inventory, AllFeatures) == "" && c.Slices()[0].OwnerReferences != nil {
						repairs++
						change(c)
					}
					after(30 * time.Second)
				}
				if repairs < 5 || repairs > 25 {
					t.Errorf("put back %d times in an hour", repairs)
				}
				after(20 * time.Minute)
				c.holds(t, inventory, AllFeatures)
				if got := r.reported(); got != "" {
					t.Errorf("reported %q", got)
				}
			})
		})
	}
}

// edit changes a slice by its place.
func (c *cluster) edit(index int, edit func(*resourceapi.ResourceSlice)) {
	c.EditSlice(c.Slices()[index].Name, edit)
}

// TestUnimportantEdit: a label of somebody else is no reason to write.
func TestUnimportantEdit(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.start(t, "one", inventoryOf(t, withoutShares(), firstGPU))
		after(time.Minute)
		c.take("")
		c.edit(0, func(s *resourceapi.ResourceSlice) { s.Labels = map[string]string{"a": "b"} })
		after(time.Minute)
		if lists, writes := c.take("list"), c.take("write"); lists != 1 || writes != 0 {
			t.Errorf("listed %d times, written %d times", lists, writes)
		}
	})
}

// TestNodeUnread: nothing is published before it is known which object the node is.
func TestNodeUnread(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.unread = true
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		after(10 * time.Minute)
		if got := r.reported(); len(c.Slices()) > 0 || !strings.Contains(got, "node node-1 is not in the cluster, as far as is known") {
			t.Errorf("%d slices; reported %q", len(c.Slices()), got)
		}
		c.unread = false
		c.tellOwner()
		c.converges(t, inventory, AllFeatures, time.Minute)
	})
}

// TestNodeMadeAgain: the node has another UID afterwards, and the garbage collector
// deletes what the old one owns.
func TestNodeMadeAgain(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		before := c.Slices()[0].OwnerReferences[0].UID
		c.take("")
		c.DeleteNode()
		c.DeleteSlices()
		after(10 * time.Minute)
		if got := r.reported(); len(c.Slices()) > 0 || !strings.Contains(got, "node node-1 is not in the cluster, as far as is known") {
			t.Errorf("%d slices without a node; reported %q", len(c.Slices()), got)
		}
		c.AddNode()
		c.converges(t, inventory, AllFeatures, time.Minute)
		for _, slice := range c.Slices() {
			if slice.OwnerReferences[0].UID == before {
				t.Errorf("slice %s belongs to the old node", slice.Name)
			}
		}
		if writes := c.take("write"); writes != 2 {
			t.Errorf("%d writes, want 2", writes)
		}
	})
}

// TestNodeMadeAgainWhileDown: the slices of the old node are still there, and belong to
// the new one before the garbage collector comes.
func TestNodeMadeAgainWhileDown(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		c.start(t, "one", inventory).stop()
		r := c.start(t, "one", inventory)
		after(time.Minute)
		r.stop()
		before := c.Slices()
		c.AddNode()
		c.start(t, "two", inventory)
		after(time.Minute)
		for i, slice := range c.Slices() {
			if slice.UID != before[i].UID || slice.OwnerReferences[0].UID == before[i].OwnerReferences[0].UID {
				t.Errorf("slice %s: owned by %s before, by %s now", slice.Name, before[i].OwnerReferences[0].UID, slice.OwnerReferences[0].UID)
			}
		}
	})
}

// TestTakesOverSlices: those that the slice controller of Kubernetes has made have
// other names.
func TestTakesOverSlices(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		r.stop()
		for _, slice := range c.Slices() {
			c.DeleteSlice(slice.Name)
			slice.Name += "-x7k2p"
			slice.UID, slice.ResourceVersion = "", ""
			slice.Spec.Pool.Generation = 5
			if _, err := r.publisher.slices.Create(t.Context(), &slice, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		c.start(t, "two", inventory)
		after(time.Minute)
		c.holds(t, inventory, AllFeatures)
		if generation := c.Slices()[0].Spec.Pool.Generation; generation != 6 {
			t.Errorf("generation %d, want 6", generation)
		}
	})
}

// TestNothingToPublish: a node without a GPU has no slice, and loses those of an earlier
// time, such as the empty one that the slice controller has made for it.
func TestNothingToPublish(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		nothing := inventoryOf(t, withoutShares())
		r := c.start(t, "one", nothing)
		after(time.Minute)
		if slices, writes := len(c.Slices()), c.take("write"); slices > 0 || writes > 0 || r.reported() != "" {
			t.Errorf("%d slices after %d writes, reported %q", slices, writes, r.reported())
		}
		r.publisher.SetInventory(inventoryOf(t, withoutShares(), firstGPU))
		after(time.Minute)
		r.publisher.SetInventory(nothing)
		after(time.Minute)
		if slices := len(c.Slices()); slices > 0 || r.reported() != "" {
			t.Errorf("%d slices when the GPU has gone, reported %q", slices, r.reported())
		}
		r.stop()
		stop := c.startController(t, nothing, resourceslice.Slice{})
		after(time.Minute)
		stop()
		if slices := len(c.Slices()); slices != 1 {
			t.Errorf("the controller has made %d slices", slices)
		}
		r = c.start(t, "two", nothing)
		after(time.Minute)
		if slices := len(c.Slices()); slices > 0 || r.reported() != "" {
			t.Errorf("%d slices are left, reported %q", slices, r.reported())
		}
	})
}
