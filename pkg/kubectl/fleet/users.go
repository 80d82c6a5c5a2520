// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// User is an object that a claim is reserved for.
type User struct {
	// Resource is what commands call its kind, such as pod.
	Resource, Namespace, Name string
	UID                       types.UID
	// Pod is nil if it could not be read, or is none.
	Pod *corev1.Pod
}

// Users returns whom the claim is reserved for. It names pods that may not be read, too.
func (h *Holding) Users() []User {
	var all []User
	for _, r := range h.Claim.Status.ReservedFor {
		u := User{Resource: strings.TrimRight(r.Resource+"."+r.APIGroup, "."), Namespace: h.Claim.Namespace, Name: r.Name, UID: r.UID}
		if u.Resource == "pods" {
			u.Resource = "pod"
		}
		if at := slices.IndexFunc(h.Pods, func(p *corev1.Pod) bool { return p.UID == r.UID }); at >= 0 {
			u.Pod = h.Pods[at]
		}
		all = append(all, u)
	}
	return all
}

// Owner is what makes a user anew, such as "Deployment web", or "".
func (u User) Owner() string {
	if u.Pod == nil {
		return ""
	}
	kind, name := OwnerOf(u.Pod)
	return strings.TrimSpace(kind + " " + name)
}

// DeleteCommand returns the command that deletes objects of a namespace. Whom a claim is reserved for its status says, and nobody checks
// there that a name is one: what no object can be called becomes a comment, and nothing that a shell would obey.
func DeleteCommand(resource, namespace string, names ...string) string {
	all := append([]string{resource, namespace}, names...)
	if slices.ContainsFunc(all, func(name string) bool { return len(validation.IsDNS1123Subdomain(name)) > 0 }) {
		return fmt.Sprintf("# no object is called so: %q", all)
	}
	return fmt.Sprintf("kubectl delete %s -n %s %s", resource, namespace, strings.Join(names, " "))
}

// LastSeen returns when what an event reports was observed last.
func LastSeen(e *corev1.Event) time.Time {
	seen := e.LastTimestamp.Time
	if e.Series != nil && e.Series.LastObservedTime.After(seen) {
		seen = e.Series.LastObservedTime.Time
	}
	for _, t := range []time.Time{e.EventTime.Time, e.CreationTimestamp.Time} {
		if seen.IsZero() {
			seen = t
		}
	}
	return seen
}
