// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
)

// What is wrong with a GPU adds up, is reported by events, and is gone after a reset as far
// as a reset can help.
func TestHealth(t *testing.T) {
	root := newNode(t, "mixed")
	for _, args := range []string{
		"--corrected-ecc 2", "--uncorrected-ecc 1 --remapped-uncorrected 1 --remap-pending", "--uncorrected-ecc 1 --repair-pending",
		"--remap-failed --unrepairable", "--remapped-corrected 3", "--throttle hw-thermal,power-cap --temperature 92",
		"--recovery-action drain-and-reset", "--recovery-action drain-and-reset", "--fabric unhealthy-route", "--events=false",
	} {
		mustRun(t, append([]string{"gpu", "--gpu", "1"}, strings.Fields(args)...)...)
	}
	want := machine.Health{
		VolatileECC: machine.ECCErrors{Corrected: 2, Uncorrected: 2}, AggregateECC: machine.ECCErrors{Corrected: 2, Uncorrected: 2},
		RemappedRows:  machine.RemappedRows{Corrected: 3, Uncorrected: 1, Pending: true, Failed: true},
		ChannelRepair: true, Unrepairable: true, RecoveryAction: 4, ClocksReasons: 0x4 | 0x8 | 0x40, Temperature: 92,
		Fabric: machine.Fabric{State: 3, Mask: 1 << 4},
	}
	m := load(t, root)
	if d := cmp.Diff(want, m.GPUs[1].Health); d != "" || !m.GPUs[1].NoEvents {
		t.Errorf("events %v; health (-want +got):\n%s", !m.GPUs[1].NoEvents, d)
	}
	event := func(serial, kind, xid uint64) machine.Event {
		return machine.Event{Serial: serial, GPU: 1, Type: kind, XID: xid, InstanceID: -1, ComputeID: -1}
	}
	events := []machine.Event{
		event(1, nvml.EventTypeSingleBitEccError, 0), event(2, nvml.EventTypeDoubleBitEccError, 0), event(3, nvml.EventTypeDoubleBitEccError, 0),
		event(4, nvml.EventTypeXidCriticalError, 154), event(5, nvml.EventTypeGpuRecoveryAction, 0),
	}
	expect.Same(t, m.Events, events, "events")

	mustRun(t, "reset", "--gpu", "1")
	want.VolatileECC, want.RecoveryAction, want.RemappedRows.Pending, want.ChannelRepair = machine.ECCErrors{}, 0, false, false
	m = load(t, root)
	if d := cmp.Diff(want, m.GPUs[1].Health); d != "" || m.GPUs[1].Resets != 1 || m.GPUs[0].Resets != 0 {
		t.Errorf("after %d resets (-want +got):\n%s", m.GPUs[1].Resets, d)
	}
	mustRun(t, "gpu", "--gpu", "1", "--throttle", "none", "--fabric", "none", "--events")
	if g := load(t, root).GPUs[1]; g.Health.ClocksReasons != 0 || g.Health.Fabric != (machine.Fabric{}) || g.NoEvents {
		t.Errorf("not well again: %+v", g.Health)
	}
}

// The PCI bus can show something else than NVML.
func TestPCI(t *testing.T) {
	root := newNode(t, "mixed")
	address := load(t, root).GPUs[1].PCIAddress
	device := filepath.Join(root, "sys/bus/pci/devices", address)
	for _, want := range []string{"vfio-pci", "absent", "nvidia", "nvidia"} {
		mustRun(t, "gpu", "--gpu", "1", "--pci", want)
		driver, err := os.Readlink(filepath.Join(device, "driver"))
		if want == "absent" {
			expect.Is(t, expect.Err(os.Stat(device)), fs.ErrNotExist, device, "is there")
			continue
		}
		if err != nil || filepath.Base(driver) != want {
			t.Errorf("driver %q, want %s: %v", driver, want, err)
		}
		if class, err := os.ReadFile(filepath.Join(device, "class")); err != nil || len(class) == 0 {
			t.Errorf("the device is not what it was: %v", err)
		}
	}
}

