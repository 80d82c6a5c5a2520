// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package idle

import (
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// reap returns what the pods of a claim belong to, and the commands that would free its devices.
func reap(h *fleet.Holding, reason string) (owners, commands []string) {
	add := func(list *[]string, one string) {
		if !slices.Contains(*list, one) {
			*list = append(*list, one)
		}
	}
	for _, p := range h.Pods {
		kind, name := ownerOf(p)
		if kind != "" {
			add(&owners, kind+"/"+name)
		}
		if reason != PodsDone {
			add(&commands, command(p, kind, name))
			continue
		}
		add(&commands, fmt.Sprintf("kubectl delete pod -n %s %s", p.Namespace, p.Name))
	}
	if len(commands) == 0 {
		if len(h.Claim.Status.ReservedFor) > 0 {
			// The pods could not be read; their names are known.
			for _, u := range h.Claim.Status.ReservedFor {
				add(&commands, fmt.Sprintf("kubectl delete %s -n %s %s", strings.TrimSuffix(u.Resource, "s"), h.Claim.Namespace, u.Name))
			}
			return owners, commands
		}
		commands = []string{fmt.Sprintf("kubectl delete resourceclaim -n %s %s", h.Claim.Namespace, h.Claim.Name)}
	}
	return owners, commands
}

// ownerOf returns the kind and name of what a pod belongs to. That of a Deployment's ReplicaSet
// is its name without the hash that the pod's label has.
func ownerOf(p *corev1.Pod) (kind, name string) {
	owner := metav1.GetControllerOf(p)
	if owner == nil {
		return "", ""
	}
	hash := p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	if deployment, is := strings.CutSuffix(owner.Name, "-"+hash); owner.Kind == "ReplicaSet" && hash != "" && is {
		return "Deployment", deployment
	}
	return owner.Kind, owner.Name
}

// command frees what a pod has, for good: a pod that something else makes anew is of no use.
func command(p *corev1.Pod, kind, name string) string {
	switch kind {
	case "Deployment", "ReplicaSet", "StatefulSet":
		return fmt.Sprintf("kubectl scale -n %s %s/%s --replicas=0", p.Namespace, strings.ToLower(kind), name)
	case "Job":
		return fmt.Sprintf("kubectl delete job -n %s %s", p.Namespace, name)
	}
	return fmt.Sprintf("kubectl delete pod -n %s %s", p.Namespace, p.Name)
}
