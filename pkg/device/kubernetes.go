// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

// ExtendedResources is the attribute of devices that pods can have by an extended resource, such as
// nvidia.com/gpu. Classes with such a resource select by it.
const ExtendedResources = "extendedResources"

// IsPluginResource reports whether an extended resource is one under which NVIDIA's device plugin
// offers GPUs or parts of them, such as nvidia.com/gpu, nvidia.com/gpu.shared and
// nvidia.com/mig-1g.10gb. The domain nvidia.com also has the network cards of NVIDIA's network operator.
func IsPluginResource(resource string) bool {
	name, ok := strings.CutPrefix(resource, "nvidia.com/")
	return ok && (name == "gpu" || strings.HasPrefix(name, "gpu.") || strings.HasPrefix(name, "mig-"))
}

// KnowsExtendedResources reports whether a kubelet of this version gives a container the devices that the
// scheduler has allocated for an extended resource. An older one starts the container without. The feature
// gate DRAExtendedResource can change that both ways, which no API tells.
func KnowsExtendedResources(kubelet string) (bool, error) {
	before, err := versionOf(kubelet, "the kubelet")
	return err == nil && !before("1.36.0"), err // the first whose kubelets know it by default
}

// SchedulerFaults are what the scheduler of a Kubernetes version does wrong with the
// devices of an inventory. test/allocators finds them by running the schedulers' code.
type SchedulerFaults struct {
	// IgnoresCounters: it does not look for counters in slices of their own. Whole GPUs
	// and their partitions would be allocated at the same time.
	IgnoresCounters bool
	// ForgetsShares: a share that a claim has does not count against the counters, so that
	// the whole GPU, its partitions and shares of another kind are allocated beside it
	// (kubernetes/kubernetes#139034).
	ForgetsShares bool
	// CrashesOnAll: it ends with a nil pointer, again and again, when a claim asks for all
	// devices (allocationMode) and one of them draws on counters
	// (kubernetes/kubernetes#138882).
	CrashesOnAll bool
}

// FaultsOfScheduler returns the faults of a Kubernetes version, such as "v1.36.1". The
// suffix that a distribution adds to it does not matter.
func FaultsOfScheduler(kubernetes string) (SchedulerFaults, error) {
	before, err := versionOf(kubernetes, "Kubernetes")
	switch {
	case err != nil:
		return SchedulerFaults{}, err
	case before("1.35.0"):
		return SchedulerFaults{IgnoresCounters: true}, nil
	}
	return SchedulerFaults{
		ForgetsShares: before("1.36.2"),
		CrashesOnAll:  before("1.35.6") || !before("1.36.0") && before("1.36.2"),
	}, nil
}

// versionOf parses a version. before reports whether it is older than another one.
func versionOf(text, what string) (before func(other string) bool, err error) {
	v, err := version.ParseGeneric(text)
	if err != nil {
		return nil, fmt.Errorf("the version %q of %s: %w", text, what, err)
	}
	return func(other string) bool { return v.LessThan(version.MustParseGeneric(other)) }, nil
}
