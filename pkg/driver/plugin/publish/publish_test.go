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

	"github.com/partage-dev/partage/pkg/device"
)

// TestRequests: a node that nothing happens to asks for the server's version once
// or twice an hour, renews its watch every five to ten minutes with a list of metadata, and asks
// for nothing else.
func TestRequests(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU, secondGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		c.holds(t, inventory, AllFeatures)
		r.ready(t)
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
				r.ready(t)
			})
		})
	}
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

// TestOutage: however long the API server is away, what has changed meanwhile is stored soon after. Longer outages are told.
func TestOutage(t *testing.T) {
	for name, test := range map[string]struct {
		fail func(*http.Request) *apierrors.StatusError
		says string
	}{
		"no writes":  {requestsFail("write", apierrors.NewInternalError(errors.New("etcd has no leader"))), "update ResourceSlice 00001-"},
		"no right":   {requestsFail("write", forbidden()), "no right to write"},
		"no answers": {etcdIsAway, "etcd is away"},
	} {
		for _, outage := range []time.Duration{5 * time.Second, 22 * time.Second, 20 * time.Minute} {
			t.Run(name+" "+outage.String(), func(t *testing.T) {
				inCluster(t, func(t *testing.T, c *cluster) {
					inventory := inventoryOf(t, withoutShares(), firstGPU)
					r := c.start(t, "one", inventory)
					after(time.Minute)
					c.setFail(test.fail)
					r.publisher.SetInventory(lost(inventory, firstGPU))
					after(outage)
					if got := r.reported(); (got == "") != (outage < usualTime) || got != "" && !strings.Contains(got, test.says) {
						t.Errorf("after %s: reported %q", outage, got)
					}
					c.setFail(nil)
					if took := c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Minute); took > 40*time.Second {
						t.Errorf("stored %s after the API server was back", took)
					}
					after(30 * time.Second)
					r.ready(t)
				})
			})
		}
	}
}

// TestNoAnswer: requests that get no answer at all are failures, too, although the last write may be done.
func TestNoAnswer(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		c.setLatency(time.Hour)
		r.publisher.SetInventory(lost(inventory, firstGPU))
		after(45 * time.Second)
		if got := r.reported(); got == "" {
			t.Error("still ready")
		}
		c.setLatency(requestTimeout + time.Second)
		after(2 * time.Minute)
		c.setLatency(0)
		if took := c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Minute); took > usualTime {
			t.Errorf("took %s", took)
		}
		after(time.Minute)
		r.ready(t)
		after(time.Hour) // the server ends its requests
	})
}

// TestAfterKubeletRestarts: a kubelet that starts deletes the slices of its node and then registers the plugin. However often that
// has happened, they are back at once.
func TestAfterKubeletRestarts(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		for range 10 {
			after(9 * time.Minute)
			c.DeleteSlices()
			after(2 * time.Second)
			r.publisher.Registered()
			c.converges(t, inventory, AllFeatures, 10*time.Second)
		}
	})
}

// TestMissingSlicesAreSaid: while somebody deletes the slices again and again, readiness and the gauge say what is stored, give or
// take half a minute.
func TestMissingSlicesAreSaid(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		r := c.start(t, "one", inventoryOf(t, withoutShares(), firstGPU))
		after(time.Hour)
		var missing, wrong time.Duration
		for second := range 30 * 60 {
			if second%60 == 0 {
				c.DeleteSlices()
			}
			after(time.Second)
			if missing += time.Second; len(c.offered()) > 0 {
				missing = 0
			}
			r.note(func() {
				if missing > 45*time.Second && (r.reason == "" || r.stored > 0) {
					wrong += time.Second
				}
			})
		}
		if wrong > 0 {
			t.Errorf("the plugin says that it is ready, or how many slices are stored, for %s in which the node had none", wrong)
		}
	})
}

// TestDeletedWhilePolling: what others delete comes back also where there is another inventory all the time.
func TestDeletedWhilePolling(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		r := c.start(t, "one", inventoryOf(t, withoutShares(), firstGPU))
		after(time.Minute)
		c.DeleteSlice(c.Slices()[1].Name)
		for range 50 {
			r.publisher.SetInventory(inventoryOf(t, withoutShares(), firstGPU))
			after(100 * time.Millisecond)
		}
		c.holds(t, inventoryOf(t, withoutShares(), firstGPU), AllFeatures)
	})
}

// TestNode: nothing is published before it is known which object the node is, nor without a node. One that is made again has another
// UID, and the garbage collector deletes what the old one owns.
func TestNode(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.unread = true
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		nothing := func() {
			t.Helper()
			after(10 * time.Minute)
			if got := r.reported(); len(c.Slices()) > 0 || !strings.Contains(got, "node-1 is not in the cluster") {
				t.Errorf("%d slices; reported %q", len(c.Slices()), got)
			}
		}
		nothing()
		c.unread = false
		c.tellOwner()
		c.converges(t, inventory, AllFeatures, time.Minute)
		before := c.Slices()[0].OwnerReferences[0].UID
		c.DeleteNode()
		c.DeleteSlices()
		nothing()
		c.take("")
		c.AddNode()
		c.converges(t, inventory, AllFeatures, time.Minute)
		if after := c.Slices()[0].OwnerReferences[0].UID; after == before || c.take("write") != 2 {
			t.Errorf("the slices belong to %s, before to %s, or were written more than once", after, before)
		}
	})
}

// TestNothingToPublish: a node without a GPU has no slice, and is ready.
func TestNothingToPublish(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		nothing := inventoryOf(t, withoutShares())
		r := c.start(t, "one", nothing)
		for _, inventory := range []*device.Inventory{nothing, inventoryOf(t, withoutShares(), firstGPU), nothing} {
			r.publisher.SetInventory(inventory)
			after(time.Minute)
			c.holds(t, inventory, AllFeatures)
			r.ready(t)
		}
	})
}

// TestRestoreOfEtcdIsNoticed: after a restore of etcd nobody tells that slices are others. They
// are put right all the same, before a watch has ended some times.
func TestRestoreOfEtcdIsNoticed(t *testing.T) {
	for name, withSlices := range map[string]bool{"taint": true, "slices": false} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				restore := c.Backup()
				inventory := inventoryOf(t, withoutShares(), firstGPU, secondGPU)
				r := c.start(t, "one", inventory)
				after(time.Hour)
				if withSlices {
					restore = c.Backup()
				}
				r.publisher.SetInventory(lost(inventory, firstGPU))
				c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Minute)
				// A watch that ends soon after it has begun is suspicious by itself.
				for c.take("watch") > 0 {
					after(31 * time.Second)
				}
				restore()
				c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Hour)
			})
		})
	}
}
