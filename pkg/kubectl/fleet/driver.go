// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
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

// IsDriverPod reports whether a pod is one of a component of the driver, which is in this namespace.
func IsDriverPod(p *corev1.Pod, namespace, component string) bool {
	owner := metav1.GetControllerOf(p)
	return p.Namespace == namespace && p.Labels[ComponentLabel] == component && owner != nil && owner.Kind == "DaemonSet"
}
