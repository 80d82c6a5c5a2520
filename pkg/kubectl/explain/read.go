// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// ReadFrom has the Explainer ask the API server for what no Snapshot has, when it is needed: the
// events of a pod, its volumes, and the label of a namespace for admin access.
func (x *Explainer) ReadFrom(ctx context.Context, client kubernetes.Interface) {
	x.Events = func(pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
		return events(ctx, client, pod, claims)
	}
	x.Volume = func(namespace, name string) (is bool, doubt string) { return volume(ctx, client, namespace, name) }
	x.AdminAllowed = func(namespace string) (allowed, known bool) { return adminAllowed(ctx, client, namespace) }
}

// events lists the events of a pod and of its claims.
func events(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
	ids := []types.UID{pod.UID}
	for _, c := range claims {
		ids = append(ids, c.UID)
	}
	var out []corev1.Event
	for _, id := range ids {
		list, err := client.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("involvedObject.uid", string(id)).String()})
		if err != nil {
			return out, fmt.Errorf("list events in namespace %s: %w", pod.Namespace, err)
		}
		out = append(out, list.Items...)
	}
	return out, nil
}

// volume reports whether a PersistentVolumeClaim exists, and why it may keep a pod from nodes.
func volume(ctx context.Context, client kubernetes.Interface, namespace, name string) (is bool, doubt string) {
	claim, err := client.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return false, ""
	case err != nil:
		return false, fmt.Sprintf("cannot be read: %v", err)
	case claim.Status.Phase != corev1.ClaimBound:
		return true, "is not bound to a volume: storage may keep the pod waiting"
	}
	v, err := client.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	switch {
	case err != nil:
		return true, fmt.Sprintf("is bound to a volume that cannot be read, and may be of some nodes only: %v", err)
	case v.Spec.NodeAffinity != nil && v.Spec.NodeAffinity.Required != nil:
		return true, "is bound to a volume of some nodes only, which is not looked at"
	}
	return true, ""
}

// adminAllowed reports whether a namespace has the label for admin access, and whether the
// namespace could be read.
func adminAllowed(ctx context.Context, client kubernetes.Interface, name string) (allowed, known bool) {
	n, err := client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return false, apierrors.IsNotFound(err)
	}
	return n.Labels[resourceapi.DRAAdminNamespaceLabelKey] == "true", true
}
