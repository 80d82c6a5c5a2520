// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

func invalid(path string) *apierrors.StatusError {
	errs := field.ErrorList{field.Invalid(field.NewPath(path), "probe", "must be in this slice")}
	return apierrors.NewInvalid(schema.GroupKind{Group: resourceapi.GroupName, Kind: "ResourceSlice"}, "", errs)
}

// invalidWithoutField is how an admission policy refuses.
func invalidWithoutField() *apierrors.StatusError {
	err := invalid("spec")
	err.ErrStatus.Details.Causes = nil
	return err
}

// onlyShares offers one kind of shares and nothing else.
func onlyShares() *policy.Policy {
	p := policy.Builtin()
	return &policy.Policy{Default: policy.Offer{TimeSlice: p.Default.TimeSlice}}
}

// TestFeatures: what is published follows what the cluster can do, and people are told
// once what is left out and why.
func TestFeatures(t *testing.T) {
	t.Parallel()
	noCounters, noShares := Taints|ShareCounters|NewTaints, AllFeatures&^ConsumableCapacity
	noShareCounters := AllFeatures &^ ShareCounters
	for name, test := range map[string]struct {
		policy  *policy.Policy
		change  func(*cluster)
		want    Features
		devices int
		said    string
	}{
		"everything":       {policy.Builtin(), func(*cluster) {}, AllFeatures, 6, ""},
		"no counters":      {policy.Builtin(), func(c *cluster) { c.DropCounters(true) }, noCounters, 1, "DRAPartitionableDevices"},
		"no shares":        {policy.Builtin(), func(c *cluster) { c.DropShares(true) }, noShares, 4, "DRAConsumableCapacity"},
		"shares not asked": {withoutShares(), func(c *cluster) { c.DropShares(true) }, noShares, 4, ""},
		"1.35 with gates":  {policy.Builtin(), ofVersion("v1.35.9-gke.100"), noShareCounters, 4, "scheduler of Kubernetes v1.35.9-gke.100"},
		"1.36.1":           {policy.Builtin(), ofVersion("v1.36.1+k3s1"), noShareCounters, 4, "139034"},
		"1.36.1, alone":    {onlyShares(), ofVersion("v1.36.1"), noShareCounters, 1, ""},
		"1.34":             {policy.Builtin(), ofVersion("v1.34.1"), ShareCounters | Taints, 1, "ignores the counters"},
		"1.36.2":           {policy.Builtin(), ofVersion("v1.36.2-eks-1"), AllFeatures, 6, ""},
		"1.37":             {policy.Builtin(), ofVersion("v1.37.0"), AllFeatures, 6, ""},
		"unknown version":  {policy.Builtin(), ofVersion("main"), AllFeatures, 6, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				test.change(c)
				inventory := inventoryOf(t, test.policy, firstGPU)
				r := c.start(t, "one", inventory)
				after(time.Hour)
				c.holds(t, inventory, test.want)
				if devices := len(c.offered()); devices != test.devices {
					t.Errorf("%d devices, want %d", devices, test.devices)
				}
				r.ready(t)
				warnings := r.warned(reasonLeftOut)
				switch {
				case test.said == "" && len(warnings) > 0,
					test.said != "" && (len(warnings) != 1 || !strings.Contains(warnings[0], test.said)):
					t.Errorf("said %q, want one with %q", warnings, test.said)
				}
			})
		})
	}
}

func ofVersion(gitVersion string) func(*cluster) {
	return func(c *cluster) { c.SetKubernetes(gitVersion) }
}

// TestProbeFails: as long as nothing is known nothing is published. A refusal that
// names no field says nothing of the cluster.
func TestProbeFails(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.setFail(requestsFail("dry run", invalidWithoutField()))
		inventory := inventoryOf(t, policy.Builtin(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		if got := r.reported(); len(c.Slices()) > 0 || !strings.Contains(got, "which features the API server has") {
			t.Errorf("%d slices; reported %q", len(c.Slices()), got)
		}
		c.setFail(nil)
		c.converges(t, inventory, AllFeatures, time.Minute)
	})
}

