// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish_test

import (
	"net/http"
	"slices"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

// TestSlicesAfterKubeletRestarts: a kubelet that starts deletes the slices of its node and then
// registers the plugin. However often that has happened, they are back at once.
func TestSlicesAfterKubeletRestarts(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		w := c.start(t, inventoryOf(t, 1))
		after(time.Hour)
		const restarts = 10
		for n := range restarts {
			c.DeleteSlices()
			after(2 * time.Second)
			w.registered()
			if took, back := within(10*time.Second, c.usable); !back {
				t.Errorf("restart %d: the kubelet has registered the plugin, and %s later the node still has no slices", n+1, took)
			}
			after(9 * time.Minute)
		}
	})
}

// TestMissingSlicesAreSaid: while somebody deletes the slices again and again, readiness and the
// gauge say what is stored, give or take half a minute.
func TestMissingSlicesAreSaid(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		w := c.start(t, inventoryOf(t, 1))
		after(time.Hour)
		var missing, wrong time.Duration
		for second := range 30 * 60 {
			if second%60 == 0 {
				c.DeleteSlices()
			}
			after(time.Second)
			if missing += time.Second; c.usable() {
				missing = 0
			}
			if ready, stored := w.says(); missing > 45*time.Second && (ready || stored > 0) {
				wrong += time.Second
			}
		}
		if wrong > 0 {
			t.Errorf("the plugin says that it is ready, or how many slices are stored, for %s in which the node had none", wrong)
		}
	})
}

// TestDeletedWhilePolling: what others delete comes back also where there is another inventory all the time.
func TestDeletedWhilePolling(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		w := c.start(t, inventoryOf(t, 1))
		after(time.Minute)
		c.DeleteSlice(c.Slices()[1].Name)
		for range 50 {
			w.publisher.SetInventory(inventoryOf(t, 1))
			after(100 * time.Millisecond)
		}
		if !c.usable() {
			t.Errorf("there are %d slices", len(c.Slices()))
		}
	})
}

// TestRestoreOfEtcdIsNoticed: after a restore of etcd nobody tells that slices are others. They
// are put right all the same, before a watch has ended some times.
func TestRestoreOfEtcdIsNoticed(t *testing.T) {
	for name, test := range map[string]struct {
		// early is when the backup is made: before there are slices.
		early bool
	}{
		"taint": {}, "slices": {early: true},
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				restore := c.Backup()
				c.noteWatches()
				inventory := inventoryOf(t, 2)
				w := c.start(t, inventory)
				after(time.Hour)
				if !test.early {
					restore = c.Backup()
				}
				w.publish(with(inventory, 0, device.Lost))
				right := func() bool { return c.usable() && len(c.tainted(device.Lost)) == 4 }
				if _, stored := within(time.Minute, right); !stored {
					t.Fatal("the GPU was lost, and its four devices are not tainted")
				}
				c.watchesAreOld(t)
				restore()
				if took, ok := within(time.Hour, right); !ok {
					t.Errorf("%s after a restore of etcd the slices of the backup are stored, and a lost GPU is offered", took)
				}
			})
		})
	}
}

// TestObserversHaveTheirTaint: without it a pod gets an observer that has asked for any device. Where
// the API server does not store taints there is none.
func TestObserversHaveTheirTaint(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.DropTaints(true)
		c.start(t, inventoryOf(t, 1))
		after(time.Minute)
		devices := 0
		c.EachDevice(func(d *resourceapi.Device) {
			devices++
			if *d.Attributes["type"].StringValue == "observer" && len(d.Taints) == 0 {
				t.Errorf("observer %s is published without its taint", d.Name)
			}
		})
		if devices == 0 {
			t.Error("nothing is published")
		}
	})
}

// TestTaintsOfKubernetes134: its API server refuses slices with more than four taints of a device. Of a
// GPU with more faults the strongest effects are stored.
func TestTaintsOfKubernetes134(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.SetKubernetes("v1.34.9")
		inventory := inventoryOf(t, 1)
		w := c.start(t, inventory)
		after(time.Minute)
		before := len(c.Slices())
		var faults []device.Condition
		for _, reason := range []device.Reason{device.FabricUnhealthy, device.MemoryUnrepairable, device.RowRemapFailed, device.UncorrectedECC, device.XID} {
			faults = append(faults, device.Condition{PCIAddress: address(0), Reason: reason})
		}
		faults[len(faults)-1].Effect = policy.EffectNoExecute
		w.publish(inventory.With(device.Status{Conditions: faults}))
		after(time.Minute)
		evicted := 0
		c.EachDevice(func(d *resourceapi.Device) {
			if slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect == resourceapi.DeviceTaintEffectNoExecute }) {
				evicted++
			}
		})
		if before == 0 || evicted == 0 {
			t.Errorf("a GPU with five faults, one of which evicts, is offered without that taint, in %d slices: Kubernetes 1.34 takes four taints of a device", before)
		}
	})
}

