// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package versus

import (
	"context"
	"fmt"
	"testing"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
)

// side is one of the drivers on a machine of its own, with an API server of its own: on one
// machine each would take the other's partitions for foreign.
type side struct {
	name       string
	node       *harness.Node
	driver     *harness.Driver
	supervisor *harness.Supervisor
	// device is the name under which the driver publishes a device.
	device func(t testing.TB, d harness.Device) string
}

// startOurs starts both programs as the chart does, except that nothing limits requests to the
// API server.
func startOurs(t testing.TB) *side {
	t.Helper()
	n := harness.NewNode(t, machineName, harness.TurnMIGOn)
	s := &side{name: "Partage", node: n, device: func(t testing.TB, d harness.Device) string {
		t.Helper()
		return n.DeviceNames(t, []harness.Device{d})[0]
	}}
	s.supervisor = n.StartSupervisor(t, "--check-interval=2s", "-v=2")
	s.driver = n.StartWith(t, []string{"GOMAXPROCS=4"},
		n.Policy(t, ""), "--poll-interval=10s", "--claim-check-interval=20m",
		"--claim-status=true", "--device-metadata=true", "--metrics-address=127.0.0.1:0", "--sample-interval=15s", "-v=2")
	s.driver.Ready(t)
	return s
}

// startTheirs starts NVIDIA's driver with the feature gates for partitions and time slices. It
// asks for the MIG mode only once, when it starts; where that was off, it cannot release one
// of several partitions of a GPU. So on both machines it is on at first.
func startTheirs(t testing.TB, program string) *side {
	t.Helper()
	n := harness.NewNode(t, machineName, harness.TurnMIGOn)
	s := &side{name: "NVIDIA's", node: n, device: func(t testing.TB, d harness.Device) string {
		t.Helper()
		return theirName(t, n, d)
	}}
	s.driver = n.StartPeer(t, program, "DynamicMIG=true,TimeSlicingSettings=true")
	gpus := len(n.Machine(t).GPUs)
	s.driver.Until(t, "the slices", func(context.Context) error {
		// One with the counters, and one for each GPU.
		if got := len(n.API.Slices()); got != gpus+1 {
			return fmt.Errorf("%d slices", got)
		}
		return nil
	})
	return s
}

// theirName is the name of a device: its GPU by minor number, its profile by name and number.
func theirName(t testing.TB, n *harness.Node, d harness.Device) string {
	t.Helper()
	g := n.Machine(t).GPUs[d.GPU]
	name := fmt.Sprintf("gpu-%d", g.Minor)
	if d.Profile == "" {
		return name
	}
	for _, p := range g.MIG.Profiles {
		if p.Name == d.Profile {
			// What both drivers make of a profile without variants.
			return fmt.Sprintf("%s-mig-%s-%d-%d", name, harness.ProfileText(p.Name), p.ID, d.Start)
		}
	}
	t.Fatalf("GPU %d has no profile %s", d.GPU, d.Profile)
	return ""
}

func (s *side) claim(t testing.TB, d harness.Device, config harness.Config) *drapb.Claim {
	t.Helper()
	var configs []harness.Config
	if config != "" {
		configs = append(configs, config)
	}
	return s.node.AllocateNamed([]string{s.device(t, d)}, configs...)
}
