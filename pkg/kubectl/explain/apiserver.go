// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// ReadFrom has the Explainer ask the API server for what no Snapshot has, when it is needed: the
// events of a pod, its volumes, and the label of a namespace for admin access.
func (x *Explainer) ReadFrom(ctx context.Context, client kubernetes.Interface) {
	x.Events = func(pod *corev1.Pod, claims []*resourceapi.ResourceClaim) ([]corev1.Event, error) {
		ids := []types.UID{pod.UID}
		for _, c := range claims {
			ids = append(ids, c.UID)
		}
		var out []corev1.Event
		for _, id := range ids {
			list, err := client.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(id)})
			if err != nil {
				return out, fmt.Errorf("list events in namespace %s: %w", pod.Namespace, err)
			}
			out = append(out, list.Items...)
		}
		return out, nil
	}
	x.NodeEvents = func(node string) ([]corev1.Event, error) {
		// Who may write there is no tenant.
		list, err := client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + node + ",reportingComponent=" + x.model.Driver,
		})
		return ptr.Deref(list, corev1.EventList{}).Items, err
	}
	x.Failed = func(namespace string) ([]corev1.Event, error) {
		list, err := client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=FailedCreate"})
		return ptr.Deref(list, corev1.EventList{}).Items, err
	}
	x.Owner = func(o corev1.ObjectReference) (runtime.Object, error) {
		switch o.Kind {
		case "ReplicaSet":
			return client.AppsV1().ReplicaSets(o.Namespace).Get(ctx, o.Name, metav1.GetOptions{})
		case "StatefulSet":
			return client.AppsV1().StatefulSets(o.Namespace).Get(ctx, o.Name, metav1.GetOptions{})
		case "DaemonSet":
			return client.AppsV1().DaemonSets(o.Namespace).Get(ctx, o.Name, metav1.GetOptions{})
		}
		return client.BatchV1().Jobs(o.Namespace).Get(ctx, o.Name, metav1.GetOptions{})
	}
	x.Volume = func(namespace, name string) (is bool, unseen string) { return volume(ctx, client, namespace, name) }
	x.Quotas = func(namespace string) (names []string, err error) {
		list, err := client.CoreV1().ResourceQuotas(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, err
		}
		for i := range list.Items {
			names = append(names, list.Items[i].Name)
		}
		return names, nil
	}
	x.Exists = func(kind, namespace, name string) (bool, error) {
		// Nobody needs to see what is in a Secret.
		err := client.CoreV1().RESTClient().Get().Namespace(namespace).Resource(strings.ToLower(kind)+"s").Name(name).
			SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").Do(ctx).Error()
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	}
	x.AdminAllowed = func(namespace string) (allowed, known bool) {
		n, err := client.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{})
		if err != nil {
			return false, apierrors.IsNotFound(err)
		}
		return n.Labels[resourceapi.DRAAdminNamespaceLabelKey] == "true", true
	}
}

// volume reports whether a PersistentVolumeClaim exists, and why it may keep a pod from nodes.
func volume(ctx context.Context, client kubernetes.Interface, namespace, name string) (is bool, unseen string) {
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

// tryToCreate adds to an explanation what the API server would refuse of objects, and what it could not be asked. A quota may count others that
// end before.
func (x *Explainer) tryToCreate(e *Explanation, othersEnd bool, objects ...runtime.Object) *Explanation {
	for _, o := range objects {
		if x.Refused == nil {
			break
		}
		u := unstructuredOf(o)
		refused, unseen := x.Refused(u)
		if unseen != "" {
			e.addUnseen("%s", unseen)
		}
		switch {
		case refused == "":
		case othersEnd && strings.Contains(refused, exceeded):
			e.note("%s. That counts old pods, too.", refused)
		case u.GetKind() == "ResourceClaim" && u.GetGenerateName() != "":
			// A pod does not need its claim to be created.
			e.notCreated(ClaimNotCreated, refused)
		default:
			e.because(Reason{Cause: Refused}, "%s", refused)
		}
	}
	return e.settle()
}

// objectsOf returns what would be written for a pod to be there, the pod and the claims that controllers would make among it. Of a workload
// that gets no further pod that is the workload itself.
func (m *Manifest) objectsOf(x *Explainer, pod *corev1.Pod) []runtime.Object {
	var out []runtime.Object
	w := m.workloads[pod]
	isNew := w == nil || w.added() > 0
	for _, class := range m.Classes {
		out = append(out, class)
	}
	for i, c := range allocation.ClaimsOf(x.model.Snapshot, pod) {
		if claim := fleet.Named(m.Claims, pod.Namespace, ptr.Deref(pod.Spec.ResourceClaims[i].ResourceClaimName, "")); claim != nil {
			out = append(out, claim)
		}
		if template := fleet.Named(m.Templates, pod.Namespace, c.Template); template != nil {
			out = append(out, template)
		}
		if c.New && isNew {
			claim := c.Claim.DeepCopy()
			claim.Name, claim.GenerateName = "", claim.Name+"-"
			out = append(out, claim)
		}
	}
	if w != nil {
		pod = pod.DeepCopy()
		pod.Name, pod.GenerateName, pod.OwnerReferences = "", pod.Name+"-", nil
		out = append(out, w.object)
	}
	if isNew {
		out = append(out, pod)
	}
	return out
}

// unstructuredOf encodes an object that was decoded, so that it does not fail.
func unstructuredOf(o runtime.Object) *unstructured.Unstructured {
	kinds, _, _ := scheme.Scheme.ObjectKinds(o)
	content, _ := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(kinds[0])
	unstructured.RemoveNestedField(u.Object, "status")
	return u
}

// dryRun asks the API server whether it would accept an object. What it would refuse is a sentence, and so is why it cannot be asked.
func dryRun(ctx context.Context, writer dynamic.Interface, o *unstructured.Unstructured) (refused, unseen string) {
	resource, _ := meta.UnsafeGuessKindToResource(o.GroupVersionKind())
	what := strings.TrimSpace(o.GetKind() + " " + o.GetName())
	if o.GetName() == "" {
		what = "the " + o.GetKind() + " that a controller would make"
	}
	into := writer.Resource(resource).Namespace(o.GetNamespace())
	_, err := into.Create(ctx, o, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if apierrors.IsAlreadyExists(err) {
		_, err = into.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{DryRun: []string{metav1.DryRunAll}, Force: true, FieldManager: "kubectl-gpu"})
	}
	switch {
	case err == nil:
		return "", ""
	case refuses(err):
		return fmt.Sprintf("the API server refuses %s: %v", what, err), ""
	}
	return "", fmt.Sprintf("whether the API server would accept %s: %v", what, err)
}

// unasked are parts of errors that say nothing of an object: that of an authorizer, by which the user may not write there at all, and that of a
// webhook.
var unasked = regexp.MustCompile(`is forbidden: User "|does not support dry run`)

// refuses reports whether an error says that an object is not accepted, rather than that the API server could not tell.
func refuses(err error) bool {
	status := apierrors.APIStatus(nil)
	if !errors.As(err, &status) || unasked.MatchString(err.Error()) {
		return false
	}
	switch code := status.Status().Code; code {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusMethodNotAllowed:
		return false
	default:
		return code >= http.StatusBadRequest && code < http.StatusInternalServerError
	}
}
