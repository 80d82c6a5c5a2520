// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
)

// Words for what a GPU says about its own state.
var (
	recoveryActions = []string{"none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex-domain", "bus-reset", "system-reboot"}

	throttlings = map[string]uint64{
		"power-cap": nvml.ClocksEventReasonSwPowerCap, "sw-thermal": nvml.ClocksEventReasonSwThermalSlowdown,
		// A slowdown by the hardware has a bit of its own beside that of its reason.
		"hw-thermal":  nvml.ClocksThrottleReasonHwSlowdown | nvml.ClocksThrottleReasonHwThermalSlowdown,
		"power-brake": nvml.ClocksThrottleReasonHwSlowdown | nvml.ClocksThrottleReasonHwPowerBrakeSlowdown,
	}

	fabrics = map[string]machine.Fabric{
		"none":        {},
		"not-started": {State: nvml.GPU_FABRIC_STATE_NOT_STARTED},
		"in-progress": {State: nvml.GPU_FABRIC_STATE_IN_PROGRESS},
		"healthy":     {State: nvml.GPU_FABRIC_STATE_COMPLETED},
		"failed":      {State: nvml.GPU_FABRIC_STATE_COMPLETED, Status: int(nvml.ERROR_UNKNOWN)},
		"degraded-bandwidth": {
			State: nvml.GPU_FABRIC_STATE_COMPLETED,
			Mask:  nvml.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE << nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW,
		},
		"unhealthy-route": {
			State: nvml.GPU_FABRIC_STATE_COMPLETED,
			Mask:  nvml.GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE << nvml.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY,
		},
	}
)

func words[V any](of map[string]V) string {
	return strings.Join(slices.Sorted(maps.Keys(of)), ", ")
}

func gpuCommand() *cli.Command {
	return &cli.Command{
		Name:      "gpu",
		Usage:     "break a GPU, or make it well",
		ArgsUsage: "[ROOT]",
		Description: "A failed GPU answers every call with its failure; one that gets lost says so by XID 79\n" +
			"first. A reset or a reboot heals those that are lost or need a reset. Memory errors and\n" +
			"a new recovery action are events, too.\n\n" +
			"   gpusim gpu --gpu 1 --failure lost\n" +
			"   gpusim gpu --gpu 1 --uncorrected-ecc 1 --remap-pending --recovery-action reset\n" +
			"   gpusim gpu --gpu 1 --throttle hw-thermal --temperature 92\n" +
			"   gpusim gpu --gpu 1 --throttle none",
		Flags: []cli.Flag{
			rootFlag(), gpuFlag(),
			&cli.StringFlag{Name: "failure", Usage: "`FAILURE`: lost, reset-required, none, or an NVML error by name or number"},
			&cli.StringFlag{Name: "corrected-ecc", Usage: "`N` more memory errors that ECC corrects"},
			&cli.StringFlag{Name: "uncorrected-ecc", Usage: "`N` more memory errors that it does not"},
			&cli.StringFlag{Name: "remapped-corrected", Usage: "`N` more rows of memory remapped because of errors that were corrected"},
			&cli.StringFlag{Name: "remapped-uncorrected", Usage: "`N` more rows remapped because of others"},
			&cli.BoolFlag{Name: "remap-pending", Usage: "rows wait for a reset to be remapped"},
			&cli.BoolFlag{Name: "remap-failed", Usage: "a row could not be remapped"},
			&cli.BoolFlag{Name: "retirement-pending", Usage: "pages of memory wait for a reset to be retired, on GPUs before Ampere"},
			&cli.BoolFlag{Name: "repair-pending", Usage: "a memory channel waits for a reset to be repaired"},
			&cli.BoolFlag{Name: "unrepairable", Usage: "memory is broken for good"},
			&cli.StringFlag{Name: "recovery-action", Usage: "`ACTION` that the driver wants: " + strings.Join(recoveryActions, ", ")},
			&cli.StringFlag{Name: "throttle", Usage: "`REASONS` for low clocks, separated by commas: none, " + words(throttlings)},
			&cli.StringFlag{Name: "temperature", Usage: "`DEGREES` Celsius"},
			&cli.StringFlag{Name: "fabric", Usage: "`STATE` of the NVLink fabric: " + words(fabrics)},
			&cli.StringFlag{Name: "pci", Usage: "what the PCI bus shows: a `DRIVER` of the kernel, such as nvidia or vfio-pci, or absent"},
			&cli.BoolFlag{Name: "events", Usage: "whether the GPU reports events; --events=false makes it one that does not"},
		},
		Action: func(_ context.Context, c *cli.Command) error {
			changes := func(flag string) bool { return flag != "gpu" && flag != "root" }
			if !slices.ContainsFunc(c.LocalFlagNames(), changes) {
				return errors.New("say what becomes of the GPU, see gpusim gpu --help")
			}
			return onGPU(c, func(m *machine.Machine, i int) error {
				return errors.Join(changeGPU(c, m, i), changePCI(c, m, i))
			})
		},
	}
}

