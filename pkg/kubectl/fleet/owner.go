// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// OwnerOf returns the kind and name of what a pod belongs to. That of a Deployment's ReplicaSet
// is its name without the hash that the pod's label has. The pod's author writes both: what is no kind, or no name of an object, goes into no command.
func OwnerOf(p *corev1.Pod) (kind, name string) {
	owner := metav1.GetControllerOf(p)
	if owner == nil || len(validation.IsDNS1123Subdomain(owner.Name)) > 0 || len(validation.IsDNS1035Label(strings.ToLower(owner.Kind))) > 0 {
		return "", ""
	}
	hash := p.Labels[appsv1.DefaultDeploymentUniqueLabelKey]
	if deployment, is := strings.CutSuffix(owner.Name, "-"+hash); owner.Kind == "ReplicaSet" && hash != "" && is {
		return "Deployment", deployment
	}
	return owner.Kind, owner.Name
}
