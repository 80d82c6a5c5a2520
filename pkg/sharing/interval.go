// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/policy"
)

// intervals are the values of nvidia-smi.
var intervals = map[Interval]string{
	policy.IntervalDefault: "0",
	policy.IntervalShort:   "1",
	policy.IntervalMedium:  "2",
	policy.IntervalLong:    "3",
}

// SetInterval of a whole GPU; IntervalDefault takes back what was set, and
// succeeds when the GPU is gone. NVML has no call for it.
//
// The errors are those of NVML's calls. A program that cannot even be killed is
// left behind like a call that does not return: see gpu.HungError.
func (m *Manager) SetInterval(ctx context.Context, d Device, interval Interval) error {
	value, ok := intervals[interval]
	switch {
	case !ok:
		return fmt.Errorf("time slice of %s: no interval is called %q: %w", d, interval, gpu.ErrInvalid)
	case d.partition():
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
	smi, err := m.roots.Program("nvidia-smi")
	if err != nil {
		return err
	}
	answer, err := m.computePolicy(ctx, smi, d, "-i", d.UUID, "--set-timeslice", value)
	if err != nil {
		return err
	}
	table, err := m.computePolicy(ctx, smi, d, "-i", d.UUID, "-l")
	if err != nil && !errors.Is(err, gpu.ErrInvalid) && !errors.Is(err, gpu.ErrNotSupported) {
		return fmt.Errorf("it was set, reading it back failed: %w", err)
	}
	is, ok := listedInterval(table)
	if !ok {
		// The table is for people. That it is drawn in another way, or not for one
		// GPU, is no reason to refuse what the tool says it did.
		klog.FromContext(ctx).Info("The time slice was set and cannot be read back", "pciAddress", d.PCIAddress,
			"uuid", d.UUID, "interval", interval, "listed", oneLine(table), "reason", err)
		return nil
	}
	if is != interval {
		return &gpu.Error{
			Call: computePolicy, PCIAddress: d.PCIAddress,
			Text: fmt.Sprintf("answered success (%s), but the time slice is %s", oneLine(answer), is),
		}
	}
	return nil
}

// computePolicy is the part of nvidia-smi that this is about.
const computePolicy = "nvidia-smi compute-policy"

func (m *Manager) computePolicy(ctx context.Context, smi host.Program, d Device, args ...string) (string, error) {
	out, err := m.run(ctx, d, smi, append([]string{"compute-policy"}, args...))
	var ended *exitError
	if errors.As(err, &ended) {
		return "", &gpu.Error{
			Call: computePolicy, PCIAddress: d.PCIAddress,
			Text: fmt.Sprintf("%s (exit code %d)", oneLine(out), ended.code), Err: reason(ended.code, out),
		}
	}
	if err != nil {
		return "", err
	}
	// The tool has been seen to end with success after a failure.
	if why := reason(0, out); why != nil {
		return "", &gpu.Error{Call: computePolicy, PCIAddress: d.PCIAddress, Text: oneLine(out), Err: why}
	}
	return out, nil
}

// exitReasons are the exit codes of nvidia-smi, from its manual page.
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

// reason says why nvidia-smi failed, by its exit code, or by the words that NVML
// has for it where the code is the one for everything else.
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

// oneLine makes a program's output fit into an error.
func oneLine(out string) string {
	const limit = 400
	var lines []string
	for line := range strings.Lines(out) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	text := strings.ToValidUTF8(strings.Join(lines, " "), "?")
	if text == "" {
		return "it said nothing"
	}
	if len(text) > limit {
		text = strings.ToValidUTF8(text[:limit], "") + "…"
	}
	return text
}
