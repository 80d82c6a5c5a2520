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
// events of a pod that is stuck, and the label of a namespace for admin access.
func (x *Explainer) ReadFrom(ctx context.Context, client kubernetes.Interface) {
	x.Events = func(pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
		return events(ctx, client, pod, claims)
	}
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

// adminAllowed reports whether a namespace has the label for admin access, and whether the
// namespace could be read.
func adminAllowed(ctx context.Context, client kubernetes.Interface, name string) (allowed, known bool) {
	n, err := client.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return false, apierrors.IsNotFound(err)
	}
	return n.Labels[resourceapi.DRAAdminNamespaceLabelKey] == "true", true
}
