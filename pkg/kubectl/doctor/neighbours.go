// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// isReferenceDriver reports whether a pod is NVIDIA's DRA driver for GPUs, which has the same
// name. Its container for compute domains is another driver.
func isReferenceDriver(p *corev1.Pod) bool {
	return p.Labels[componentLabel] != pluginLabel && slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool {
		return c.Name == "gpus" && strings.Contains(strings.Join(slices.Concat(c.Command, c.Args), " "), "gpu-kubelet-plugin")
	})
}

func oneDriver(f *Facts) (found findings) {
	own, called := byNode(f.driverPods(pluginLabel)), byNode(f.nodePods(hasComponent(pluginLabel)))
	reference := byNode(f.nodePods(isReferenceDriver))
	for _, node := range slices.Sorted(maps.Keys(own)) {
		if len(reference[node]) > 0 {
			found.add(Error, "NVIDIA's DRA driver runs on the node, too, with the same name: each takes the other's ResourceSlices for its own",
				"Keep one of them off the node (docs/how-to/install.md#from-nvidias-dra-driver)", nodeRef(node))
		}
		// Two pods of one DaemonSet are an upgrade.
		sets := map[string]bool{}
		for _, p := range slices.Concat(own[node], called[node]) {
			if o := metav1.GetControllerOf(p); o != nil {
				sets[p.Namespace+"/"+o.Name] = true
			}
		}
		if len(sets) > 1 {
			found.add(Error, fmt.Sprintf("Two installations of the driver run on the node, with the same name: DaemonSets %s", strings.Join(slices.Sorted(maps.Keys(sets)), " and ")),
				"Uninstall one of them (docs/how-to/uninstall.md)", nodeRef(node))
		}
	}
	return found
}

func foreignSlices(f *Facts) (found findings) {
	for _, s := range f.Slices {
		at := slices.IndexFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return !device.IsName(d.Name) })
		if s.Spec.Driver != f.Driver || at < 0 {
			continue
		}
		found.add(Error, fmt.Sprintf("It has the device %s, as NVIDIA's DRA driver names devices, on node %s",
			s.Spec.Devices[at].Name, ptr.Deref(s.Spec.NodeName, "(none)")),
			"Keep one of the two drivers off the node (docs/how-to/install.md#from-nvidias-dra-driver)", refTo("resourceslice", s))
	}
	return found
}

func devicePlugin(f *Facts) (found findings) {
	for _, n := range f.Snapshot.Nodes {
		if !f.publishes(n.Name) {
			continue
		}
		for _, resource := range slices.Sorted(maps.Keys(n.Status.Allocatable)) {
			amount := n.Status.Allocatable[resource]
			if !device.IsPluginResource(string(resource)) || amount.Sign() <= 0 {
				continue
			}
			message := fmt.Sprintf("A device plugin offers %s on the node, and the driver offers the same GPUs: both give them away", resource)
			if classes := f.ByExtendedResource()[string(resource)]; len(classes) > 0 {
				message += fmt.Sprintf("; pods that ask for %s get them from the device plugin, although it is the extended resource of the class %s", resource, classes[0].Name)
			}
			found.add(Error, message,
				"Keep NVIDIA's device plugin off the node: with the GPU operator the label nvidia.com/gpu.deploy.device-plugin=false, otherwise its nodeSelector", nodeRef(n.Name))
		}
	}
	return found
}

// migConfigLabel is what a MIG manager follows. The GPU Operator writes it again as long as its MIG manager is on, also on nodes that
// migManagerLabel keeps it off.
const migConfigLabel, migManagerLabel = "nvidia.com/mig.config", "nvidia.com/gpu.deploy.mig-manager"

func migManager(f *Facts) (found findings) {
	managers := byNode(f.nodePods(func(p *corev1.Pod) bool { return p.Labels["app"] == "nvidia-mig-manager" }))
	for _, n := range f.Snapshot.Nodes {
		if !f.publishes(n.Name) {
			continue
		}
		config, labelled := n.Labels[migConfigLabel]
		switch {
		case len(managers[n.Name]) > 0 && labelled:
			found.add(Error, fmt.Sprintf("NVIDIA's MIG manager runs on the node, whose label %s is %s: it removes partitions of claims", migConfigLabel, config),
				"Keep the MIG manager off the node: with the GPU operator the label "+migManagerLabel+"=false; and remove the label "+migConfigLabel, nodeRef(n.Name))
		case len(managers[n.Name]) > 0:
			found.add(Warning, "NVIDIA's MIG manager runs on the node: it would remove the partitions of claims if somebody set the label "+migConfigLabel,
				"Keep the MIG manager off the node: with the GPU operator the label "+migManagerLabel+"=false", nodeRef(n.Name))
		case labelled && n.Labels[migManagerLabel] != "false":
			found.add(Warning, fmt.Sprintf("The label %s is %s, which has no effect: the driver makes partitions as claims ask for them", migConfigLabel, config),
				"Remove the label, or set "+migManagerLabel+"=false where the GPU operator writes it again; say in the sharing policy which profiles are offered", nodeRef(n.Name))
		}
	}
	return found
}

// clientLabel is what the GPU operator, from 26.7 on, gives the nodes with GPUs for the node selectors of those who use GPUs beside it. Its
// value has pausedValue in it while the operator's driver manager wants them gone.
const clientLabel, pausedValue = "nvidia.com/gpu.deploy.client", "paused-for-driver-upgrade"

