// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/mps"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// effects are the words for machine.Effect, in its order.
var effects = []string{"fail", "fail-after", "pretend", "kill-before", "kill-after", "proceed"}

func faultCommand() *cli.Command {
	return &cli.Command{
		Name:  "fault",
		Usage: "make NVML calls and MPS go wrong",
		Description: "A fault strikes the calls of one function, on one GPU or on all, of every process.\n" +
			"Of several that match, the first that was added decides. Faults survive reboots.\n\n" +
			"   gpusim fault add --function nvmlGpuInstanceDestroy --gpu 1 --times 2 --code IN_USE\n" +
			"   gpusim fault add --function nvmlDeviceSetMigMode --hang\n" +
			"   gpusim fault add --function mps_server_start --times 1 --effect fail\n\n" +
			"These are not functions of the library but what the stand-ins of MPS do, and a run of nvidia-smi:\n\n   " +
			strings.Join(append(mps.Functions(), state.SMI), "\n   "),
		Commands: []*cli.Command{faultAddCommand(), faultListCommand(), faultRemoveCommand(), faultHeldCommand(), faultLetGoCommand()},
	}
}

func faultAddCommand() *cli.Command {
	return &cli.Command{
		Name:      "add",
		Usage:     "add a fault and print its ID",
		ArgsUsage: "[ROOT]",
		Description: "Effects, of which the first two need a --code, except with functions of MPS:\n\n" +
			"   fail         the call does nothing and returns the code (default with --code)\n" +
			"   fail-after   it does what it should and returns the code\n" +
			"   pretend      it does nothing and returns SUCCESS\n" +
			"   kill-before  the calling process gets SIGKILL instead\n" +
			"   kill-after   the calling process gets SIGKILL when the change is made\n" +
			"   proceed      nothing else than --delay or --hang (default without --code)",
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "function", Usage: "`NAME` that the library exports, or * for all of them, or one of MPS", Required: true},
			&cli.StringFlag{Name: "gpu", Usage: "`INDEX` of the GPU (default: all, and calls that concern none)"},
			&cli.StringFlag{Name: "skip", Usage: "let the first `N` calls pass"},
			&cli.StringFlag{Name: "times", Usage: "strike `N` calls (default: all until the fault is removed)"},
			&cli.StringFlag{Name: "probability", Usage: "strike a call with probability `P`, above 0 and up to 1"},
			&cli.StringFlag{Name: "effect", Usage: "`EFFECT` on a call: " + strings.Join(effects, ", ")},
			&cli.StringFlag{Name: "code", Usage: "NVML `ERROR`, a name such as GPU_IS_LOST or a number"},
			&cli.StringFlag{Name: "delay", Usage: "`TIME` that is added to a call, for example 500ms"},
			&cli.BoolFlag{Name: "hang", Usage: "keep a call until the fault is removed, or \"let-go\" lets it go on"},
			&cli.BoolFlag{Name: "all-gpus", Usage: "while a call is delayed or kept, those on any GPU wait, as behind a GSP that hangs"},
		},
		Action: func(_ context.Context, c *cli.Command) error {
			fault, err := faultOf(c)
			if err != nil {
				return err
			}
			root, err := rootOf(c)
			if err != nil {
				return err
			}
			id := 0
			err = withStateIn(root, func(f *state.File) error {
				if err := checkFunction(c, root); err != nil {
					return err
				}
				return f.Update(func(m *machine.Machine) (err error) {
					if c.IsSet("gpu") {
						if fault.GPU, err = gpuOf(c, m); err != nil {
							return err
						}
					}
					id = state.AddFault(m, fault)
					return nil
				})
			})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.Root().Writer, id)
			return err
		},
	}
}

