// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// untilTaints waits until exactly these devices have a taint with a key, each with a value
// and an effect: "94:NoSchedule".
func untilTaints(t testing.TB, p *harness.Driver, n *harness.Node, key, want string, devices ...string) {
	t.Helper()
	wanted := map[string]string{}
	for _, d := range devices {
		wanted[d] = want
	}
	p.Until(t, "the taint "+key+" "+want, func(context.Context) error {
		got := map[string]string{}
		n.API.EachDevice(func(d *resourceapi.Device) {
			for _, taint := range d.Taints {
				if taint.Key == harness.DriverName+"/"+key {
					got[d.Name] = taint.Value + ":" + string(taint.Effect)
				}
			}
		})
		if diff := cmp.Diff(wanted, got); diff != "" {
			return fmt.Errorf("devices (-want +got):\n%s", diff)
		}
		return nil
	})
}

// instanceAt is the ID of the GPU instance that starts at a memory slice.
func instanceAt(t testing.TB, n *harness.Node, gpu, start int) int {
	t.Helper()
	instances := n.Machine(t).GPUs[gpu].MIG.Instances
	at := slices.IndexFunc(instances, func(i machine.GPUInstance) bool { return i.Placement.Start == start })
	if at < 0 {
		t.Fatalf("no instance at %d: %+v", start, instances)
	}
	return instances[at].ID
}

// untilPodTold waits for an event about a pod.
func untilPodTold(t testing.TB, p *harness.Driver, n *harness.Node, pod, reason string) {
	t.Helper()
	p.UntilTrue(t, "event "+reason+" of the pod", func() bool {
		return slices.ContainsFunc(n.Events(t), func(e corev1.Event) bool {
			return e.InvolvedObject.Kind == "Pod" && e.InvolvedObject.Name == pod && e.Reason == reason
		})
	})
}

// untilMonitored waits until an XID that says nothing arrives: the driver keeps none for
// those who come later.
func untilMonitored(t testing.TB, p *harness.Driver, n *harness.Node, gpus int) {
	t.Helper()
	p.Until(t, "events of GPUs", func(context.Context) error {
		for gpu := range gpus {
			n.SendXID(t, gpu, 106, -1)
			if !strings.Contains(p.Log.String(), `pciAddress="`+n.Address(t, gpu)+`" kind="XID" xid=106`) {
				return fmt.Errorf("none of GPU %d yet", gpu)
			}
		}
		return nil
	})
}

// TestXIDOnPartition checks that an XID on one partition taints it with its shares, and
// nothing else, that its pod is told and no other, and that the taint ends with the partition.
func TestXIDOnPartition(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	n.StartSupervisor(t)
	p := n.Run(t, append(harness.Frequent, n.Policy(t, harness.PartitionSharesPolicy+"health: {xids: [{xid: 48, effect: NoExecute}]}\n"))...)
	p.UntilPublished(t, n, 0, 1)
	claims := map[string]*drapb.Claim{}
	for i, pod := range []string{"hit", "spared"} {
		claims[pod] = n.Allocate(t, []harness.Device{harness.Partition(1, "1g.10gb", i)})
		n.API.Reserve(claims[pod].GetNamespace(), claims[pod].GetName(), pod)
		p.MustPrepare(t, claims[pod])
	}
	untilMonitored(t, p, n, 2)

	hit := harness.DeviceName(n.Address(t, 1), harness.Place{Profile: "1g.10gb", Start: 0})
	devices := []string{hit, hit + "-mps", hit + "-timeslice"}
	n.SendXID(t, 1, 94, instanceAt(t, n, 1, 0))
	// The NVIDIA driver wants nothing to be done about it, so that no slice is written for it alone.
	untilPodTold(t, p, n, "hit", "GPUXID")
	p.UntilEvent(t, n, "GPUXID", n.Address(t, 1))
	// A graver one counts, and an error of a program does not make it less.
	n.SendXID(t, 1, 48, instanceAt(t, n, 1, 0))
	untilTaints(t, p, n, "xid", "48:NoExecute", devices...)
	n.SendXID(t, 1, 31, instanceAt(t, n, 1, 1))
	untilPodTold(t, p, n, "spared", "GPUProgramError")
	untilTaints(t, p, n, "xid", "48:NoExecute", devices...)
	for _, e := range n.Events(t) {
		if e.InvolvedObject.Name == "spared" && e.Reason == "GPUXID" {
			t.Errorf("the pod beside it is told: %+v", e)
		}
	}

	p.MustUnprepare(t, claims["hit"])
	untilTaints(t, p, n, "xid", "")
	p.MustUnprepare(t, claims["spared"])
	p.UntilClean(t, n)
}

// TestXIDOnGPU checks that an XID of the GPU taints all of its devices until it was reset,
// also across a restart of the driver, and that the other GPU goes on.
func TestXIDOnGPU(t *testing.T) {
	t.Parallel()
	n, p := harness.NewDriver(t, "h100x2", harness.Frequent...)
	p.UntilPublished(t, n, 0, 1)
	untilMonitored(t, p, n, 2)
	all := n.DevicesOf(t, 1)
	n.Update(t, func(m *machine.Machine) { m.GPUs[1].Health.RecoveryAction = harness.NVMLRecoveryReset })
	n.SendXID(t, 1, 95, -1)
	untilTaints(t, p, n, "xid", "95:NoExecute", all...)
	untilTaints(t, p, n, "recovery-required", "reset:NoSchedule", all...)
	// What another condition has had published may not be written down yet.
	p.UntilTrue(t, "the history of the GPUs' health", func() bool {
		data, err := os.ReadFile(filepath.Join(n.DataDir(), "health.json"))
		return err == nil && strings.Contains(string(data), `"xid": 95`)
	})
	p.Kill()
	p = n.Run(t, harness.Frequent...)
	untilTaints(t, p, n, "xid", "95:NoExecute", all...)
	p.WantFree(t, n, harness.Partition(0, "1g.10gb", 0))
	n.Update(t, func(m *machine.Machine) {
		expect.Do(t, m.ResetGPU(1))
	})
	untilTaints(t, p, n, "xid", "")
	untilTaints(t, p, n, "recovery-required", "")
	p.UntilEvent(t, n, "GPURecovered", n.Address(t, 1))
}
