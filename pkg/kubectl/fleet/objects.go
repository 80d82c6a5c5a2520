// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
)

// What the chart says of the driver. Anybody can give a pod any label, so that these count in the driver's namespace only, which an object
// says that no tenant can write.
const (
	// NamespaceAnnotation of the class MainClass is the namespace of the driver.
	NamespaceAnnotation = "partage.dev/driver-namespace"
	MainClass           = "gpu.nvidia.com"
	// ComponentLabel of a pod, or DaemonSet, of the driver is what it is.
	ComponentLabel      = "app.kubernetes.io/component"
	PluginComponent     = "gpu-kubelet-plugin"
	SupervisorComponent = "mps-supervisor"
)

// DriverNamespace asks in which namespace the driver is.
func DriverNamespace(ctx context.Context, client kubernetes.Interface) (string, error) {
	class, err := client.ResourceV1().DeviceClasses().Get(ctx, MainClass, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("find out in which namespace the driver is: read DeviceClass %s: %w", MainClass, err)
	}
	namespace := class.Annotations[NamespaceAnnotation]
	if namespace == "" {
		return "", fmt.Errorf("find out in which namespace the driver is: DeviceClass %s has no annotation %s, which is the chart's", MainClass, NamespaceAnnotation)
	}
	return namespace, nil
}

// MountsHost reports whether a pod mounts folders of its node, as drivers do and tenants may not. Names and labels of other pods say nothing.
func MountsHost(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.HostPath != nil })
}

// Condition returns one of a pod, or an empty one.
func Condition(p *corev1.Pod, kind corev1.PodConditionType) corev1.PodCondition {
	at := slices.IndexFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
	if at < 0 {
		return corev1.PodCondition{}
	}
	return p.Status.Conditions[at]
}

// Ready reports whether a pod is.
func Ready(p *corev1.Pod) bool { return Condition(p, corev1.PodReady).Status == corev1.ConditionTrue }

// Ended reports whether a pod needs its devices no more.
func Ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// noticed is how long what has ended a container may be told after the container runs again.
const noticed = 30 * time.Second

// RunsSince reports whether a container of a pod runs that had started before. Where some name a claim, the others do not count.
func RunsSince(p *corev1.Pod, before time.Time) bool {
	var asking []string
	for _, c := range p.Spec.Containers {
		if len(c.Resources.Claims) > 0 {
			asking = append(asking, c.Name)
		}
	}
	return slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool {
		limit := before
		if s.RestartCount > 0 {
			limit = before.Add(-noticed)
		}
		return (len(asking) == 0 || slices.Contains(asking, s.Name)) && s.State.Running != nil && s.State.Running.StartedAt.Time.Before(limit)
	})
}

// IsDriverPod reports whether a pod is one of a component of the driver, which is in this namespace.
func IsDriverPod(p *corev1.Pod, namespace, component string) bool {
	owner := metav1.GetControllerOf(p)
	return p.Namespace == namespace && p.Labels[ComponentLabel] == component && owner != nil && owner.Kind == "DaemonSet"
}

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
	return cmp.Or(seen, e.EventTime.Time, e.CreationTimestamp.Time)
}

// Ask is a request of a claim, or one alternative of a request. It points into the claim.
type Ask struct {
	// Position identifies it in any copy of the claim: the request, and the alternative or -1.
	Position [2]int
	// Name is that of the request or REQUEST/ALTERNATIVE, as in the results of an allocation.
	Name        string
	Class       *string
	Mode        *resourceapi.DeviceAllocationMode
	Count       *int64
	Admin       bool
	Selectors   *[]resourceapi.DeviceSelector
	Tolerations *[]resourceapi.DeviceToleration
	Capacity    **resourceapi.CapacityRequirements
	// Object is the DeviceRequest or DeviceSubRequest.
	Object any
}

// AsksOf returns all that a claim asks for.
func AsksOf(spec *resourceapi.DeviceClaim) []Ask {
	var out []Ask
	for i := range spec.Requests {
		r := &spec.Requests[i]
		if e := r.Exactly; e != nil {
			out = append(out, Ask{
				[2]int{i, -1}, r.Name, &e.DeviceClassName, &e.AllocationMode, &e.Count, ptr.Deref(e.AdminAccess, false),
				&e.Selectors, &e.Tolerations, &e.Capacity, r,
			})
		}
		for j := range r.FirstAvailable {
			s := &r.FirstAvailable[j]
			out = append(out, Ask{
				[2]int{i, j}, r.Name + "/" + s.Name, &s.DeviceClassName, &s.AllocationMode, &s.Count, false,
				&s.Selectors, &s.Tolerations, &s.Capacity, s,
			})
		}
	}
	return out
}

// Ask returns what asked for a holding in its claim or a copy of it, or nil.
func (h *Holding) Ask(c *resourceapi.ResourceClaim) *Ask {
	for _, a := range AsksOf(&c.Spec.Devices) {
		if a.Name == h.Result.Request {
			return &a
		}
	}
	return nil
}

// Compared returns the attribute by which a constraint compares devices, or "".
func Compared(c *resourceapi.DeviceConstraint) string {
	return string(cmp.Or(ptr.Deref(c.MatchAttribute, ""), ptr.Deref(c.DistinctAttribute, "")))
}

// Unqualified returns a name without its domain.
func Unqualified(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// Results returns the devices of a driver that a claim has, or with "" of all drivers.
func Results(c *resourceapi.ResourceClaim, driver string) (all []*resourceapi.DeviceRequestAllocationResult) {
	if c.Status.Allocation == nil {
		return nil
	}
	for i := range c.Status.Allocation.Devices.Results {
		if r := &c.Status.Allocation.Devices.Results[i]; driver == "" || r.Driver == driver {
			all = append(all, r)
		}
	}
	return all
}

// IsMPS reports whether a device of the driver is an MPS share, by its name.
func IsMPS(r *resourceapi.DeviceRequestAllocationResult) bool {
	return strings.Contains(r.Device, TypeMPS)
}

// AllocatedAt returns since when a claim has its devices.
func AllocatedAt(c *resourceapi.ResourceClaim) metav1.Time {
	return ptr.Deref(c.Status.Allocation.AllocationTimestamp, c.CreationTimestamp)
}

// NoClaims says that none has a device, of those that were looked at: all that can be read, or those of a namespace.
func NoClaims(everywhere bool) string {
	if everywhere {
		return "No claim that was looked at has a device of the driver."
	}
	return "No claim that was looked at has a device of the driver; -A looks at all namespaces."
}

// Live returns what the driver says of the device while it is prepared, or nil where it says
// nothing, or says it in words of a version that is not known.
func (h *Holding) Live() *api.DeviceStatus {
	if h.Status == nil || h.Status.Data == nil {
		return nil
	}
	var s api.DeviceStatus
	if err := json.Unmarshal(h.Status.Data.Raw, &s); err != nil || s.APIVersion != api.StatusVersion {
		return nil
	}
	return &s
}

// NotReady returns the condition with which the driver says that containers cannot use the
// device, or nil.
func (h *Holding) NotReady() *metav1.Condition {
	conditions := ptr.Deref(h.Status, resourceapi.AllocatedDeviceStatus{}).Conditions
	if c := meta.FindStatusCondition(conditions, "Ready"); c != nil && c.Status != metav1.ConditionTrue {
		return c
	}
	return nil
}
