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
	"github.com/partage-dev/partage/pkg/node/host"
)

// Finder describes holders. It may be used concurrently.
type Finder struct {
	// Roots are where the driver's minors are read.
	Roots host.Roots
	// Proc is the procfs with the processes of the host. Default "/proc", which is that
	// where this process is in the host's PID namespace.
	Proc string
	// PodName returns "namespace/name" of the pod with this UID, or "" if it is not
	// known. Optional.
	PodName func(uid string) string

	// all are the walks over all processes, and inPods those over processes in pods.
	all, inPods reads[[]Process]
}

const (
	// walkLimit bounds a walk over the open files of all processes, some microseconds for
	// each.
	walkLimit = 5 * time.Second
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
	var holders []Process
	for _, p := range listed {
		if p.InstanceID == instanceID || instanceID < 0 {
			holders = join(holders, []Process{f.Process(p.PID)})
		}
	}
	minor, open, err := f.openers(ctx, pciAddress, walkLimit, false)
	if err != nil || instanceID < 0 {
		return f.text(join(holders, open), err)
	}
	first := firstCapability + perGPU*minor + perInstance*instanceID
	if known, err := f.Roots.Within(ctx).InstanceCapability(minor, instanceID); err == nil {
		first = int(known)
	}
	on := slices.DeleteFunc(slices.Clone(open), func(p Process) bool { return !p.has(first, first+perInstance) })
	if holders = join(holders, on); len(holders) > 0 {
		return f.text(holders, nil)
	}
	// A process that may configure partitions needs no capability. What others have open says
	// that they are on another partition.
	others := slices.DeleteFunc(slices.Clone(open), func(p Process) bool {
		return p.has(firstCapability+perGPU*minor, firstCapability+perGPU*(minor+1))
	})
	return f.text(others, nil)
}

// Process returns the program, pod and container of a process, as far as they are known.
func (f *Finder) Process(pid int) Process { return f.proc().process(pid) }

// Openers lists the processes that have the node of a GPU open, all or those in pods. An error means that they are not known
// within the limit.
func (f *Finder) Openers(ctx context.Context, pciAddress string, limit time.Duration, inPods bool) ([]Process, error) {
	minor, open, err := f.openers(ctx, pciAddress, limit, inPods)
	return slices.DeleteFunc(slices.Clone(open), func(p Process) bool { return !slices.Contains(p.nodes, gpuNode(minor)) }), err
}

func (f *Finder) proc() procfs {
	r := f.Roots.Complete()
	return procfs{path: cmp.Or(f.Proc, "/proc"), roots: []string{r.Dev, r.HostDev, r.Driver, r.HostDriver}}
}

// openers lists the processes that have the node of a GPU open, or one of its
// capabilities. One walk is shared by all who ask meanwhile, whatever the GPU: it takes as long for one as for all.
func (f *Finder) openers(ctx context.Context, pciAddress string, limit time.Duration, inPods bool) (minor int, open []Process, err error) {
	minor, err = f.Roots.Within(ctx).GPUMinor(pciAddress)
	if err != nil {
		return 0, nil, fmt.Errorf("who has its device node open is not known: %w", err)
	}
	node, first := gpuNode(minor), firstCapability+perGPU*minor
	walks := &f.all
	if inPods {
		walks = &f.inPods
	}
	all, err := walks.do(limit, func() ([]Process, error) { return f.proc().openers(inPods) })
	for _, p := range all {
		p.nodes = slices.DeleteFunc(slices.Clone(p.nodes), func(path string) bool {
			return path != node && !isCapability(filepath.Base(path), first, first+perGPU)
		})
		if len(p.nodes) > 0 {
			open = append(open, p)
		}
	}
	if errors.Is(err, errNoAnswer) {
		err = errors.New("the open files of the processes of this node could not be read in time")
	}
	if err != nil {
		err = fmt.Errorf("who has %s open is not known: %w", node, err)
	}
	return minor, open, err
}

// has reports whether a process has a capability from first to before end open.
func (p Process) has(first, end int) bool {
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
func join(holders, others []Process) []Process {
	for _, other := range others {
		at := slices.IndexFunc(holders, func(p Process) bool { return p.PID == other.PID })
		if at < 0 {
			holders = append(holders, other)
			continue
		}
		holders[at].nodes = append(holders[at].nodes, other.nodes...)
	}
	slices.SortFunc(holders, func(a, b Process) int { return a.PID - b.PID })
	return holders
}

// text lists holders, or says what else it may be.
func (f *Finder) text(holders []Process, incomplete error) string {
	var parts []string
	for _, p := range holders[:min(len(holders), shown)] {
		name := ""
		if f.PodName != nil && p.Pod != "" {
			name = f.PodName(p.Pod)
		}
		parts = append(parts, p.Text(name))
	}
	if more := len(holders) - shown; more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
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
