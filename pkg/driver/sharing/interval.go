// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// intervals are the arguments of nvidia-smi compute-policy --set-timeslice.
var intervals = map[Interval]string{
	policy.IntervalDefault: "0",
	policy.IntervalShort:   "1",
	policy.IntervalMedium:  "2",
	policy.IntervalLong:    "3",
}

// SetInterval sets the time slice of a whole GPU. IntervalDefault undoes an earlier
// call, and succeeds if the GPU is gone. NVML has no call for this.
//
// The errors wrap those of package gpu, as NVML's calls do. If the program cannot even
// be killed, it is a call that does not return: see gpu.PendingError.
func (m *Manager) SetInterval(ctx context.Context, d Device, interval Interval) error {
	value, ok := intervals[interval]
	switch {
	case !ok:
		return fmt.Errorf("time slice of %s: no interval is called %q: %w", d, interval, gpu.ErrInvalid)
	case d.isPartition():
		return fmt.Errorf("time slice of %s: only whole GPUs have one: %w", d, gpu.ErrNotSupported)
	}
	err := m.setInterval(ctx, d, interval, value)
	if errors.Is(err, gpu.ErrNotFound) && interval == policy.IntervalDefault {
		klog.FromContext(ctx).V(2).Info("The GPU is gone, and its time slice with it", "pciAddress", d.PCIAddress, "uuid", d.UUID)
		return nil
	}
	if err != nil {
		return fmt.Errorf("set the time slice of %s to %s: %w", d, interval, err)
	}
	return nil
}

func (m *Manager) setInterval(ctx context.Context, d Device, interval Interval, value string) error {
	smi, err := call.Read(ctx, m.options.Calls.Of("", call.DriverFiles), "find nvidia-smi", func() (host.Program, error) {
		return m.options.Roots.Program("nvidia-smi")
	})
	if err != nil {
		return err
	}
	answer, err := m.computePolicy(ctx, smi, d, "-i", d.UUID, "--set-timeslice", value)
	if err != nil {
		m.trusted.CompareAndDelete(d.UUID, true)
		return err
	}
	if trusted, _ := m.trusted.Load(d.UUID); trusted == true {
		return nil
	}
	if err := m.checkInterval(ctx, smi, d, interval, answer); err != nil {
		m.trusted.Store(d.UUID, false)
		return err
	}
	m.trusted.LoadOrStore(d.UUID, true)
	return nil
}

// checkInterval reads back what the tool says that it has set.
func (m *Manager) checkInterval(ctx context.Context, smi host.Program, d Device, interval Interval, answer string) error {
	table, err := m.computePolicy(ctx, smi, d, "-i", d.UUID, "-l")
	if err != nil && !errors.Is(err, gpu.ErrInvalid) && !errors.Is(err, gpu.ErrNotSupported) {
		return fmt.Errorf("it was set, reading it back failed: %w", err)
	}
	listed, ok := listedInterval(table)
	if !ok {
		// The table is for people. If its layout changes, that is no reason to fail
		// after the tool reported success.
		klog.FromContext(ctx).Info("The time slice was set and cannot be read back", "pciAddress", d.PCIAddress,
			"uuid", d.UUID, "interval", interval, "listed", oneLine(table), "reason", err)
		return nil
	}
	if listed != interval {
		return &gpu.Error{
			Call: computePolicy, PCIAddress: d.PCIAddress,
			Text: fmt.Sprintf("answered success (%s), but the time slice is %s", oneLine(answer), listed),
		}
	}
	return nil
}

// computePolicy names the sub-command of nvidia-smi in errors.
const computePolicy = "nvidia-smi compute-policy"

func (m *Manager) computePolicy(ctx context.Context, smi host.Program, d Device, args ...string) (string, error) {
	out, err := m.run(ctx, d, smi, append([]string{"compute-policy"}, args...))
	var failed *exitError
	if errors.As(err, &failed) {
		return "", &gpu.Error{
			Call: computePolicy, PCIAddress: d.PCIAddress,
			Text: fmt.Sprintf("%s (exit code %d)", oneLine(out), failed.code), Err: reason(failed.code, out),
		}
	}
	if err != nil {
		return "", err
	}
	// The tool has been seen to exit with 0 after a failure.
	if why := reason(0, out); why != nil {
		return "", &gpu.Error{Call: computePolicy, PCIAddress: d.PCIAddress, Text: oneLine(out), Err: why}
	}
	return out, nil
}

// exitReasons are what the exit codes of nvidia-smi mean, from its manual page.
var exitReasons = map[int]error{
	2:  gpu.ErrInvalid,
	3:  gpu.ErrNotSupported,
	4:  gpu.ErrNoPermission,
	6:  gpu.ErrNotFound,
	9:  gpu.ErrDriverNotLoaded,
	12: gpu.ErrDriverNotLoaded,
	13: gpu.ErrNotSupported,
	15: gpu.ErrLost,
}

// reason returns why nvidia-smi failed, from its exit code, or from NVML's words for
// it if the code is the general one. It returns nil if neither is known.
func reason(code int, out string) error {
	if why, ok := exitReasons[code]; ok {
		return why
	}
	text := strings.ToLower(out)
	switch {
	case strings.Contains(text, "not supported"):
		return gpu.ErrNotSupported
	case strings.Contains(text, "insufficient permissions"):
		return gpu.ErrNoPermission
	case strings.Contains(text, "gpu is lost"):
		return gpu.ErrLost
	}
	return nil
}

// listedInterval reads the time slice from the table of compute-policy -l for one
// GPU:
//
//	| GPU     Name           Policy   |
//	|=================================|
//	|   0     Timeslice      Default  |
func listedInterval(table string) (Interval, bool) {
	var found []Interval
	for line := range strings.Lines(table) {
		fields := strings.Fields(strings.ReplaceAll(line, "|", " "))
		name := strings.ToLower(strings.ReplaceAll(strings.Join(fields, ""), "-", ""))
		if !strings.Contains(name, "timeslice") {
			continue
		}
		for interval := range intervals {
			if strings.EqualFold(fields[len(fields)-1], string(interval)) {
				found = append(found, interval)
			}
		}
	}
	if len(found) != 1 {
		return "", false
	}
	return found[0], true
}

// oneLine formats a program's output for an error.
func oneLine(out string) string {
	return cmp.Or(quote.Line(strings.Join(strings.Fields(out), " "), 400), "no output")
}