// TestMixedControlPlane: while a control plane is upgraded, or rolled back, about
// every other answer comes from a server that lacks something. Nothing is withdrawn, whatever
// happens to the slices meanwhile.
func TestMixedControlPlane(t *testing.T) {
	for name, lack := range map[string]func(*cluster, bool){
		"counters": func(c *cluster, lacks bool) { c.DropCounters(lacks) },
		"shares":   func(c *cluster, lacks bool) { c.DropShares(lacks) },
		"version": func(c *cluster, lacks bool) {
			c.SetKubernetes("v1.37.0")
			if lacks {
				c.SetKubernetes("v1.36.1")
			}
		},
	} {
		for event, happens := range map[string]func(*cluster, *rig){
			"nothing":         func(*cluster, *rig) {},
			"kubelet starts":  func(c *cluster, _ *rig) { c.DeleteSlices() },
			"counter deleted": func(c *cluster, _ *rig) { c.DeleteSlice(c.Slices()[0].Name) },
			"GPU deleted":     func(c *cluster, _ *rig) { c.DeleteSlice(c.Slices()[1].Name) },
		} {
			t.Run(name+" "+event, func(t *testing.T) {
				inCluster(t, func(t *testing.T, c *cluster) {
					inventory := inventoryOf(t, policy.Builtin(), firstGPU)
					r := c.start(t, "one", inventory)
					after(time.Minute)
					c.holds(t, inventory, AllFeatures)
					overlaps := 0
					servers := rand.New(rand.NewPCG(1, 2))
					c.setFail(func(*http.Request) *apierrors.StatusError {
						c.mu.Lock()
						defer c.mu.Unlock()
						if c.overlaps() {
							overlaps++
						}
						lack(c, servers.IntN(2) == 0)
						return nil
					})
					happens(c, r)
					wrong := 0
					for range 60 {
						after(time.Minute)
						if c.differs(inventory, AllFeatures) != "" {
							wrong++
						}
					}
					if wrong > 1 || overlaps > 0 {
						t.Errorf("others for %d minutes; %d times devices that exclude each other could be allocated", wrong, overlaps)
					}
					c.setFail(nil)
					lack(c, false)
					c.converges(t, inventory, AllFeatures, time.Minute)
				})
			})
		}
	}
}

// TestOtherServer: an established connection leads to one server. When that one drops
// fields, the next attempt is made on another connection.
func TestOtherServer(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, policy.Builtin(), firstGPU)
		c.start(t, "one", inventory)
		after(time.Minute)
		c.setFail(func(r *http.Request) *apierrors.StatusError {
			c.DropCounters(r.Header.Get("Connection") != "close")
			return nil
		})
		c.DeleteSlices()
		c.converges(t, inventory, AllFeatures, 5*time.Second)
	})
}

// TestRestartInMixedControlPlane: the plugin that starts has one bad answer.
func TestRestartInMixedControlPlane(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, policy.Builtin(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		r.stop()
		c.take("")
		c.DropCounters(true)
		c.start(t, "two", inventory)
		after(time.Minute)
		c.DropCounters(false)
		after(time.Hour)
		c.holds(t, inventory, AllFeatures)
		if writes := c.take("write"); writes > 0 {
			t.Errorf("%d writes", writes)
		}
	})
}

// TestFeaturesChange: gates are turned off or on for good, or the version changes.
func TestFeaturesChange(t *testing.T) {
	for name, test := range map[string]struct {
		change        func(*cluster, bool)
		before, after Features
		limit         time.Duration
	}{
		"counters off": {func(c *cluster, off bool) { c.DropCounters(off) }, AllFeatures, Taints | ShareCounters | NewTaints, 0},
		"shares off": {
			func(c *cluster, off bool) { c.DropShares(off) },
			AllFeatures, AllFeatures &^ ConsumableCapacity, 0,
		},
		"counters on": {func(c *cluster, on bool) { c.DropCounters(!on) }, Taints | ShareCounters | NewTaints, AllFeatures, time.Hour},
		"upgraded": {
			func(c *cluster, new bool) {
				c.SetKubernetes("v1.35.3")
				if new {
					c.SetKubernetes("v1.37.0")
				}
			},
			AllFeatures &^ ShareCounters, AllFeatures, time.Hour,
		},
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				test.change(c, false)
				inventory := inventoryOf(t, policy.Builtin(), firstGPU)
				r := c.start(t, "one", inventory)
				after(time.Minute)
				c.holds(t, inventory, test.before)
				test.change(c, true)
				if test.limit > 0 {
					c.converges(t, inventory, test.after, test.limit)
					return
				}
				// What is stored keeps its fields, new slices do not get them. Until it
				// is certain nothing can be allocated by what is stored.
				c.DeleteSlices()
				for range 90 {
					after(10 * time.Second)
					for _, slice := range c.Slices() {
						complete := int64(len(c.Slices())) == slice.Spec.Pool.ResourceSliceCount
						if complete && c.differs(inventory, test.after) != "" {
							t.Fatal("a pool without the fields is complete")
						}
					}
				}
				c.holds(t, inventory, test.after)
				r.ready(t)
			})
		})
	}
}

