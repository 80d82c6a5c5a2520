// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/version"
)

var runtimeChecks = []Check{
	{ID: "container-runtime", Title: "the container runtimes can read CDI specs", needs: []string{nodes, slicesOf}, run: containerRuntimes},
	{ID: "cdi", Title: "no container has failed because of CDI within an hour", needs: []string{events}, parts: []string{events}, run: cdiFailures},
}

// cdiSince are the first versions of container runtimes that read CDI specs for the kubelet.
var cdiSince = map[string]*version.Version{
	"containerd": version.MustParseGeneric("1.7.0"),
	"cri-o":      version.MustParseGeneric("1.23.0"),
}

func containerRuntimes(f *Facts) (found findings) {
	for _, n := range f.Snapshot.Nodes {
		if !f.publishes(n.Name) && !hasGPULabel(n) {
			continue
		}
		text, at := n.Status.NodeInfo.ContainerRuntimeVersion, nodeRef(n.Name)
		name, number, _ := strings.Cut(text, "://")
		since, known := cdiSince[name]
		if !known {
			found.add(Warning, fmt.Sprintf("It is not known whether the container runtime %s reads CDI specs", said(text)), "Use containerd 2.0 or later, or CRI-O", at)
			continue
		}
		v, err := version.ParseGeneric(number)
		switch {
		case err != nil:
			found.add(Unknown, "The container runtime has a version that cannot be read: "+said(text), "Use containerd 2.0 or later, or CRI-O", at)
		case v.LessThan(since):
			found.add(Error, fmt.Sprintf("The container runtime %s does not read CDI specs: containers with claims do not start", text),
				fmt.Sprintf("Upgrade %s to %s or later (docs/how-to/install.md#what-a-cluster-needs)", name, since), at)
		}
	}
	return found
}

func cdiFailures(f *Facts) (found findings) {
	for _, e := range newestFirst(f.Events) {
		if e.InvolvedObject.Kind != "Pod" || e.Type != corev1.EventTypeWarning || !f.recent(e) {
			continue
		}
		if !strings.Contains(e.Message, "unresolvable CDI devices") && !strings.Contains(e.Message, "CDI device injection failed") {
			continue
		}
		found.add(Error, "The container runtime does not find the devices of its claim: "+said(e.Message),
			"Let the runtime read the folder that the driver writes to: enable_cdi = true and cdi_spec_dirs with host.cdiDir, /var/run/cdi (docs/how-to/real-nodes.md)", about(e))
	}
	return found
}
