// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/apis/networking"
	"k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/plugin/pkg/admission/serviceaccount"
)

// goldenPods are golden files, and the components that have pods in them.
var goldenPods = map[string][]string{
	"defaults":      {plugin, supervisor, guard},
	"everything":    {plugin, supervisor},
	"no-supervisor": {plugin, guard},
}

const (
	plugin     = "gpu-kubelet-plugin"
	supervisor = "mps-supervisor"
	guard      = "uninstall-guard"
)

// pods are those of a golden file by component, as their controllers make them.
func pods(t *testing.T, golden string) map[string]*core.Pod {
	t.Helper()
	all := map[string]*core.Pod{}
	add := func(template corev1.PodTemplateSpec) {
		pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
		all[template.Labels["app.kubernetes.io/component"]] = toInternal(t, pod).(*core.Pod)
	}
	for _, object := range chart(t, golden) {
		switch object := object.(type) {
		case *appsv1.DaemonSet:
			add(object.Spec.Template)
		case *batchv1.Job:
			add(object.Spec.Template)
		}
	}
	if len(all) != len(goldenPods[golden]) {
		t.Errorf("%s: %d pods, want %v", golden, len(all), goldenPods[golden])
	}
	return all
}

// isForMetrics reports whether a port of the plugin has metrics, by its own names or by those of NVIDIA's driver.
func isForMetrics(port core.ContainerPort) bool {
	return port.Name == "metrics" || port.Name == "nvidia-dra"
}

// metricsPorts are those of the plugin.
func metricsPorts(all map[string]*core.Pod) (ports []int32) {
	for _, port := range all["gpu-kubelet-plugin"].Spec.Containers[0].Ports {
		if isForMetrics(port) {
			ports = append(ports, port.ContainerPort)
		}
	}
	return ports
}

// TestNetworkPolicies: nobody can connect to a pod of the chart, except to ask for metrics,
// and the supervisor to nobody.
func TestNetworkPolicies(t *testing.T) {
	for golden, components := range goldenPods {
		all := pods(t, golden)
		other := func(rule networking.NetworkPolicyIngressRule) bool {
			return len(rule.Ports) == 0 || slices.ContainsFunc(rule.Ports, func(p networking.NetworkPolicyPort) bool {
				return !slices.Contains(metricsPorts(all), p.Port.IntVal)
			})
		}
		// The directions in which a pod has no connections other than for metrics.
		closed := map[string][]networking.PolicyType{}
		for _, object := range chart(t, golden) {
			policy, is := object.(*networkingv1.NetworkPolicy)
			if !is {
				continue
			}
			internal := toInternal(t, policy).(*networking.NetworkPolicy)
			if errs := validation.ValidateNetworkPolicy(internal, validation.NetworkPolicyValidationOptions{}); len(errs) > 0 {
				t.Errorf("%s: %v", golden, errs.ToAggregate())
			}
			selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.PodSelector)
			if err != nil {
				t.Fatal(err)
			}
			for component, pod := range all {
				if !selector.Matches(labels.Set(pod.Labels)) {
					continue
				}
				if slices.Contains(internal.Spec.PolicyTypes, networking.PolicyTypeIngress) && !slices.ContainsFunc(internal.Spec.Ingress, other) {
					closed[component] = append(closed[component], networking.PolicyTypeIngress)
				}
				if slices.Contains(internal.Spec.PolicyTypes, networking.PolicyTypeEgress) && len(internal.Spec.Egress) == 0 {
					closed[component] = append(closed[component], networking.PolicyTypeEgress)
				}
			}
		}
		for _, component := range components {
			want := []networking.PolicyType{networking.PolicyTypeIngress}
			if component == supervisor {
				want = append(want, networking.PolicyTypeEgress)
			}
			if diff := cmp.Diff(want, closed[component]); diff != "" {
				t.Errorf("%s: %s: closed directions: -want +got:\n%s", golden, component, diff)
			}
		}
	}
}

// TestTokens: pods that speak to the API server have what Kubernetes would give them, where
// it would, except that the token ends in time; others have nothing.
func TestTokens(t *testing.T) {
	for golden := range goldenPods {
		for component, pod := range pods(t, golden) {
			if auto := pod.Spec.AutomountServiceAccountToken; auto == nil || *auto {
				t.Errorf("%s: %s gets the token of Kubernetes", golden, component)
			}
			var got *core.ProjectedVolumeSource
			for _, mount := range pod.Spec.Containers[0].VolumeMounts {
				if mount.MountPath != serviceaccount.DefaultAPITokenMountPath {
					continue
				}
				volume := slices.IndexFunc(pod.Spec.Volumes, func(v core.Volume) bool { return v.Name == mount.Name })
				got = pod.Spec.Volumes[volume].Projected
			}
			var want *core.ProjectedVolumeSource
			if component != supervisor {
				want = serviceaccount.TokenVolumeSource()
				// Kubernetes asks for 3607, for which it gives a token of a year.
				*want.Sources[0].ServiceAccountToken.ExpirationSeconds = 3600
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %s: -want +got:\n%s", golden, component, diff)
			}
		}
	}
}

// TestProbes: nothing of a pod can be reached from outside but metrics, not even to ask whether
// it is well.
func TestProbes(t *testing.T) {
	probes := 0
	for golden := range goldenPods {
		for component, pod := range pods(t, golden) {
			container := pod.Spec.Containers[0]
			allowed := func(port core.ContainerPort) bool { return component == "gpu-kubelet-plugin" && isForMetrics(port) }
			if pod.Spec.HostNetwork || slices.ContainsFunc(container.Ports, func(port core.ContainerPort) bool { return !allowed(port) }) {
				t.Errorf("%s: %s has ports: %v", golden, component, container.Ports)
			}
			for _, probe := range []*core.Probe{container.StartupProbe, container.LivenessProbe, container.ReadinessProbe} {
				if probe == nil {
					continue
				}
				probes++
				if probe.Exec == nil {
					t.Errorf("%s: %s has a probe that is no program", golden, component)
				}
			}
		}
	}
	if probes != 3*(2+2+1) {
		t.Errorf("%d probes", probes)
	}
}