// TestSchedulerCrashes: on a version whose scheduler a claim for all devices would bring
// down, the node says so once, if anything that it publishes draws on counters.
func TestSchedulerCrashes(t *testing.T) {
	for name, test := range map[string]struct {
		kubernetes string
		policy     *policy.Policy
		drop       bool
		want       int
	}{
		"crashes":                 {kubernetes: "v1.36.1-gke.1", policy: withoutShares(), want: 1},
		"an older one crashes":    {kubernetes: "v1.35.4", policy: withoutShares(), want: 1},
		"without counters":        {kubernetes: "v1.36.1", policy: onlyShares()},
		"counters are dropped":    {kubernetes: "v1.35.4", policy: withoutShares(), drop: true},
		"repaired":                {kubernetes: "v1.36.2", policy: withoutShares()},
		"ignores counters":        {kubernetes: "v1.34.1", policy: withoutShares()},
		"nobody knows":            {kubernetes: "unknown", policy: withoutShares()},
		"crashes, and has shares": {kubernetes: "v1.36.1", policy: policy.Builtin(), want: 1},
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				c.SetKubernetes(test.kubernetes)
				c.DropCounters(test.drop)
				inventory := inventoryOf(t, test.policy, firstGPU)
				r := c.start(t, "one", inventory)
				after(time.Minute)
				r.publisher.SetInventory(lost(inventory, firstGPU))
				after(3 * time.Hour)
				got := r.warned(reasonSchedulerCrashes)
				if len(got) != test.want {
					t.Fatalf("%d warnings, want %d: %q", len(got), test.want, got)
				}
				if len(got) > 0 && !strings.Contains(got[0], test.kubernetes) {
					t.Errorf("warned %q", got)
				}
			})
		})
	}
}

// TestRolledBack: the API server is one that refuses slices of counters now.
func TestRolledBack(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		inventory := inventoryOf(t, policy.Builtin(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		c.SetKubernetes("v1.34.1")
		c.setFail(func(r *http.Request) *apierrors.StatusError {
			if kindOf(r) == "write" && len(c.Slices()) == 0 {
				return invalid("spec.devices[0].consumesCounters[0].counterSet")
			}
			return nil
		})
		c.DeleteSlices()
		after(time.Minute)
		if got := r.reported(); !strings.Contains(got, "consumesCounters") {
			t.Errorf("reported %q", got)
		}
		after(20 * time.Minute)
		if r.publisher.features.now.has(PartitionableDevices) {
			t.Error("counters are still tried")
		}
		c.setFail(nil)
		c.converges(t, inventory, Taints|ShareCounters, time.Minute)
	})
}

// TestNoTaints: an API server that does not store taints is no reason to write again
// and again.
func TestNoTaints(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.DropTaints(true)
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", lost(inventory, firstGPU))
		after(time.Hour)
		// An observer without its taint could be allocated to any claim.
		c.EachDevice(func(d *resourceapi.Device) {
			if len(d.Taints) > 0 || *d.Attributes["type"].StringValue == "observer" {
				t.Errorf("%s is published, with %d taints", d.Name, len(d.Taints))
			}
		})
		if writes := c.take("write"); writes != 2 || r.reported() != "" {
			t.Errorf("%d writes, reported %q", writes, r.reported())
		}
		c.DropTaints(false)
		c.SetKubernetes("v1.38.0")
		c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Hour)
	})
}

// TestTaintEffectNone: Kubernetes 1.34 refuses objects that have the effect, see the type
// DeviceTaintEffect of k8s.io/api.
func TestTaintEffectNone(t *testing.T) {
	t.Parallel()
	for version, want := range map[string]bool{"v1.34.0": false, "v1.34.13": false, "v1.35.0": true, "v1.37.1": true} {
		if got := gates.limited(version).has(NewTaints); got != want {
			t.Errorf("%s takes the effect None: %t, want %t", version, got, want)
		}
	}
}