func gpuOperator(f *Facts) (found findings) {
	operated := byNode(f.nodePods(hasComponent("nvidia-driver")))
	for _, n := range f.Snapshot.Nodes {
		value, labelled := n.Labels[clientLabel]
		switch {
		case f.pausedByOperator(n.Name):
			found.add(Warning, fmt.Sprintf("The GPU operator keeps the driver off the node while it replaces NVIDIA's (label %s is %s): pods with claims neither start nor end there", clientLabel, value),
				"Wait; if it does not end, see why the operator's driver pod of the node is not ready (docs/how-to/real-nodes.md#when-the-driver-is-replaced)", nodeRef(n.Name))
		case labelled && !f.isOperatorClient() && len(operated[n.Name]) > 0 && f.publishes(n.Name):
			found.add(Warning, "The GPU operator replaces NVIDIA's driver of the node, and does not stop this driver before: the kernel modules stay in use, so that it fails",
				helmUpgrade+" with kubeletPlugin.gpuOperatorClient=true (docs/how-to/real-nodes.md#when-the-driver-is-replaced)", nodeRef(n.Name))
		}
	}
	return found
}

// isOperatorClient reports whether the driver goes by the label of the GPU operator's clients.
func (f *Facts) isOperatorClient() bool {
	return slices.ContainsFunc(f.driverSets(), func(s *appsv1.DaemonSet) bool { return s.Spec.Template.Spec.NodeSelector[clientLabel] != "" })
}

// pausedByOperator reports whether the GPU operator keeps the driver off a node for a while.
func (f *Facts) pausedByOperator(node string) bool {
	n := f.Node(node)
	return n != nil && f.isOperatorClient() && strings.Contains(n.Labels[clientLabel], pausedValue)
}

// cdiAnnotations and runtimeAnnotations are what annotations begin with by which NVIDIA's NRI plugin, and its runtime, give pods GPUs, and
// annotationNamespaces is the variable of the driver with the namespaces in which the chart's annotationPolicy takes them.
const cdiAnnotations, runtimeAnnotations, annotationNamespaces = "nvidia.cdi.k8s.io", "cdi.k8s.io/", "ANNOTATION_NAMESPACES"

func gpusByAnnotation(f *Facts) (found findings) {
	trusted := f.annotationNamespaces()
	isNamed := func(p *corev1.Pod) bool {
		return !slices.Contains(trusted, p.Namespace) && slices.ContainsFunc(slices.Collect(maps.Keys(p.Annotations)), func(key string) bool {
			return strings.HasPrefix(key, cdiAnnotations) || strings.HasPrefix(key, runtimeAnnotations)
		})
	}
	severity, unknown := Warning, ""
	if trusted == nil {
		severity, unknown = Unknown, ". Whether its namespace may have it is not known without annotation "+fleet.NamespaceAnnotation+" of DeviceClass "+fleet.MainClass+" and the driver's DaemonSet in the namespace that it names"
	}
	for _, p := range f.podsWith(isNamed) {
		found.add(severity, "It names CDI devices in an annotation "+cdiAnnotations+" or "+runtimeAnnotations+"…: where NVIDIA's NRI plugin, or its runtime on CRI-O, runs it has these GPUs without a claim, also those of other claims"+unknown,
			"Delete it, or remove the annotation; the chart's annotationPolicy refuses such pods (docs/concepts/security.md#pods-whose-annotations-name-gpus)", refTo("pod", p))
	}
	return found
}

// annotationNamespaces are those whose pods may have the annotations, or nil where that is not known. Nothing that a tenant may write says it.
func (f *Facts) annotationNamespaces() []string {
	sets := f.driverSets()
	if f.namespace == "" || len(sets) == 0 {
		return nil
	}
	trusted := []string{f.namespace}
	for _, set := range sets {
		for _, c := range set.Spec.Template.Spec.Containers {
			if at := slices.IndexFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == annotationNamespaces }); at >= 0 {
				return append(trusted, strings.Split(c.Env[at].Value, ",")...)
			}
		}
	}
	return append(trusted, metav1.NamespaceSystem, "gpu-operator") // the policy is off
}

// driverLabel says which driver has a node. With the value "reset" it has none: see docs/how-to/troubleshoot.md.
const driverLabel = "partage.dev/gpu-driver"

func nodeLabels(f *Facts) (found findings) {
	gpus := map[string]int{}
	for _, n := range f.Nodes {
		gpus[n.Name] = len(n.GPUs)
	}
	for _, n := range f.Snapshot.Nodes {
		if n.Labels[driverLabel] == "reset" {
			found.add(Warning, fmt.Sprintf("The label %s is reset: the driver was kept off the node so that a GPU could be reset", driverLabel),
				"If that is done, kubectl label node NODE "+driverLabel+"=partage --overwrite", nodeRef(n.Name))
		}
		count, has := n.Labels["nvidia.com/gpu.count"]
		if published := fmt.Sprint(gpus[n.Name]); has && gpus[n.Name] > 0 && count != published {
			found.add(Warning, fmt.Sprintf("The label nvidia.com/gpu.count is %s, and the driver publishes %s GPUs", count, published),
				"A GPU that is missing has the event GPUNotListed of the node; the sharing policy may leave GPUs alone; GPU feature discovery counts one model of several; the label is stale if nobody writes it any more, neither GPU feature discovery nor the driver (docs/how-to/node-labels.md)",
				nodeRef(n.Name))
		}
	}
	return found
}
