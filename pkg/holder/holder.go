// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package holder finds out who keeps a GPU or a partition in use, for the error that says
// so. The driver lists processes with a context, but not those that have nothing except
// an open device node, such as monitoring agents: DCGM has been seen to keep the nodes of
// partitions open until it was restarted (github.com/NVIDIA/DCGM/issues/276).
package holder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/wait"
)

// Finder describes holders. It may be used concurrently.
type Finder struct {
	// Roots are where the driver's minors are read.
	Roots host.Roots
	// Proc is the procfs with the processes of the host. Default "/proc", which is that
	// where this process is in the host's PID namespace.
	Proc string
	// PodName returns "namespace/name" of the pod with this UID, or "" if it is not
	// known, given the GPU that it has in use. Optional.
	PodName func(ctx context.Context, pciAddress, uid string) string

	looks wait.Looks[string, []process]
}

const (
	// lookLimit bounds a look at the open files of all processes, some microseconds for
	// each.
	lookLimit = 5 * time.Second
	// podNameLimit bounds the search for the names of all pods.
	podNameLimit = 3 * time.Second
	// shown is how many holders are described.
	shown = 5

	capabilityNode = "nvidia-cap"
	// Each GPU instance has a capability of its own, followed by those of up to 8 compute
	// instances in it, and each GPU has 15 GPU instances
	// (/proc/driver/nvidia-caps/mig-minors). Those of the first GPU begin after the ones
	// to configure and to monitor.
	perInstance     = 9
	perGPU          = 15 * perInstance
	firstCapability = 3
)

// Describe says who has a GPU instance in use, or the GPU if instanceID is negative,
// given the processes that the driver lists on the GPU. It always returns a text, which
// goes on after "held by".
func (f *Finder) Describe(ctx context.Context, pciAddress string, instanceID int, listed []gpu.Process) string {
	holders := f.listed(instanceID, listed)
	minor, err := f.Roots.Within(ctx).GPUMinor(pciAddress)
	if err != nil {
		return f.text(ctx, pciAddress, holders, fmt.Errorf("who has its device node open is not known: %w", err))
	}
	node := "nvidia" + strconv.Itoa(minor)
	open, err := f.openers(minor, node)
	if err != nil {
		return f.text(ctx, pciAddress, holders, fmt.Errorf("who has /dev/%s open is not known: %w", node, err))
	}
	if instanceID < 0 {
		return f.text(ctx, pciAddress, join(holders, open), nil)
	}
	first := firstCapability + perGPU*minor + perInstance*instanceID
	if known, err := f.Roots.Within(ctx).InstanceCapability(minor, instanceID); err == nil {
		first = int(known)
	}
	on := slices.DeleteFunc(slices.Clone(open), func(p process) bool { return !p.has(first, first+perInstance) })
	if holders = join(holders, on); len(holders) > 0 {
		return f.text(ctx, pciAddress, holders, nil)
	}
	// Whoever may configure partitions needs no capability. What others have open says
	// that they are on another partition.
	others := slices.DeleteFunc(slices.Clone(open), func(p process) bool {
		return p.has(firstCapability+perGPU*minor, firstCapability+perGPU*(minor+1))
	})
	return f.text(ctx, pciAddress, others, nil)
}

// listed are the processes that the driver lists on the instance or on the GPU.
func (f *Finder) listed(instanceID int, listed []gpu.Process) []process {
	var found []process
	for _, p := range listed {
		if p.InstanceID == instanceID || instanceID < 0 {
			found = join(found, []process{f.proc().process(p.PID)})
		}
	}
	return found
}

func (f *Finder) proc() procfs {
	r := f.Roots.Complete()
	return procfs{path: cmp.Or(f.Proc, "/proc"), roots: []string{r.Dev, r.HostDev, r.Driver, r.HostDriver}}
}

// openers lists the processes that have the node of a GPU open, or one of its
// capabilities.
func (f *Finder) openers(minor int, node string) ([]process, error) {
	first := firstCapability + perGPU*minor
	wanted := func(name string) bool { return name == node || isCapability(name, first, first+perGPU) }
	open, err := f.looks.Do(node, lookLimit, func() ([]process, error) { return f.proc().openers(wanted) })
	if errors.Is(err, wait.ErrNoAnswer) {
		return nil, fmt.Errorf("the open files of the processes of this node could not be read within %s", lookLimit)
	}
	return open, err
}

// has reports whether a process has a capability from first to before end open.
func (p process) has(first, end int) bool {
	return slices.ContainsFunc(p.nodes, func(path string) bool {
		return isCapability(filepath.Base(path), first, end)
	})
}

func isCapability(name string, first, end int) bool {
	number, ok := strings.CutPrefix(name, capabilityNode)
	n, err := strconv.Atoi(number)
	return ok && err == nil && first <= n && n < end
}

// join adds to holders what is known of others.
func join(holders, others []process) []process {
	for _, other := range others {
		at := slices.IndexFunc(holders, func(p process) bool { return p.pid == other.pid })
		if at < 0 {
			holders = append(holders, other)
			continue
		}
		holders[at].nodes = append(holders[at].nodes, other.nodes...)
	}
	slices.SortFunc(holders, func(a, b process) int { return a.pid - b.pid })
	return holders
}

// text lists holders, or says what else it may be.
func (f *Finder) text(ctx context.Context, pciAddress string, holders []process, incomplete error) string {
	ctx, cancel := context.WithTimeout(ctx, podNameLimit)
	defer cancel()
	podName := func(string) string { return "" }
	if f.PodName != nil {
		podName = func(uid string) string { return f.PodName(ctx, pciAddress, uid) }
	}
	var parts []string
	for i, p := range holders {
		if i == shown {
			parts = append(parts, fmt.Sprintf("and %d more", len(holders)-shown))
			break
		}
		parts = append(parts, p.text(podName))
	}
	if incomplete != nil {
		parts = append(parts, "("+incomplete.Error()+")")
	}
	if len(holders) == 0 {
		parts = append([]string{nobody}, parts...)
	}
	return strings.Join(parts, ", ")
}

// nobody is said where neither the driver nor procfs shows anyone.
const nobody = "nobody that can be seen: neither does the driver list a process, nor does one of this node have a device node of it open; " +
	"it may be a kernel module (nvidia_drm), or a process that is just ending"
