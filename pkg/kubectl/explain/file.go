// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"math"
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
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// strict decodes objects of Kubernetes itself.
var strict = serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()

// Manifest is what a file has that concerns devices.
type Manifest struct {
	Pods      []*corev1.Pod
	Claims    []*resourceapi.ResourceClaim
	Templates []*resourceapi.ResourceClaimTemplate
	Classes   []*resourceapi.DeviceClass
	// workloads are those that some of the pods stand for.
	workloads map[*corev1.Pod]*workload
	// Ignored are the kinds of objects that explain has nothing to say about, and others are these objects, as kind/namespace/name.
	Ignored []string
	others  []string
}

// workload is what makes pods.
type workload struct {
	object interface {
		metav1.Object
		runtime.Object
	}
	template *corev1.PodTemplateSpec
	// replicas is how many pods it has at once, and endsFirst how many old ones an update ends before it starts a new one.
	replicas, endsFirst int
	// everywhere says that it has one on each node.
	everywhere bool
	// same says that the file leaves the pod template as the cluster has it, and compared that this is known.
	same, compared bool
	// old are its pods in the cluster, those that run last. An update ends all but stay of them before it starts a new one: those that have a
	// node are ended, and wanted is how many it would have to end first for that to be any.
	old          []*corev1.Pod
	ended        []string
	stay, wanted int
}

// Parse reads YAML or JSON documents. Fields that do not exist are errors: the API server would
// drop them silently, and the pod would wait for something else than was meant.
func Parse(data []byte, namespace string) (*Manifest, error) {
	m := &Manifest{workloads: map[*corev1.Pod]*workload{}}
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
		var other metav1.TypeMeta
		_ = sigsyaml.Unmarshal(text, &other) // the decoder has read its kind, too
		m.Ignored = append(m.Ignored, other.Kind)
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
		w := workloadOf(object)
		if w == nil {
			m.Ignored = append(m.Ignored, kind)
			if o, is := object.(metav1.Object); is {
				m.others = append(m.others, kind+"/"+in(o, namespace).GetNamespace()+"/"+o.GetName())
			}
			return
		}
		pod := &corev1.Pod{ObjectMeta: *w.template.ObjectMeta.DeepCopy(), Spec: *w.template.Spec.DeepCopy()}
		pod.Name, pod.Namespace = w.object.GetName(), in(w.object, namespace).GetNamespace()
		pod.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: pod.Name, Controller: new(true)}}
		if set, is := object.(*appsv1.StatefulSet); is {
			for _, c := range set.Spec.VolumeClaimTemplates {
				// The pod gets a volume that is made for it, which a pod can ask for, too.
				source := &corev1.EphemeralVolumeSource{VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{Spec: c.Spec}}
				pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: c.Name, VolumeSource: corev1.VolumeSource{Ephemeral: source}})
			}
		}
		m.Pods, m.workloads[pod] = append(m.Pods, pod), w
	}
}

// workloadOf returns what an object is if it makes pods, or nil.
func workloadOf(object runtime.Object) *workload {
	switch o := object.(type) {
	case *appsv1.Deployment:
		w := &workload{object: o, template: &o.Spec.Template, replicas: int(ptr.Deref(o.Spec.Replicas, 1))}
		w.endsFirst = unavailable(&o.Spec.Strategy, w.replicas)
		return w
	case *appsv1.StatefulSet:
		return &workload{object: o, template: &o.Spec.Template, replicas: int(ptr.Deref(o.Spec.Replicas, 1)), endsFirst: 1}
	case *appsv1.DaemonSet:
		w := &workload{object: o, template: &o.Spec.Template, replicas: 1, everywhere: true}
		if scaled(ptr.Deref(o.Spec.UpdateStrategy.RollingUpdate, appsv1.RollingUpdateDaemonSet{}).MaxSurge, "0", 1, true) == 0 {
			w.endsFirst = math.MaxInt32
		}
		return w
	case *appsv1.ReplicaSet:
		return &workload{object: o, template: &o.Spec.Template, replicas: int(ptr.Deref(o.Spec.Replicas, 1))}
	case *batchv1.Job:
		return &workload{object: o, template: &o.Spec.Template, replicas: parallel(&o.Spec)}
	case *batchv1.CronJob:
		return &workload{object: o, template: &o.Spec.JobTemplate.Spec.Template, replicas: parallel(&o.Spec.JobTemplate.Spec)}
	}
	return nil
}

// unavailable returns how many of its old pods a Deployment ends first.
func unavailable(s *appsv1.DeploymentStrategy, replicas int) int {
	if s.Type == appsv1.RecreateDeploymentStrategyType {
		return math.MaxInt32
	}
	update := ptr.Deref(s.RollingUpdate, appsv1.RollingUpdateDeployment{})
	n := scaled(update.MaxUnavailable, "25%", replicas, false)
	if n == 0 && scaled(update.MaxSurge, "25%", replicas, true) == 0 {
		return 1 // the controller takes it so
	}
	return n
}

