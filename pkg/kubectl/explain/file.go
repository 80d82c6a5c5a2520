// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// strict decodes objects of Kubernetes itself.
var strict = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// Manifest is what a file has that concerns devices.
type Manifest struct {
	Pods      []*corev1.Pod
	Claims    []*resourceapi.ResourceClaim
	Templates []*resourceapi.ResourceClaimTemplate
	Classes   []*resourceapi.DeviceClass
	// owners are the workloads that some of the pods stand for.
	owners map[*corev1.Pod]runtime.Object
	// Ignored are the kinds of objects that explain has nothing to say about.
	Ignored []string
}

// Parse reads YAML or JSON documents. Fields that do not exist are errors: the API server would
// drop them silently, and the pod would wait for something else than was meant.
func Parse(data []byte, namespace string) (*Manifest, error) {
	m := &Manifest{owners: map[*corev1.Pod]runtime.Object{}}
	documents, err := document.Split(data)
	if err != nil {
		return nil, err
	}
	for _, d := range documents {
		if root, err := d.Parse(); root == nil && err == nil {
			continue // it has nothing but comments
		}
		if err := m.decode(d.Text, namespace); err != nil {
			return nil, fmt.Errorf("document in line %d: %w", d.Line, err)
		}
	}
	return m, nil
}

// decode adds the object that a document has, or the objects of a list.
func (m *Manifest) decode(text []byte, namespace string) error {
	object, kind, err := strict.Decode(text, nil, nil)
	switch {
	case runtime.IsNotRegisteredError(err):
		m.Ignored = append(m.Ignored, kindOf(text))
		return nil
	case kind != nil && kind.Group == resourceapi.GroupName && kind.Version != resourceapi.SchemeGroupVersion.Version:
		return fmt.Errorf("it has a %s of %s: write it as %s, which Kubernetes has since 1.34", kind.Kind, kind.GroupVersion(), resourceapi.SchemeGroupVersion)
	case err != nil:
		return fmt.Errorf("decode it: %w", err)
	}
	if list, is := object.(*corev1.List); is {
		for i := range list.Items {
			if err := m.decode(list.Items[i].Raw, namespace); err != nil {
				return fmt.Errorf("item %d of the list: %w", i, err)
			}
		}
		return nil
	}
	if meta.IsListType(object) {
		// Items of such a list need no kind of their own.
		return meta.EachListItem(object, func(o runtime.Object) error {
			m.add(o, strings.TrimSuffix(kind.Kind, "List"), namespace)
			return nil
		})
	}
	m.add(object, kind.Kind, namespace)
	return nil
}

// kindOf returns the kind of an object that is not one of Kubernetes itself.
func kindOf(document []byte) string {
	var t metav1.TypeMeta
	if err := sigsyaml.Unmarshal(document, &t); err != nil {
		return ""
	}
	return t.Kind
}

func (m *Manifest) add(object runtime.Object, kind, namespace string) {
	switch o := object.(type) {
	case *resourceapi.DeviceClass:
		m.Classes = append(m.Classes, o)
	case *resourceapi.ResourceClaim:
		m.Claims = append(m.Claims, in(o, namespace))
	case *resourceapi.ResourceClaimTemplate:
		m.Templates = append(m.Templates, in(o, namespace))
	case *corev1.Pod:
		m.Pods = append(m.Pods, in(o, namespace))
	default:
		owner, template := podTemplate(object)
		if template == nil {
			m.Ignored = append(m.Ignored, kind)
			return
		}
		in(owner, namespace)
		pod := &corev1.Pod{ObjectMeta: *template.ObjectMeta.DeepCopy(), Spec: *template.Spec.DeepCopy()}
		pod.Name, pod.Namespace = owner.Name, owner.Namespace
		if set, is := object.(*appsv1.StatefulSet); is {
			for _, c := range set.Spec.VolumeClaimTemplates {
				// The pod gets a volume that is made for it, which a pod can ask for, too.
				source := corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: c.Spec}}}
				pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: c.Name, VolumeSource: source})
			}
		}
		m.Pods, m.owners[pod] = append(m.Pods, pod), object
	}
}