// TestTaintsOfKubernetes134: its API server refuses slices with more than four taints of a device. Of a
// GPU with more faults the strongest effects are stored.
func TestTaintsOfKubernetes134(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		c.SetKubernetes("v1.34.9")
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		after(time.Minute)
		var faults []device.Condition
		for _, reason := range []device.Reason{device.FabricUnhealthy, device.MemoryUnrepairable, device.RowRemapFailed, device.UncorrectedECC, device.XID} {
			faults = append(faults, device.Condition{PCIAddress: firstGPU, Reason: reason})
		}
		faults[len(faults)-1].Effect = policy.EffectNoExecute
		r.publisher.SetInventory(inventory.With(device.Status{Conditions: faults}))
		after(time.Minute)
		if c.tainted(func(t resourceapi.DeviceTaint) bool { return t.Effect == resourceapi.DeviceTaintEffectNoExecute }) == 0 {
			t.Error("a GPU with five faults, one of which evicts, has no taint that evicts")
		}
	})
}

// onlyWholeGPUs makes it an API server as before Kubernetes 1.36. Without observers no device has a taint as long as nothing is broken.
func (c *cluster) onlyWholeGPUs() {
	c.SetKubernetes("v1.35.6")
	c.DropCounters(true)
	c.DropShares(true)
}

// dropTaintsOnce lets the API server that drops taints answer the next write only.
func (c *cluster) dropTaintsOnce() {
	writes := 0
	c.DropTaints(true)
	c.setFail(func(r *http.Request) *apierrors.StatusError {
		if kindOf(r) == "write" {
			if writes++; writes == 2 {
				c.DropTaints(false)
			}
		}
		return nil
	})
}

// TestTaintsComeBack: in a control plane of two versions the server answers that drops taints, once or for a minute. Afterwards, without
// another version, lost GPUs are tainted.
func TestTaintsComeBack(t *testing.T) {
	for name, test := range map[string]struct {
		before, drop func(*cluster)
		dropped      time.Duration
		limit        time.Duration
	}{
		"once":         {(*cluster).onlyWholeGPUs, (*cluster).dropTaintsOnce, time.Second, 5 * time.Minute},
		"for a minute": {func(*cluster) {}, func(c *cluster) { c.DropTaints(true) }, time.Minute, 2 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				test.before(c)
				inventory := inventoryOf(t, withoutShares(), firstGPU)
				r := c.start(t, "one", inventory)
				after(time.Hour)
				test.drop(c)
				r.publisher.SetInventory(lost(inventory, firstGPU))
				after(test.dropped)
				c.DropTaints(false)
				for began := time.Now(); c.tainted(isLost) == 0; after(time.Second) {
					if time.Since(began) > test.limit {
						t.Fatalf("after %s the lost GPU is still offered", test.limit)
					}
				}
			})
		})
	}
}

// TestStoredTaintsAfterOddAnswer: taints that are stored stay when an answer about another slice comes from
// the server that drops taints.
func TestStoredTaintsAfterOddAnswer(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		var addresses []string // more than a slice has room for
		for number := range 140 {
			addresses = append(addresses, fmt.Sprintf("0000:%02x:00.0", 0x1b+number))
		}
		last := addresses[len(addresses)-1]
		c.onlyWholeGPUs()
		inventory := inventoryOf(t, withoutShares(), addresses...)
		r := c.start(t, "one", inventory)
		after(time.Hour)
		r.publisher.SetInventory(lost(inventory, firstGPU))
		after(time.Minute)
		if slices, tainted := len(c.Slices()), c.tainted(isLost); slices < 2 || tainted != 1 {
			t.Fatalf("%d slices, %d tainted devices", slices, tainted)
		}
		c.dropTaintsOnce()
		r.publisher.SetInventory(lost(inventory, firstGPU, last))
		after(time.Second)
		c.DropTaints(false)
		// Something else makes the first slice be written.
		r.publisher.SetInventory(lost(inventory, firstGPU, last, addresses[1]))
		for range 10 * 60 {
			after(time.Second)
			stays := false
			c.EachDevice(func(d *resourceapi.Device) {
				stays = stays || strings.HasPrefix(d.Name, "gpu-0000-1b-00-0") && slices.ContainsFunc(d.Taints, isLost)
			})
			if !stays {
				t.Fatal("a stored taint of a lost GPU was taken away because an API server has dropped another one")
			}
		}
	})
}