func TestHealthRefused(t *testing.T) {
	root := newNode(t, "mixed")
	before := load(t, root)
	refuses(t, "", map[string]string{
		"gpu --gpu 1 --uncorrected-ecc -1":            `--uncorrected-ecc "-1" is not a number from 0 on`,
		"gpu --gpu 1 --recovery-action rest":          `--recovery-action "rest" is not one of none, reset,`,
		"gpu --gpu 1 --throttle hw-thermal,heat":      `--throttle "hw-thermal,heat" is not some of none, hw-thermal,`,
		"gpu --gpu 1 --fabric bad":                    `--fabric "bad" is not one of degraded-bandwidth,`,
		"gpu --gpu 1 --pci a/b":                       `--pci "a/b" is not absent or the name of a driver`,
		"gpu --gpu 1 --temperature hot":               `--temperature "hot" is not a number`,
		"xid --gpu 1":                                 `"xid" not set`,
		"xid --gpu 1 --xid oom":                       `--xid "oom" is not a number from 0 on`,
		"xid --gpu 9 --xid 13":                        `--gpu "9" is not the index of a GPU`,
		"xid --gpu 1 --xid 13 --gi 7":                 "there is no such GPU instance",
		"xid --gpu 1 --xid 13 --ci 0":                 "--ci needs --gi",
		"xid --gpu 1 --xid 13 --gi 7 --ci 0":          "GPU 1 is not in MIG mode",
		"xid --gpu 1 --xid 95 --recovery-action heal": `--recovery-action "heal" is not one of`,
		"proc set --pid 5 --sm 1":                     "there is no process 5",
		"proc set --pid 5":                            "by --memory or --sm",
		"proc add --gpu 0 --sm 101":                   "keeps 101 % of the multiprocessors busy: it is 0 to 100",
	})
	expect.Same(t, load(t, root), before, "the machine has changed")
}

// A GPU that gets lost says so; an XID is on what the user says; a reset waits for nobody.
func TestXIDAndReset(t *testing.T) {
	root := newNode(t, "mixed")
	change(t, root, func(m *machine.Machine) {
		mig := m.GPUs[1].MIG
		mig.Current, mig.Pending = true, true
		mig.Instances = []machine.GPUInstance{{ID: 9, ProfileID: 19, Placement: machine.Placement{Size: 1}, Compute: []machine.ComputeInstance{{ID: 0, UUID: "MIG-x"}}}}
	})
	mustRun(t, "xid", "--gpu", "1", "--xid", "31", "--gi", "9")
	mustRun(t, "xid", "--gpu", "1", "--xid", "94", "--gi", "9", "--ci", "0", "--recovery-action", "reset")
	mustRun(t, "gpu", "--gpu", "1", "--failure", "lost")
	mustRun(t, "gpu", "--gpu", "1", "--failure", "lost") // it is already
	xid := func(serial, number uint64, instance, compute int) machine.Event {
		return machine.Event{Serial: serial, GPU: 1, Type: nvml.EventTypeXidCriticalError, XID: number, InstanceID: instance, ComputeID: compute}
	}
	want := []machine.Event{
		xid(1, 31, 9, -1), xid(2, 94, 9, 0), xid(3, 154, -1, -1),
		{Serial: 4, GPU: 1, Type: nvml.EventTypeGpuRecoveryAction, InstanceID: -1, ComputeID: -1}, xid(5, 79, -1, -1),
	}
	expect.Same(t, load(t, root).Events, want, "events")

	mustRun(t, "proc", "add", "--gpu", "1", "--gi", "9", "--pid", "42", "--sm", "30")
	mustRun(t, "proc", "set", "--pid", "42", "--sm", "40", "--memory", "512")
	if p := load(t, root).Processes[0]; p.SM != 40 || p.MemoryBytes != 512<<20 {
		t.Errorf("process %+v", p)
	}
	expect.Says(t, expect.Err(gpusim("reset", "--gpu", "1")), "GPU 1 is in use by process 42 (python3)", "reset of a GPU in use")
	mustRun(t, "proc", "rm", "--all")
	mustRun(t, "reset", "--gpu", "1")
	g := load(t, root).GPUs[1]
	if g.Failure != 0 || len(g.MIG.Instances) != 0 || g.MIG.Current || g.Health.RecoveryAction != 0 {
		t.Errorf("after the reset: %+v", g)
	}
}