// oneAnswer lets the API server that drops some fields answer the next write only.
func (c *cluster) oneAnswer(drop func(bool)) {
	writes := 0
	drop(true)
	c.onWrites(func(*http.Request) {
		if writes++; writes == 2 {
			drop(false)
		}
	})
}

// TestTaintAfterOddAnswer: in a control plane of two versions one answer comes from the server that
// drops taints. The broken GPU is tainted soon all the same.
func TestTaintAfterOddAnswer(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, 1)
		c.onlyWholeGPUs()
		w := c.start(t, inventory)
		after(time.Hour)
		c.oneAnswer(c.DropTaints)
		w.publish(with(inventory, 0, device.Lost))
		after(time.Second)
		c.DropTaints(false)
		if took, tainted := within(5*time.Minute, func() bool { return len(c.tainted(device.Lost)) > 0 }); !tainted {
			t.Errorf("one of two API servers has dropped a taint once, and %s later the lost GPU is still offered", took)
		}
	})
}

// onlyWholeGPUs makes it an API server as before Kubernetes 1.36. Without observers no device has
// a taint as long as nothing is broken.
func (c *cluster) onlyWholeGPUs() {
	c.SetKubernetes("v1.35.6")
	c.DropCounters(true)
	c.DropShares(true)
}

// TestStoredTaintsAfterOddAnswer: taints that are stored stay when an answer about another slice comes from
// the server that drops taints.
func TestStoredTaintsAfterOddAnswer(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		const gpus = 140 // more than a slice has room for
		c.onlyWholeGPUs()
		inventory := inventoryOf(t, gpus)
		w := c.start(t, inventory)
		after(time.Hour)
		if n := len(c.Slices()); n < 2 {
			t.Fatalf("%d slices, want several", n)
		}
		first := with(inventory, 0, device.Lost)
		w.publish(first)
		if _, stored := within(time.Minute, func() bool { return len(c.tainted(device.Lost)) == 1 }); !stored {
			t.Fatal("the lost GPU is not tainted")
		}
		c.oneAnswer(c.DropTaints)
		w.publish(first.With(device.Status{Conditions: []device.Condition{
			{PCIAddress: address(0), Reason: device.Lost}, {PCIAddress: address(gpus - 1), Reason: device.Lost},
		}}))
		after(time.Second)
		c.DropTaints(false)
		// Something else makes the first slice be written.
		w.publish(first.With(device.Status{Conditions: []device.Condition{
			{PCIAddress: address(0), Reason: device.Lost}, {PCIAddress: address(gpus - 1), Reason: device.Lost}, {PCIAddress: address(1), Reason: device.XID},
		}}))
		stripped := 0
		for range 10 * 60 {
			after(time.Second)
			if lost := c.tainted(device.Lost); !slices.ContainsFunc(lost, func(name string) bool { return isOf(&resourceapi.Device{Name: name}, 0) }) {
				stripped++
			}
		}
		if stripped > 0 {
			t.Errorf("for %d s of 600 the taint of a lost GPU was taken away that was stored, because an API server has dropped another one", stripped)
		}
	})
}

// TestNoPoolWithoutCounters: at no moment does the scheduler see devices of one GPU that exclude each
// other and do not say so, also if the server answers that drops counters.
func TestNoPoolWithoutCounters(t *testing.T) {
	for name, remove := range map[string]func(*cluster){
		"all":    (*cluster).DeleteSlices,
		"first":  func(c *cluster) { c.DeleteSlice(c.Slices()[0].Name) },
		"second": func(c *cluster) { c.DeleteSlice(c.Slices()[1].Name) },
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				c.start(t, inventoryOf(t, 1))
				after(time.Hour)
				overlaps := 0
				look := func(*http.Request) {
					if c.overlap() {
						overlaps++
					}
				}
				for odd := range 4 {
					writes := 0
					c.onWrites(func(r *http.Request) {
						look(r)
						c.DropCounters(writes == odd)
						writes++
					})
					remove(c)
					after(time.Hour)
					look(nil)
					if !c.usable() {
						t.Errorf("answer %d was odd: an hour later the pool cannot be used", odd)
					}
				}
				if overlaps > 0 {
					t.Errorf("%d times the pool was complete and had devices that exclude each other without counters that say so", overlaps)
				}
			})
		})
	}
}

// overlap reports whether several devices of the only GPU are offered and some draw on no counters, so
// that all of them may be allocated.
func (c *cluster) overlap() bool {
	offered := slices.DeleteFunc(c.offered(), func(d resourceapi.Device) bool { return *d.Attributes["type"].StringValue == "observer" })
	return len(offered) > 1 && slices.ContainsFunc(offered, func(d resourceapi.Device) bool { return len(d.ConsumesCounters) == 0 })
}