// podTemplate returns what the pods of a workload are made of, or nil.
func podTemplate(object runtime.Object) (*metav1.ObjectMeta, *corev1.PodTemplateSpec) {
	switch o := object.(type) {
	case *appsv1.Deployment:
		return &o.ObjectMeta, &o.Spec.Template
	case *appsv1.StatefulSet:
		return &o.ObjectMeta, &o.Spec.Template
	case *appsv1.DaemonSet:
		return &o.ObjectMeta, &o.Spec.Template
	case *appsv1.ReplicaSet:
		return &o.ObjectMeta, &o.Spec.Template
	case *batchv1.Job:
		return &o.ObjectMeta, &o.Spec.Template
	case *batchv1.CronJob:
		return &o.ObjectMeta, &o.Spec.JobTemplate.Spec.Template
	}
	return nil, nil
}

// replicasOf returns how many pods a workload has at once. A DaemonSet has one on each node.
func replicasOf(object runtime.Object) int {
	n := new(int32(1))
	switch o := object.(type) {
	case *appsv1.Deployment:
		n = o.Spec.Replicas
	case *appsv1.StatefulSet:
		n = o.Spec.Replicas
	case *appsv1.ReplicaSet:
		n = o.Spec.Replicas
	case *batchv1.Job:
		n = parallel(&o.Spec)
	case *batchv1.CronJob:
		n = parallel(&o.Spec.JobTemplate.Spec)
	}
	return int(ptr.Deref(n, 1))
}

func parallel(j *batchv1.JobSpec) *int32 {
	n := ptr.Deref(j.Parallelism, 1)
	return new(min(n, ptr.Deref(j.Completions, n)))
}

// in sets the namespace where the file leaves it out.
func in[T metav1.Object](o T, namespace string) T {
	if o.GetNamespace() == "" {
		o.SetNamespace(namespace)
	}
	return o
}

// Over returns a Snapshot as it would be after the file was applied: its classes, claims and
// templates take the place of those of the same name. Claims that are in the cluster keep what
// they have.
func (m *Manifest) Over(s *fleet.Snapshot) *fleet.Snapshot {
	out := *s
	out.Classes = replaced(s.Classes, m.Classes)
	out.Templates = replaced(s.Templates, m.Templates)
	out.Claims = replaced(m.Claims, s.Claims)
	return &out
}

// replaced returns added objects, and the old ones of other names.
func replaced[T metav1.Object](old, added []T) []T {
	return append(slices.DeleteFunc(slices.Clone(old), func(o T) bool {
		return slices.ContainsFunc(added, func(a T) bool { return a.GetName() == o.GetName() && a.GetNamespace() == o.GetNamespace() })
	}), added...)
}

// Manifest explains what a file has: its pods and, if it has none, its claims and templates. The
// Explainer is of a Snapshot that the file was put over.
func (x *Explainer) Manifest(ctx context.Context, m *Manifest) []*Explanation {
	var out []*Explanation
	for _, p := range m.Pods {
		out = append(out, x.tryToCreate(x.pods(ctx, p, replicasOf(m.owners[p])), m.objectsOf(x, p)...))
	}
	if len(out) > 0 {
		return out
	}
	for _, c := range m.Claims {
		// One that is in the cluster keeps what it has.
		out = append(out, x.tryToCreate(x.Claim(ctx, x.model.Claim(c.Namespace, c.Name)), c))
	}
	for _, t := range m.Templates {
		e := x.Claim(ctx, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: t.Name}, Spec: t.Spec.Spec})
		e.Subject.Kind = "ResourceClaimTemplate"
		out = append(out, x.tryToCreate(e, t))
	}
	return out
}
