// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		return fromTemplate(s, pod, c)
	case err != nil:
		c.Err = fmt.Errorf("spec.resourceClaims of pod %s/%s: %w", pod.Namespace, pod.Name, err)
		return c
	case name == nil:
		// The control plane decided that the pod needs no claim here.
		return c
	}
	c.Claim = s.Claim(pod.Namespace, *name)
	switch {
	case c.Claim == nil:
		c.Err = fmt.Errorf("%w: %s in namespace %s", ErrNoClaim, *name, pod.Namespace)
	case mustOwn && resourceclaim.IsForPod(pod, c.Claim, true) != nil:
		c.Claim, c.Err = nil, fmt.Errorf("%w: %s in namespace %s", ErrNotOwned, *name, pod.Namespace)
	}
	return c
}

func fromTemplate(s *fleet.Snapshot, pod *corev1.Pod, c PodClaim) PodClaim {
	if t := fleet.Named(s.Templates, pod.Namespace, c.Template); t != nil {
		c.Claim, c.New = Instantiate(t, pod.Name+"-"+c.Name), true
	} else {
		c.Err = fmt.Errorf("%w: %s in namespace %s", ErrNoTemplate, c.Template, pod.Namespace)
	}
	return c
}

// Instantiate returns the claim that a template makes.
func Instantiate(t *resourceapi.ResourceClaimTemplate, name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: name, Labels: t.Spec.Labels, Annotations: t.Spec.Annotations},
		Spec:       *t.Spec.Spec.DeepCopy(),
	}
}
