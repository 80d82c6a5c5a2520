// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// ErrNoClaim says that a pod refers to a claim that does not exist, ErrNoTemplate the same of a
// template, and ErrNotOwned that a claim which was made for a pod belongs to another.
var (
	ErrNoClaim    = errors.New("the claim does not exist")
	ErrNoTemplate = errors.New("the claim template does not exist")
	ErrNotOwned   = errors.New("the claim belongs to another pod")
)

// PodClaim is a claim that a pod refers to.
type PodClaim struct {
	// Name is what the pod calls it.
	Name string
	// Template is that of which the claim is made, "" if it is an object of its own.
	Template string
	// Claim is the object. Where the control plane has not made it yet, it is what the
	// template makes, and New is true. It is nil if Err says why there is none.
	Claim *resourceapi.ResourceClaim
	New   bool
	Err   error
}

// ClaimsOf returns the claims that a pod refers to, in its order. A pod that is not in the
// cluster gets what its templates would make.
func ClaimsOf(s *fleet.Snapshot, pod *corev1.Pod) []PodClaim {
	var out []PodClaim
	for i := range pod.Spec.ResourceClaims {
		out = append(out, claimOf(s, pod, &pod.Spec.ResourceClaims[i]))
	}
	return out
}

func claimOf(s *fleet.Snapshot, pod *corev1.Pod, ref *corev1.PodResourceClaim) PodClaim {
	c := PodClaim{Name: ref.Name, Template: ptr.Deref(ref.ResourceClaimTemplateName, "")}
	name, mustOwn, err := resourceclaim.Name(pod, ref)
	switch {
	case errors.Is(err, resourceclaim.ErrClaimNotFound):
		t := fleet.Named(s.Templates, pod.Namespace, c.Template)
		if t == nil {
			c.Err = fmt.Errorf("%w: %s in namespace %s", ErrNoTemplate, c.Template, pod.Namespace)
			return c
		}
		c.New, c.Claim = true, &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: pod.Name + "-" + c.Name, Labels: t.Spec.Labels, Annotations: t.Spec.Annotations},
			Spec:       *t.Spec.Spec.DeepCopy(),
		}
	case err != nil:
		c.Err = fmt.Errorf("spec.resourceClaims of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	case name != nil: // otherwise the control plane decided that the pod needs no claim here
		c.Claim = s.Claim(pod.Namespace, *name)
		if c.Claim == nil {
			c.Err = fmt.Errorf("%w: %s in namespace %s", ErrNoClaim, *name, pod.Namespace)
		} else if mustOwn && resourceclaim.IsForPod(pod, c.Claim, true) != nil {
			c.Claim, c.Err = nil, fmt.Errorf("%w: %s in namespace %s", ErrNotOwned, *name, pod.Namespace)
		}
	}
	return c
}

// ExtendedClaimName is that of the claim which the scheduler makes for a pod's extended
// resources, while it is not in the cluster yet.
const ExtendedClaimName = "<extended-resources>"

// ExtendedClaim returns the claim that the scheduler makes for the extended resources of a pod
// on a node, or nil if it makes none. A resource that a device plugin of the node offers is not
// in it. The node may be nil: one without device plugins.
func (c *Cluster) ExtendedClaim(pod *corev1.Pod, node *corev1.Node) *resourceapi.ResourceClaim {
	var requests []resourceapi.DeviceRequest
	for _, name := range Extended(pod) {
		class, offered := c.extended.GetDeviceClass(name), ptr.Deref(node, corev1.Node{}).Status.Allocatable[name]
		if class != nil && offered.IsZero() {
			requests = append(requests, extendedRequests(pod, name, class.Name)...)
		}
	}
	if len(requests) == 0 {
		return nil
	}
	slices.SortFunc(requests, func(a, b resourceapi.DeviceRequest) int { return cmp.Compare(a.Name, b.Name) })
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: ExtendedClaimName,
			Annotations: map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
		},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}},
	}
}

// Unserved returns the extended resources of a pod that neither a class nor the device plugin of a node provides.
func (c *Cluster) Unserved(pod *corev1.Pod) []corev1.ResourceName {
	return slices.DeleteFunc(Extended(pod), func(name corev1.ResourceName) bool {
		offers := func(n *corev1.Node) bool { _, has := n.Status.Allocatable[name]; return has }
		return c.extended.GetDeviceClass(name) != nil || slices.ContainsFunc(c.Nodes, offers)
	})
}

// Extended returns the resources that a pod asks for and that classes may provide.
func Extended(pod *corev1.Pod) []corev1.ResourceName {
	requests := PodRequests(pod)
	return slices.DeleteFunc(sets.List(sets.KeySet(requests)), func(name corev1.ResourceName) bool {
		amount := requests[name]
		domain, _, qualified := strings.Cut(string(name), "/")
		isNative := !qualified || domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io")
		return amount.IsZero() || isNative && !strings.HasPrefix(string(name), resourceapi.ResourceDeviceClassPrefix)
	})
}

// PodRequests returns what a pod asks for. Requests that are left out are as large as limits: so the API
// server sets them, in a pod that it has not got yet they are missing.
func PodRequests(pod *corev1.Pod) corev1.ResourceList {
	complete := *pod
	complete.Spec.InitContainers = withRequests(pod.Spec.InitContainers)
	complete.Spec.Containers = withRequests(pod.Spec.Containers)
	return resourcehelper.PodRequests(&complete, resourcehelper.PodResourcesOptions{})
}

func withRequests(containers []corev1.Container) []corev1.Container {
	out := slices.Clone(containers)
	for i := range out {
		r := &out[i].Resources
		requests := maps.Clone(r.Limits)
		if requests == nil {
			continue
		}
		maps.Copy(requests, r.Requests)
		r.Requests = requests
	}
	return out
}

// extendedRequests returns one request per container that runs to the end of the pod, and one
// more for what an init container wants beyond what those that start after it have.
func extendedRequests(pod *corev1.Pod, name corev1.ResourceName, class string) []resourceapi.DeviceRequest {
	containers := withRequests(slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers))
	wanted, running := make([]int64, len(containers)), make([]int64, len(containers))
	var requests []resourceapi.DeviceRequest
	add := func(i int, count int64) {
		all := sets.List(sets.KeySet(containers[i].Resources.Requests))
		requests = append(requests, resourceapi.DeviceRequest{
			Name: fmt.Sprintf("container-%d-request-%d", i, slices.Index(all, name)),
			Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
			},
		})
	}
	for i, c := range containers {
		amount := c.Resources.Requests[name]
		wanted[i] = amount.Value()
		isSidecar := ptr.Deref(c.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways
		if wanted[i] > 0 && (i >= len(pod.Spec.InitContainers) || isSidecar) {
			running[i] = wanted[i]
			add(i, wanted[i])
		}
	}
	most, of := int64(0), 0
	for i := range pod.Spec.InitContainers {
		missing := wanted[i]
		for _, later := range running[i:] {
			missing -= later
		}
		if missing > most {
			most, of = missing, i
		}
	}
	if most > 0 {
		add(of, most)
	}
	return requests
}
