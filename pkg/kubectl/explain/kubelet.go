// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// kubelets notes on which nodes a pod that asks for extended resources does not get its devices, because the kubelet does not know
// that these can be devices. The scheduler does not look at that.
func (q *inquiry) kubelets() {
	running := scheduled(q.pod)
	if running && q.pod.Status.ExtendedResourceClaimStatus == nil || !running && q.planner.ExtendedClaim(q.pod, nil) == nil {
		return
	}
	var old, runs, unknown []string
	for _, n := range q.planner.Nodes() {
		if running && n.Name != q.pod.Spec.NodeName || !q.hasGPUs(n.Name) {
			continue
		}
		knows, err := device.KnowsExtendedResources(n.Status.NodeInfo.KubeletVersion)
		switch {
		case err != nil:
			unknown = append(unknown, n.Name)
		case !knows && slices.Contains(q.FitsOn, n.Name):
			runs = append(runs, n.Name)
		case !knows:
			old = append(old, n.Name)
		}
	}
	const gate = ", unless its feature gate DRAExtendedResource is on, which no API tells"
	note := func(nodes []string, format string) {
		if len(nodes) > 0 {
			q.Notes = append(q.Notes, fmt.Sprintf(format, strings.ToUpper(nodesText(nodes)[:1])+nodesText(nodes)[1:]))
		}
	}
	if running {
		note(old, "%s: the kubelet is older than 1.36 and starts such a pod without the devices that it is allocated"+gate+". Delete the pod, and upgrade the kubelet or use a claim.")
		note(unknown, "%s: the version of the kubelet cannot be read. One that is older than 1.36 starts such a pod without the devices that it is allocated.")
		return
	}
	note(runs, "%s: the pod would run there without its devices, because the kubelet is older than 1.36"+gate+". Upgrade the kubelet, or use a claim.")
	note(old, "%s: not for pods that ask for extended resources, because the kubelet is older than 1.36. A claim can have devices there.")
	note(unknown, "%s: the version of the kubelet cannot be read, and whether such pods get their devices there is unknown.")
}

// hasGPUs reports whether a node has devices of the driver.
func (q *inquiry) hasGPUs(name string) bool {
	return slices.ContainsFunc(q.model.Nodes, func(n *fleet.Node) bool { return n.Name == name })
}
