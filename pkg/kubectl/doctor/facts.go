// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// Labels and names of the chart's objects.
const (
	componentLabel = fleet.ComponentLabel
	pluginLabel    = fleet.PluginComponent
	supervisor     = fleet.SupervisorComponent
	policyVolume   = "policy"
	policyKey      = "policy.yaml"
)

// Facts are what the checks look at.
type Facts struct {
	*fleet.Model
	// Now is when they were read.
	Now time.Time
	// Version is that of the API server, such as v1.37.1.
	Version    string
	DaemonSets []*appsv1.DaemonSet
	Policies   []Policy
	// Events are warnings of all components, and what the driver reported as normal.
	Events []*corev1.Event

	// namespace is the driver's, or "" where that is not known: what names and labels of objects elsewhere say is for anybody to write.
	namespace     string
	investigation *investigation
}

// Policy is a ConfigMap that a DaemonSet of the driver mounts as its policy. Config is nil where it does not exist.
type Policy struct {
	At     Ref
	Config *corev1.ConfigMap
}

// Read reads everything that the checks look at. Where the objects of all namespaces may not
// be listed, it takes those of the given one. What cannot be read is among Missing.
func Read(ctx context.Context, client kubernetes.Interface, driver, namespace string, now time.Time) (*Facts, error) {
	snapshot, err := fleet.Read(ctx, client, namespace)
	if err != nil {
		return nil, err
	}
	f := &Facts{Model: fleet.New(snapshot, driver), Now: now}
	if f.namespace, err = f.driverNamespace(namespace); err != nil {
		f.lacks(driverPlace, "", err)
	}
	version, err := client.Discovery().ServerVersion()
	switch {
	case fleet.Unreadable(err):
		f.lacks(apiVersion, "", err)
	case err != nil:
		return nil, fmt.Errorf("ask for the version of the API server: %w", err)
	default:
		f.Version = version.GitVersion
	}
	if err := fleet.List(ctx, snapshot, &f.DaemonSets, daemonSets, namespace, func(n string) fleet.Lister[*appsv1.DaemonSetList] {
		return client.AppsV1().DaemonSets(n).List
	}); err != nil {
		return nil, err
	}
	// That something is over is a normal event.
	for _, selector := range []string{"type=" + corev1.EventTypeWarning, "type=" + corev1.EventTypeNormal + ",reportingComponent=" + driver} {
		var some []*corev1.Event
		if err := fleet.List(ctx, snapshot, &some, events, namespace, func(n string) fleet.Lister[*corev1.EventList] {
			return func(ctx context.Context, o metav1.ListOptions) (*corev1.EventList, error) {
				o.FieldSelector = selector
				return client.CoreV1().Events(n).List(ctx, o)
			}
		}); err != nil {
			return nil, err
		}
		f.Events = append(f.Events, some...)
	}
	return f, f.readPolicies(ctx, client)
}

// readPolicies reads the ConfigMaps with the driver's policy.
func (f *Facts) readPolicies(ctx context.Context, client kubernetes.Interface) error {
	for _, set := range f.driverSets() {
		for _, v := range set.Spec.Template.Spec.Volumes {
			if v.Name != policyVolume || v.ConfigMap == nil {
				continue
			}
			name := v.ConfigMap.Name
			config, err := client.CoreV1().ConfigMaps(set.Namespace).Get(ctx, name, metav1.GetOptions{})
			switch {
			case apierrors.IsForbidden(err):
				f.lacks(configMaps, set.Namespace, err)
				continue
			case apierrors.IsNotFound(err):
				config = nil
			case err != nil:
				return fmt.Errorf("get ConfigMap %s/%s: %w", set.Namespace, name, err)
			}
			f.Policies = append(f.Policies, Policy{Ref{Kind: "configmap", Namespace: set.Namespace, Name: name}, config})
		}
	}
	return nil
}

func (f *Facts) lacks(resource, namespace string, err error) {
	if !f.Lacks(resource, namespace) {
		f.Missing = append(f.Missing, fleet.Missing{Resource: resource, Namespace: namespace, Err: err})
	}
}

// driverSets returns the DaemonSets of the driver's plugin in its namespace.
func (f *Facts) driverSets() []*appsv1.DaemonSet {
	return slices.DeleteFunc(slices.Clone(f.DaemonSets), func(s *appsv1.DaemonSet) bool { return !isPlugin(s) || s.Namespace != f.namespace })
}

// isPlugin reports whether a DaemonSet is called like the driver's, and stays.
func isPlugin(s *appsv1.DaemonSet) bool {
	return s.Labels[componentLabel] == pluginLabel && s.DeletionTimestamp == nil
}

// driverNamespace is what the chart has written down, or else the one that the user has named, where the pods of others may not be read.
func (f *Facts) driverNamespace(named string) (string, error) {
	if class := f.Class(fleet.MainClass); class != nil && class.Annotations[fleet.NamespaceAnnotation] != "" {
		return class.Annotations[fleet.NamespaceAnnotation], nil
	}
	if f.Lacks(pods, "") && named != "" {
		return named, nil
	}
	return "", fmt.Errorf("no DeviceClass %s was found with annotation %s, which is the chart's", fleet.MainClass, fleet.NamespaceAnnotation)
}

// driverPods returns the pods of a component of the driver that have not ended.
func (f *Facts) driverPods(component string) []*corev1.Pod {
	return f.podsWith(func(p *corev1.Pod) bool { return fleet.IsDriverPod(p, f.namespace, component) })
}

// hasComponent is what pods of a driver say of themselves, of this installation or another one.
func hasComponent(component string) func(*corev1.Pod) bool {
	return func(p *corev1.Pod) bool { return p.Labels[componentLabel] == component }
}

// nodePods are those that work on their node: what tenants call their pods does not count.
func (f *Facts) nodePods(match func(*corev1.Pod) bool) []*corev1.Pod {
	return f.podsWith(func(p *corev1.Pod) bool { return fleet.MountsHost(p) && match(p) })
}

func (f *Facts) podsWith(match func(*corev1.Pod) bool) []*corev1.Pod {
	return slices.DeleteFunc(slices.Clone(f.Pods), func(p *corev1.Pod) bool { return fleet.Ended(p) || !match(p) })
}

// byNode returns the pods of each node.
func byNode(pods []*corev1.Pod) map[string][]*corev1.Pod {
	nodes := map[string][]*corev1.Pod{}
	for _, p := range pods {
		if p.Spec.NodeName != "" {
			nodes[p.Spec.NodeName] = append(nodes[p.Spec.NodeName], p)
		}
	}
	return nodes
}

// gpuLabels are set on nodes with GPUs by Node Feature Discovery, by NVIDIA's GPU operator
// and by GKE.
var gpuLabels = []string{
	"feature.node.kubernetes.io/pci-10de.present", "feature.node.kubernetes.io/pci-0300_10de.present",
	"feature.node.kubernetes.io/pci-0302_10de.present", "nvidia.com/gpu.present", "cloud.google.com/gke-accelerator",
}

// hasGPULabel reports whether somebody says that a node has GPUs.
func hasGPULabel(n *corev1.Node) bool {
	return slices.ContainsFunc(gpuLabels, func(l string) bool {
		value, has := n.Labels[l]
		return has && value != "false"
	})
}

// publishes reports whether a node has slices of the driver.
func (f *Facts) publishes(node string) bool {
	return slices.ContainsFunc(f.Nodes, func(n *fleet.Node) bool { return n.Name == node })
}
