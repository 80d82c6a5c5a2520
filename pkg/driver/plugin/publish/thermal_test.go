// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
	"github.com/partage-dev/partage/pkg/policy"
)

var stormNodes = flag.Int("storm.nodes", 2, "how many nodes have a thermal storm")

// TestThermalStorm: for an hour all 8 GPUs of each node have a condition for some time and then not for as long, each at other
// moments. Nodes share nothing of the rules and the writer, so that each has an API server of its own, and time is fake: only
// writes are counted.
func TestThermalStorm(t *testing.T) {
	t.Parallel()
	const gpus = 8
	hot := device.Condition{Reason: device.Throttled, Effect: policy.EffectNone}
	told := gpus * int(time.Hour/rules.Usual.InformOnce+1)
	budget := rules.Usual.Burst + int(time.Hour/rules.Usual.Every) + gpus
	for _, storm := range []struct {
		name      string
		condition device.Condition
		half      time.Duration
		// most is how many writes a node may make.
		most int
	}{
		{"clocks are lowered, 70 s", hot, 70 * time.Second, 0},
		{"clocks are lowered, 6 min", hot, 6 * time.Minute, told},
		{"pods are kept away, 70 s", device.Condition{Reason: device.Unresponsive}, 70 * time.Second, budget},
		{"pods are evicted, 15 s", device.Condition{Reason: device.XID, Effect: policy.EffectNoExecute}, 15 * time.Second, 3 * gpus},
	} {
		t.Run(storm.name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			nodes, changes, writes, most := 1, 0, 0, 0
			if storm.condition.Reason == device.Throttled {
				nodes = *stormNodes
			}
			t.Run("nodes", func(t *testing.T) {
				for node := range nodes {
					t.Run(fmt.Sprint(node), func(t *testing.T) {
						inCluster(t, func(t *testing.T, c *cluster) {
							changed, wrote := c.storm(t, storm.condition, gpus, storm.half, uint64(node))
							mu.Lock()
							defer mu.Unlock()
							changes, writes, most = changes+changed, writes+wrote, max(most, wrote)
						})
					})
				}
			})
			t.Logf("%s: %d nodes, %d changes of conditions, %d writes: %.1f of a node, %d at most; 1 for %.1f changes",
				storm.name, nodes, changes, writes, float64(writes)/float64(nodes), most, float64(changes)/float64(max(writes, 1)))
			if most > storm.most {
				t.Errorf("a node wrote %d times in an hour, want %d at most", most, storm.most)
			}
		})
	}
}

// storm has a condition of GPUs come and go for an hour, and returns how often one did and how many writes there were. Afterwards, in an
// hour, what is stored is right.
func (c *cluster) storm(t *testing.T, condition device.Condition, gpus int, half time.Duration, seed uint64) (changes, writes int) {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 1))
	var addresses []string
	var phases []time.Duration
	for gpu := range gpus {
		addresses, phases = append(addresses, fmt.Sprintf("0000:%02x:00.0", 0x10+gpu)), append(phases, time.Duration(random.Int64N(int64(2*half))))
	}
	inventory := inventoryOf(t, &policy.Policy{Default: policy.Offer{Whole: true}}, addresses...)
	r := c.start(t, "one", inventory)
	after(time.Hour)
	c.take("")
	was := make([]bool, gpus)
	for began := time.Now(); time.Since(began) < time.Hour; after(time.Second) {
		var status device.Status
		before := changes
		for gpu, address := range addresses {
			is := (time.Since(began)+phases[gpu])%(2*half) >= half
			if is != was[gpu] {
				was[gpu] = is
				changes++
			}
			if is {
				condition.PCIAddress = address
				status.Conditions = append(status.Conditions, condition)
			}
		}
		if changes != before {
			r.publisher.SetInventory(inventory.With(status))
		}
	}
	writes = c.take("write")
	r.publisher.SetInventory(inventory)
	after(time.Hour)
	c.holds(t, inventory, AllFeatures)
	return changes, writes
}
