// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// Compare finds out by a dry run which workloads of the file have pods in the cluster whose template it does not change: they stay. What
// cannot be found out may be an update.
func (m *Manifest) Compare(ctx context.Context, writer dynamic.Interface, pods []*corev1.Pod) {
	for pod, w := range m.workloads {
		if w.find(pod, pods); len(w.old) > 0 {
			w.same, w.compared = keepsTemplate(ctx, writer, unstructuredOf(w.object))
		}
	}
}

// keepsTemplate reports whether an object that takes the place of one in the cluster has the same pod template, as the API server completes it.
func keepsTemplate(ctx context.Context, writer dynamic.Interface, o *unstructured.Unstructured) (keeps, known bool) {
	resource, _ := meta.UnsafeGuessKindToResource(o.GroupVersionKind())
	into := writer.Resource(resource).Namespace(o.GetNamespace())
	is, err := into.Get(ctx, o.GetName(), metav1.GetOptions{})
	if err != nil {
		return false, false
	}
	would, err := into.Update(ctx, o, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return false, false
	}
	before, after := templateIn(is), templateIn(would)
	return before != nil && after != nil && apiequality.Semantic.DeepEqual(before, after), true
}

// restartedAt is what kubectl rollout restart sets, and what applying a file that does not have it leaves alone.
const restartedAt = "kubectl.kubernetes.io/restartedAt"

// templateIn returns the pod template of a workload, or nil.
func templateIn(u *unstructured.Unstructured) *corev1.PodTemplateSpec {
	content, found, err := unstructured.NestedMap(u.Object, "spec", "template")
	t := &corev1.PodTemplateSpec{}
	if err != nil || !found || runtime.DefaultUnstructuredConverter.FromUnstructured(content, t) != nil {
		return nil
	}
	delete(t.Annotations, restartedAt)
	return t
}

// wants returns how many pods a workload is to have. What has one on each node, or works on what is left, gets none because a file is
// applied again.
func (w *workload) wants() int {
	if _, isJob := w.object.(*batchv1.Job); w.same && (isJob || w.everywhere) {
		return len(w.old)
	}
	return w.replicas
}

// added returns how many pods a file adds that need a node: all, unless those in the cluster stay.
func (w *workload) added() int {
	n := w.wants()
	for _, p := range w.old {
		if w.same && scheduled(p) {
			n--
		}
	}
	return max(n, 0)
}

// explained returns the pod that stands for a workload: the one of the file or, where nothing new is made, one that stays, preferably one that
// waits.
func (w *workload) explained(pod *corev1.Pod) *corev1.Pod {
	if surplus := len(w.old) - w.wants(); w.same && len(w.old) > 0 && surplus >= 0 {
		return w.old[min(surplus, len(w.old)-1)]
	}
	return pod
}

// noteOld says what becomes of the pods that a workload has.
func (w *workload) noteOld(e *Explanation, pod *corev1.Pod) {
	kind, name := fleet.OwnerOf(pod)
	switch n, wants := len(w.old), w.wants(); {
	case n == 0:
	case w.same && wants < n:
		e.note("The file keeps the pod template of %s %s: %d of its %d pods %s.", kind, name, wants, n, plural(wants, "stays", "stay"))
	case w.same && wants == n:
		e.note("The file changes nothing for the %d %s of %s %s.", n, plural(n, "pod", "pods"), kind, name)
	case w.same:
		e.note("The file keeps the pod template of %s %s: its %d %s, and %d %s added.", kind, name, n, plural(n, "pod stays", "pods stay"),
			wants-n, plural(wants-n, "is", "are"))
	case !w.compared:
		e.note("%s %s has pods already, which stay as they are as long as its pod template stays the same.", kind, name)
	}
}