// faultOf is what the flags say, without the GPU.
func faultOf(c *cli.Command) (machine.Fault, error) {
	f := machine.Fault{Function: c.String("function"), GPU: -1, Hang: c.Bool("hang"), AllGPUs: c.Bool("all-gpus")}
	var errs [5]error
	f.Skip, errs[0] = numberOf(c, "skip")
	f.Times, errs[1] = numberOf(c, "times")
	f.Delay, errs[2] = durationOf(c, "delay")
	f.Probability, errs[3] = probabilityOf(c)
	errs[4] = readEffect(c, &f)
	return f, errors.Join(errs[:]...)
}

func probabilityOf(c *cli.Command) (float64, error) {
	if !c.IsSet("probability") {
		return 0, nil
	}
	p, err := strconv.ParseFloat(c.String("probability"), 64)
	if err != nil || !(p > 0 && p <= 1) { // so that NaN is refused
		return 0, wrong(c, "probability", "a number above 0 and up to 1")
	}
	return p, nil
}

// readEffect reads effect and code, each of which can follow from the other.
func readEffect(c *cli.Command, f *machine.Fault) error {
	effect := machine.Proceed
	switch {
	case c.IsSet("effect"):
		effect = machine.Effect(slices.Index(effects, c.String("effect")))
	case c.IsSet("code"):
		effect = machine.Fail
	}
	if effect < 0 {
		return wrong(c, "effect", "one of "+strings.Join(effects, ", "))
	}
	f.Effect = effect
	if effect == machine.Proceed && !f.Hang && !c.IsSet("delay") && !c.IsSet("code") {
		return errors.New("this fault would do nothing: say what happens by --code, --effect, --delay or --hang")
	}
	return readCode(c, f)
}

// readCode reads the code, which some effects have and others not.
func readCode(c *cli.Command, f *machine.Fault) error {
	has := f.Effect == machine.Fail || f.Effect == machine.FailAfter
	switch set := c.IsSet("code"); {
	case ofProgram(f.Function) && set:
		return fmt.Errorf("--code %q is for functions of NVML, %s has no codes: use --effect fail", c.String("code"), f.Function)
	case ofProgram(f.Function):
		return nil
	case has && !set:
		return fmt.Errorf("--effect %s needs --code, %s", effects[f.Effect], aCode)
	case !has && set:
		return fmt.Errorf("--code %q goes with --effect fail or fail-after, not with %s", c.String("code"), effects[f.Effect])
	case has:
		var ok bool
		if f.Code, ok = parseCode(c.String("code")); !ok {
			return wrong(c, "code", aCode)
		}
	}
	return nil
}

func faultRemoveCommand() *cli.Command {
	return &cli.Command{
		Name:        "rm",
		Usage:       "remove a fault, or all of them",
		ArgsUsage:   "ID|--all [ROOT]",
		Description: "Calls that a removed fault keeps hanging go on.",
		Flags:       []cli.Flag{rootFlag(), &cli.BoolFlag{Name: "all", Usage: "remove every fault"}},
		Action: func(_ context.Context, c *cli.Command) error {
			args, id := c.Args().Slice(), 0
			if !c.Bool("all") {
				if len(args) == 0 {
					return errors.New("say which fault by its ID, or --all")
				}
				var err error
				if id, err = strconv.Atoi(args[0]); err != nil || id < 1 {
					return fmt.Errorf("%q is not the ID of a fault, a number that \"gpusim fault list\" shows", args[0])
				}
				args = args[1:]
			}
			root, err := rootAmong(c, args)
			if err != nil {
				return err
			}
			return withStateIn(root, func(f *state.File) error {
				return f.Update(func(m *machine.Machine) error { return removeFaults(m, id) })
			})
		},
	}
}

// removeFaults removes one fault, or all where id is 0.
func removeFaults(m *machine.Machine, id int) error {
	if id == 0 {
		m.Faults = nil
		return nil
	}
	var ids []int
	for _, f := range m.Faults {
		ids = append(ids, f.ID)
	}
	if !state.RemoveFault(m, id) {
		return fmt.Errorf("there is no fault %d, the machine has %v", id, ids)
	}
	return nil
}
