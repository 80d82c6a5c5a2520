// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
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
		return events(ctx, client, pod, claims)
	}
	x.Failed = func(namespace string) ([]corev1.Event, error) {
		list, err := client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=FailedCreate"})
		if err != nil {
			return nil, err
		}
		return list.Items, nil
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
	x.Volume = func(namespace, name string) (is bool, doubt string) { return volume(ctx, client, namespace, name) }
	x.Exists = func(kind, namespace, name string) (bool, error) {
		// Nobody needs to see what is in a Secret.
		err := client.CoreV1().RESTClient().Get().Namespace(namespace).Resource(strings.ToLower(kind)+"s").Name(name).
			SetHeader("Accept", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1").Do(ctx).Error()
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
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

// tryToCreate adds to an explanation what the API server would refuse of objects, and what it could not be asked. A quota may count others that
// end before.
func (x *Explainer) tryToCreate(e *Explanation, othersEnd bool, objects ...runtime.Object) *Explanation {
	for _, o := range objects {
		if x.Refused == nil {
			break
		}
		u, err := unstructuredOf(o)
		if err != nil {
			e.doubt("%v", err)
			continue
		}
		refused, doubt := x.Refused(u)
		if doubt != "" {
			e.doubt("%s", doubt)
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

// objectsOf returns what would be written for a pod to be there, the pod and the claims that controllers would make among it.
func (m *Manifest) objectsOf(x *Explainer, pod *corev1.Pod) []runtime.Object {
	var out []runtime.Object
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
		if c.New {
			claim := c.Claim.DeepCopy()
			claim.Name, claim.GenerateName = "", claim.Name+"-"
			out = append(out, claim)
		}
	}
	if owner := m.owners[pod]; owner != nil {
		pod = pod.DeepCopy()
		pod.Name, pod.GenerateName, pod.OwnerReferences = "", pod.Name+"-", nil
		out = append(out, owner)
	}
	return append(out, pod)
}

func unstructuredOf(o runtime.Object) (*unstructured.Unstructured, error) {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		return nil, fmt.Errorf("find out the kind of a %T: %w", o, err)
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return nil, fmt.Errorf("encode a %s: %w", kinds[0].Kind, err)
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(kinds[0])
	unstructured.RemoveNestedField(u.Object, "status")
	return u, nil
}

// dryRun asks the API server whether it would accept an object. What it would refuse is a sentence, and so is why it cannot be asked.
func dryRun(ctx context.Context, client kubernetes.Interface, writer dynamic.Interface, o *unstructured.Unstructured) (refused, doubt string) {
	resource, _ := meta.UnsafeGuessKindToResource(o.GroupVersionKind())
	what := strings.TrimSpace(o.GetKind() + " " + o.GetName())
	if o.GetName() == "" {
		what = "the " + o.GetKind() + " that a controller would make"
	}
	if why := mayNot(ctx, client, "create", resource, o.GetNamespace()); why != "" {
		return "", fmt.Sprintf("whether the API server would accept %s: %s", what, why)
	}
	var into dynamic.ResourceInterface = writer.Resource(resource)
	if o.GetNamespace() != "" {
		into = writer.Resource(resource).Namespace(o.GetNamespace())
	}
	_, err := into.Create(ctx, o, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if apierrors.IsAlreadyExists(err) {
		if why := mayNot(ctx, client, "patch", resource, o.GetNamespace()); why != "" {
			return "", fmt.Sprintf("%s exists already, and whether the API server would accept this change: %s", what, why)
		}
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

// refuses reports whether an error says that an object is not accepted, rather than that the API server could not tell.
func refuses(err error) bool {
	status := apierrors.APIStatus(nil)
	if !errors.As(err, &status) || strings.Contains(err.Error(), "does not support dry run") {
		return false
	}
	switch code := status.Status().Code; code {
	case http.StatusUnauthorized, http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusMethodNotAllowed:
		return false
	default:
		return code >= http.StatusBadRequest && code < http.StatusInternalServerError
	}
}

// mayNot says why the user may not write objects, or "".
func mayNot(ctx context.Context, client kubernetes.Interface, verb string, r schema.GroupVersionResource, namespace string) string {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &authorizationv1.ResourceAttributes{
		Namespace: namespace, Verb: verb, Group: r.Group, Version: r.Version, Resource: r.Resource,
	}}}
	answer, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	switch {
	case err != nil:
		return fmt.Sprintf("ask whether you may %s %s: %v", verb, r.Resource, err)
	case answer.Status.Allowed:
		return ""
	case namespace != "":
		return fmt.Sprintf("you may not %s %s in namespace %s", verb, r.Resource, namespace)
	}
	return fmt.Sprintf("you may not %s %s", verb, r.Resource)
}
