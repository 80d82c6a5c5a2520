// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Destroy removes the partition at the address and nothing else. An absent one, and
// a partition that is not ours, is a success: that is one that somebody has divided
// into several compute instances, or whose UUID is another than uuid, because
// somebody made it after the GPU was reset. An empty uuid stands for any. A GPU that
// says that it has no MIG is an error, since a partition was made there. It turns
// MIG mode off when the last instance of a dynamic GPU is gone; a failure of that
// alone is logged, unless the call has not returned.
//
// While a process holds the partition it tries again for about seven seconds
// within ctx, because a process that was just killed takes its time; then the
// error wraps gpu.ErrInUse and names the processes.
func (l *Lifecycle) Destroy(ctx context.Context, a Address, uuid string, dynamic bool) error {
	if err := l.destroy(ctx, a, withUUID(uuid), dynamic); err != nil {
		return fmt.Errorf("destroy the partition with %s: %w", a, err)
	}
	return nil
}

func (l *Lifecycle) destroy(ctx context.Context, a Address, ours check, dynamic bool) error {
	state, err := l.hw.MIGState(ctx, a.PCIAddress)
	if err != nil {
		return err
	}
	if state, err = l.removeInstance(ctx, a, ours, state); err != nil {
		return err
	}
	if dynamic && state.Enabled && len(state.Instances) == 0 {
		_, err := l.switchMode(ctx, a.PCIAddress, false)
		if errors.Is(err, gpu.ErrHung) {
			// The caller has to keep its lock.
			return err
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "MIG mode stays on, although no instance is left", "pciAddress", a.PCIAddress)
		}
	}
	return nil
}

// removeInstance removes the compute instances and the GPU instance at the
// address if they are ours, tries again while they are in use, and returns the
// state afterwards. Every attempt looks again at what is there: somebody may
// have replaced the instance since the last one.
func (l *Lifecycle) removeInstance(ctx context.Context, a Address, ours check, state gpu.MIGState) (gpu.MIGState, error) {
	for attempt := 0; ; attempt++ {
		instance := find(state, a)
		if instance == nil {
			return state, nil
		}
		if err := ours(*instance); err != nil {
			klog.FromContext(ctx).Info("A GPU instance at the address of a partition is not ours and stays",
				"pciAddress", a.PCIAddress, "instanceID", instance.ID, "reason", err.Error())
			return state, nil
		}
		absent, err := l.tearDown(ctx, a.PCIAddress, *instance)
		if err == nil {
			still := errors.New("the driver reports success and the GPU instance is still there")
			return l.unlessGone(ctx, a, ours, errors.Join(append(absent, still)...))
		}
		if !errors.Is(err, gpu.ErrInUse) {
			return l.unlessGone(ctx, a, ours, err)
		}
		// Where no time is left for another attempt, what blocks says more
		// than that the deadline has come.
		if attempt == len(pauses) || l.wait(ctx, pauses[attempt]) != nil {
			return state, l.nameHolder(ctx, a.PCIAddress, instance.ID, err)
		}
		if state, err = l.hw.MIGState(ctx, a.PCIAddress); err != nil {
			return state, err
		}
	}
}

// tearDown removes the compute instances first, as the driver demands. One
// that is gone already is no failure; absent says of which ones that was heard.
func (l *Lifecycle) tearDown(ctx context.Context, pciAddress string, instance gpu.Instance) (absent []error, err error) {
	for _, compute := range instance.Compute {
		err := l.hw.DestroyComputeInstance(ctx, pciAddress, instance.ID, compute.ID)
		if err != nil {
			err = fmt.Errorf("compute instance %d of GPU instance %d: %w", compute.ID, instance.ID, err)
		}
		if err != nil && !errors.Is(err, gpu.ErrNotFound) {
			return absent, err
		}
		absent = append(absent, err)
	}
	err = l.hw.DestroyInstance(ctx, pciAddress, instance.ID)
	if err != nil {
		err = fmt.Errorf("GPU instance %d: %w", instance.ID, err)
	}
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return absent, err
	}
	klog.FromContext(ctx).V(2).Info("GPU instance destroyed", "pciAddress", pciAddress, "instanceID", instance.ID)
	return append(absent, err), nil
}

// unlessGone returns cause if the instance is still at the address.
func (l *Lifecycle) unlessGone(ctx context.Context, a Address, ours check, cause error) (gpu.MIGState, error) {
	state, err := l.hw.MIGState(ctx, a.PCIAddress)
	if err != nil {
		return state, errors.Join(cause, err)
	}
	if instance := find(state, a); instance != nil && ours(*instance) == nil {
		return state, cause
	}
	return state, nil
}

// nameHolder adds to an IN_USE error who holds the instance. It asks even
// after the caller's deadline, since this is what an administrator needs.
func (l *Lifecycle) nameHolder(ctx context.Context, pciAddress string, instanceID int, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	processes, listErr := l.hw.Processes(ctx, pciAddress)
	if listErr != nil {
		return fmt.Errorf("%w (who holds it is not known: %w)", err, listErr)
	}
	return fmt.Errorf("%w, held by %s", err, holders(processes, instanceID))
}

// holders names the processes on an instance, or on the whole GPU if
// instanceID is -1.
func holders(processes []gpu.Process, instanceID int) string {
	var pids []int
	for _, p := range processes {
		if p.InstanceID == instanceID || instanceID == wholeGPU {
			pids = append(pids, p.PID)
		}
	}
	slices.Sort(pids)
	pids = slices.Compact(pids)
	switch len(pids) {
	case 0:
		return "no process that the driver lists: a monitoring agent (DCGM, dcgm-exporter), " +
			"nvidia-persistenced or another management client may have it open"
	case 1:
		return fmt.Sprintf("process %d", pids[0])
	default:
		return "processes " + strings.Trim(fmt.Sprint(pids), "[]")
	}
}

// pauses are the waits between attempts on an instance that is in use, about
// seven seconds in all: long enough for a killed process to vanish, short
// enough for another claim on this GPU to be served in the same kubelet call.
var pauses = []time.Duration{
	100 * time.Millisecond,
	200 * time.Millisecond,
	400 * time.Millisecond,
	800 * time.Millisecond,
	1600 * time.Millisecond,
	2 * time.Second,
	2 * time.Second,
}