func scaled(v *intstr.IntOrString, by string, of int, up bool) int {
	n, _ := intstr.GetScaledValueFromIntOrPercent(intstr.ValueOrDefault(v, intstr.Parse(by)), of, up)
	return n
}

func parallel(j *batchv1.JobSpec) int {
	n := ptr.Deref(j.Parallelism, 1)
	return int(min(n, ptr.Deref(j.Completions, n)))
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
// they have, but pods that its workloads end before they start new ones are gone, with the claims that were made for them.
func (m *Manifest) Over(s *fleet.Snapshot) *fleet.Snapshot {
	out := *s
	out.Classes = over(s.Classes, m.Classes)
	out.Templates = over(s.Templates, m.Templates)
	out.Claims = over(m.Claims, s.Claims)
	out.Pods = slices.Clone(s.Pods)
	for pod, w := range m.workloads {
		for _, old := range w.over(pod, s.Pods) {
			out.Pods = slices.DeleteFunc(out.Pods, func(p *corev1.Pod) bool { return p == old })
			out.Claims = slices.DeleteFunc(out.Claims, func(c *resourceapi.ResourceClaim) bool { return metav1.IsControlledBy(c, old) })
		}
	}
	return &out
}

// over finds the pods that a workload has, and returns those that an update ends before it starts new ones. As many stay as it is not to
// lack, and what does not run is the first to end. Where the pod template stays the same, nothing ends.
func (w *workload) over(pod *corev1.Pod, pods []*corev1.Pod) []*corev1.Pod {
	w.find(pod, pods)
	w.ended, w.wanted = nil, w.replicas+1
	ends := min(max(w.endsFirst-w.replicas+len(w.old), 0), len(w.old))
	if w.same {
		ends = 0
	}
	w.stay = len(w.old) - ends
	for i, p := range w.old {
		if use(p) == 0 {
			continue
		}
		if w.wanted--; i < ends {
			w.ended = append(w.ended, p.Name)
		}
	}
	return w.old[:ends]
}

// find finds the pods that a workload has.
func (w *workload) find(pod *corev1.Pod, pods []*corev1.Pod) {
	w.old = nil
	kind, name := fleet.OwnerOf(pod)
	for _, p := range pods {
		if p.Namespace == pod.Namespace && !fleet.Ended(p) && is(p, kind, name) {
			w.old = append(w.old, p)
		}
	}
	slices.SortStableFunc(w.old, func(a, b *corev1.Pod) int { return cmp.Compare(use(a), use(b)) })
}

// use is how much a controller would lose with a pod.
func use(p *corev1.Pod) int {
	switch {
	case fleet.Ready(p):
		return 2
	case scheduled(p):
		return 1
	}
	return 0
}

// over returns added objects, and the old ones of other names.
func over[T metav1.Object](old, added []T) []T {
	return append(slices.DeleteFunc(slices.Clone(old), func(o T) bool {
		return slices.ContainsFunc(added, func(a T) bool { return a.GetName() == o.GetName() && a.GetNamespace() == o.GetNamespace() })
	}), added...)
}

// Manifest explains what a file has: its pods and, if it has none, its claims and templates. The
// Explainer is of a Snapshot that the file was put over.
func (x *Explainer) Manifest(ctx context.Context, m *Manifest) []*Explanation {
	var out []*Explanation
	if exists := x.Exists; exists != nil {
		x.Exists = func(kind, namespace, name string) (bool, error) {
			if slices.Contains(m.others, kind+"/"+namespace+"/"+name) {
				return true, nil
			}
			return exists(kind, namespace, name)
		}
	}
	if len(m.Pods) > 1 {
		x.file = &queue{planner: x.planner}
	}
	for _, p := range m.Pods {
		w := cmp.Or(m.workloads[p], &workload{replicas: 1})
		pod := w.explained(p)
		if there := fleet.Named(x.model.Pods, p.Namespace, p.Name); there != nil && w.object == nil {
			// It keeps what it has: what counts of a pod cannot be changed.
			pod, p.Status.ResourceClaimStatuses = there, there.Status.ResourceClaimStatuses
		}
		e := x.pods(ctx, pod, w)
		w.noteOld(e, p)
		if n := len(w.ended); n > 0 {
			names := printer.Some(w.ended, mostLines)
			e.note("In an update, %s %s before a new pod starts: what it has counts as free.", names, plural(n, "ends", "end"))
		}
		out = append(out, x.tryToCreate(e, len(w.ended) > 0, m.objectsOf(x, p)...))
	}
	if len(out) > 0 {
		return out
	}
	for _, c := range m.Claims {
		// One that is in the cluster keeps what it has.
		out = append(out, x.tryToCreate(x.Claim(ctx, x.model.Claim(c.Namespace, c.Name)), false, c))
	}
	for _, t := range m.Templates {
		e := x.Claim(ctx, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: t.Namespace, Name: t.Name}, Spec: t.Spec.Spec})
		e.Subject.Kind = "ResourceClaimTemplate"
		out = append(out, x.tryToCreate(e, false, t))
	}
	return out
}