// changePCI changes files, which are not a part of the machine's state.
func changePCI(c *cli.Command, m *machine.Machine, i int) error {
	if !c.IsSet("pci") {
		return nil
	}
	root, err := rootOf(c)
	if err != nil {
		return err
	}
	driver := c.String("pci")
	if driver == "" || strings.Contains(driver, "/") {
		return wrong(c, "pci", "absent or the name of a driver")
	}
	if driver == "absent" {
		driver = ""
	}
	return sysroot.SetPCIDriver(root, m, i, driver)
}

func gpuFlag() cli.Flag {
	return &cli.StringFlag{Name: "gpu", Usage: "`INDEX` of the GPU", Required: true}
}

// onGPU changes the machine that the user named, by the index of the GPU.
func onGPU(c *cli.Command, change func(*machine.Machine, int) error) error {
	return withState(c, func(f *state.File) error {
		return f.Update(func(m *machine.Machine) error {
			i, err := gpuOf(c, m)
			if err != nil {
				return err
			}
			return change(m, i)
		})
	})
}

func changeGPU(c *cli.Command, m *machine.Machine, i int) error {
	g := &m.GPUs[i]
	if c.IsSet("failure") {
		failure, err := failureOf(c)
		if err != nil {
			return err
		}
		if failure == int(nvml.ERROR_GPU_IS_LOST) && g.Failure != failure {
			addXID(m, i, fallenOffTheBus)
		}
		g.Failure = failure
	}
	if c.IsSet("events") {
		g.NoEvents = !c.Bool("events")
	}
	return errors.Join(changeMemory(c, m, i), changeState(c, m, i))
}

// changeMemory is about memory errors and what was done about them.
func changeMemory(c *cli.Command, m *machine.Machine, i int) error {
	h := &m.GPUs[i].Health
	var corrected, uncorrected, rowsCorrected, rowsUncorrected uint64
	_, err1 := countOf(c, "corrected-ecc", &corrected)
	double, err2 := countOf(c, "uncorrected-ecc", &uncorrected)
	_, err3 := countOf(c, "remapped-corrected", &rowsCorrected)
	_, err4 := countOf(c, "remapped-uncorrected", &rowsUncorrected)
	for _, counted := range []*machine.ECCErrors{&h.VolatileECC, &h.AggregateECC} {
		counted.Corrected += corrected
		counted.Uncorrected += uncorrected
	}
	h.RemappedRows.Corrected += int(rowsCorrected)
	h.RemappedRows.Uncorrected += int(rowsUncorrected)
	switchOf(c, "remap-pending", &h.RemappedRows.Pending)
	switchOf(c, "remap-failed", &h.RemappedRows.Failed)
	switchOf(c, "retirement-pending", &h.RetiredPagesPending)
	switchOf(c, "repair-pending", &h.ChannelRepair)
	switchOf(c, "unrepairable", &h.Unrepairable)
	if double {
		addEvent(m, i, nvml.EventTypeDoubleBitEccError)
	}
	if corrected > 0 {
		addEvent(m, i, nvml.EventTypeSingleBitEccError)
	}
	return errors.Join(err1, err2, err3, err4)
}

func changeState(c *cli.Command, m *machine.Machine, i int) error {
	h := &m.GPUs[i].Health
	var errs []error
	if c.IsSet("temperature") {
		var err error
		h.Temperature, err = numberOf(c, "temperature")
		errs = append(errs, err)
	}
	if c.IsSet("throttle") {
		h.ClocksReasons = 0
		for word := range strings.SplitSeq(c.String("throttle"), ",") {
			bits, known := throttlings[word]
			if !known && word != "none" {
				errs = append(errs, wrong(c, "throttle", "some of none, "+words(throttlings)))
			}
			h.ClocksReasons |= bits
		}
	}
	if c.IsSet("fabric") {
		fabric, known := fabrics[c.String("fabric")]
		if !known {
			errs = append(errs, wrong(c, "fabric", "one of "+words(fabrics)))
		}
		h.Fabric = fabric
	}
	if c.IsSet("recovery-action") {
		action := slices.Index(recoveryActions, c.String("recovery-action"))
		if action < 0 {
			errs = append(errs, wrong(c, "recovery-action", "one of "+strings.Join(recoveryActions, ", ")))
		}
		setRecoveryAction(m, i, action)
	}
	return errors.Join(errs...)
}

func failureOf(c *cli.Command) (int, error) {
	switch text := c.String("failure"); text {
	case "none":
		return 0, nil
	case "lost":
		return int(nvml.ERROR_GPU_IS_LOST), nil
	default: // reset-required is a code's name
		if code, ok := parseCode(text); ok {
			return code, nil
		}
	}
	return 0, wrong(c, "failure", fmt.Sprintf("one of lost, reset-required, none, or %s", aCode))
}
