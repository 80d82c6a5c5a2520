// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// bad is a state in which a check finds something.
type bad struct {
	check, name string
	spoil       func(*world)
	severity    Severity
	// about are the objects, message and remedy parts of the texts.
	about           []string
	message, remedy string
}

func TestChecks(t *testing.T) {
	t.Parallel()
	const wantChecks, wantCases = 29, 109
	checks := Checks
	if len(checks) != wantChecks {
		t.Errorf("%d checks, want %d", len(checks), wantChecks)
	}
	states := slices.Concat(badPods, badGPUs, badSlices, badClasses, badPolicies, badNeighbours, badVersions, badRuntimes, badClaims, badEvents)
	if len(states) != wantCases {
		t.Errorf("%d bad states, want %d", len(states), wantCases)
	}
	for i, c := range checks {
		if c.Title == "" || len(c.needs) == 0 {
			t.Errorf("check %s: %+v", c.ID, c)
		}
		if slices.ContainsFunc(checks[:i], func(other Check) bool { return other.ID == c.ID }) {
			t.Errorf("two checks %s", c.ID)
		}
		if !slices.ContainsFunc(states, func(b bad) bool { return b.check == c.ID }) {
			t.Errorf("no bad state for %s", c.ID)
		}
	}
	t.Run("good", func(t *testing.T) {
		t.Parallel()
		r := newWorld(t).examine(t)
		if r.Count(OK) != wantChecks || r.verdict() != nil {
			t.Errorf("not everything is in order:\n%s", text(t, r, printer.Format{}))
		}
	})
	for _, b := range states {
		t.Run(b.check+" "+b.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			b.spoil(w)
			r := w.examine(t)
			at := slices.IndexFunc(r.Checks, func(c Result) bool { return c.ID == b.check })
			if at < 0 {
				t.Fatalf("no check %s", b.check)
			}
			result := r.Checks[at]
			if b.severity == OK {
				if result.Severity != OK {
					t.Errorf("found %+v, want nothing", result.Findings)
				}
				return
			}
			found := slices.ContainsFunc(result.Findings, func(f Finding) bool {
				var about []string
				for _, o := range f.Objects {
					about = append(about, o.String())
				}
				return f.Severity == b.severity && strings.Contains(f.Message, b.message) && strings.Contains(f.Remedy, b.remedy) && slices.Equal(about, b.about)
			})
			if !found || result.Severity != b.severity {
				t.Errorf("found %s %+v, want %s %q with the remedy %q about %q", result.Severity, result.Findings, b.severity, b.message, b.remedy, b.about)
			}
		})
	}
}

var badPods = []bad{
	{"driver-daemonset", "missing", func(w *world) { w.sets, w.pods, w.slices, w.claims = nil, nil, nil, nil }, Error, nil, "not installed", "helm install"},
	{"driver-daemonset", "chooses no node", func(w *world) { w.set(pluginLabel).Status.DesiredNumberScheduled = 0 }, Error, []string{"daemonset partage/partage-gpu-kubelet-plugin"}, "No node", "gpuNodesOnly"},
	{"driver-pods", "missing on a node with slices", func(w *world) { w.withoutPod(w.plugin("gpu-1")) }, Error, []string{"node gpu-1"}, "has devices of the driver, and no pod", "nodeSelector"},
	{"driver-pods", "missing on nodes with a label", func(w *world) {
		for _, n := range []string{"gpu-1", "gpu-2"} {
			w.withoutSlices(n)
			w.withoutPod(w.plugin(n))
		}
	}, Error, []string{"node gpu-1", "node gpu-2"}, "as its labels say, and no pod", "nodeSelector"},
	{"driver-pods", "virtual node", func(w *world) {
		w.withoutSlices("gpu-1")
		w.withoutPod(w.plugin("gpu-1"))
		w.node("gpu-1").Labels["type"] = "virtual-kubelet"
	}, OK, nil, "", ""},
	{"driver-pods", "ended", func(w *world) { w.plugin("gpu-1").Status.Phase = corev1.PodFailed }, Error, []string{"node gpu-1"}, "no pod", ""},
	{"driver-pods-ready", "crash loop", func(w *world) {
		p := w.plugin("gpu-2")
		waits(p, "CrashLoopBackOff", "back-off 5m0s")
		p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 1, Message: "starting\nflag --roots: no such folder\n"}
	}, Error, []string{"pod partage/gpu-kubelet-plugin-gpu-2"}, "with exit code 1: flag --roots: no such folder", "--previous"},
	{"driver-pods-ready", "image pull", func(w *world) { waits(w.plugin("gpu-2"), "ImagePullBackOff", "") }, Error, []string{"pod partage/gpu-kubelet-plugin-gpu-2"}, "registry.example.com/partage:dev cannot be pulled", "image.repository"},
	{"driver-pods-ready", "container configuration", func(w *world) { waits(w.plugin("gpu-2"), "CreateContainerConfigError", "no key") }, Error, []string{"pod partage/gpu-kubelet-plugin-gpu-2"}, "CreateContainerConfigError: no key", "describe"},
	{"driver-pods-ready", "not scheduled", func(w *world) {
		p := w.plugin("gpu-2")
		waits(p, "", "")
		p.Spec.NodeName = ""
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "Insufficient memory"})
	}, Error, []string{"pod partage/gpu-kubelet-plugin-gpu-2"}, "Insufficient memory", "priorityClassName"},
	{"driver-pods-ready", "new", func(w *world) {
		p := w.plugin("gpu-2")
		waits(p, "", "")
		p.CreationTimestamp = ago(10 * time.Second)
	}, Warning, []string{"pod partage/gpu-kubelet-plugin-gpu-2"}, "just been made", "Wait"},
	{"driver-pods-ready", "probe", func(w *world) {
		p := w.plugin("gpu-2")
		waits(p, "", "")
		w.event("Pod", p.Name, "kubelet", corev1.EventTypeWarning, "Unhealthy", "Readiness probe failed: the NVIDIA driver is not loaded", time.Minute)
	}, Error, []string{"pod partage/gpu-kubelet-plugin-gpu-2"}, "the NVIDIA driver is not loaded", "kubectl logs"},
	{"driver-restarts", "three", func(w *world) {
		s := &w.plugin("gpu-1").Status.ContainerStatuses[0]
		s.RestartCount = 3
		s.LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled", FinishedAt: ago(time.Minute)}
	}, Warning, []string{"pod partage/gpu-kubelet-plugin-gpu-1"}, "3 times, the last time within an hour, with exit code 137 (OOMKilled)", "--previous"},
	{"driver-restarts", "long ago", func(w *world) {
		s := &w.plugin("gpu-1").Status.ContainerStatuses[0]
		s.RestartCount = 3
		s.LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 137, FinishedAt: ago(2 * time.Hour)}
	}, OK, nil, "", ""},
	{"mps-supervisor", "missing", func(w *world) { w.withoutPod(w.supervisor("gpu-2")) }, Error, []string{"node gpu-2"}, "no pod of the MPS supervisor", "mpsSupervisor.enabled"},
	{"mps-supervisor", "image pull", func(w *world) { waits(w.supervisor("gpu-2"), "ErrImagePull", "") }, Error, []string{"pod partage/mps-supervisor-gpu-2"}, "ErrImagePull", "image.tag"},
	{"driver-daemonset", "being uninstalled", func(w *world) { w.sets = nil }, Error,
		[]string{"pod partage/gpu-kubelet-plugin-cpu-1", "pod partage/gpu-kubelet-plugin-gpu-1", "pod partage/gpu-kubelet-plugin-gpu-2"}, "being uninstalled", "Wait until they are gone"},
	{"driver-daemonset", "uninstalled", func(w *world) { w.sets, w.pods = nil, nil }, Error, nil, "not installed any more, and has left something behind", "a moment ago, wait"},
}

var badGPUs = []bad{
	{"gpus", "xid", func(w *world) {
		d := w.device("gpu-1", "gpu-0000-1b-00-0")
		d.Taints = []resourceapi.DeviceTaint{{Key: driver + "/xid", Value: "79", Effect: resourceapi.DeviceTaintEffectNoExecute}}
	}, Error, []string{"GPU 0 (1b:00) on gpu-1"}, "XID 79", "docs/reference/xids.md"},
	{"gpus", "tells only", func(w *world) {
		d := w.device("gpu-1", "gpu-0000-43-00-0")
		d.Taints = []resourceapi.DeviceTaint{{Key: driver + "/throttled", Effect: resourceapi.DeviceTaintEffectNone}}
	}, Warning, []string{"GPU 1 (43:00) on gpu-1"}, "throttled", "cooling"},
	{"gpus", "withdrawn is as it should be", func(w *world) {
		d := w.device("gpu-1", "gpu-0000-43-00-0")
		d.Taints = []resourceapi.DeviceTaint{{Key: driver + "/withdrawn", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}, OK, nil, "", ""},
	{"gpus", "cordoned", func(w *world) {
		w.taint("gpu-1", "0000-43-00-0", "cordoned", "", resourceapi.DeviceTaintEffectNoSchedule)
	}, Note, []string{"GPU 1 (43:00) on gpu-1"}, "by an administrator", "what it was cordoned for"},
}

var badSlices = []bad{
	{"pools-complete", "a slice is missing", func(w *world) { w.slices = w.slices[1:] }, Error, []string{"pool gpu-1"}, "2 of 3 slices", "log"},
	{"pools-complete", "an old slice is left", func(w *world) {
		old := w.slices[0].DeepCopy()
		old.Name, old.Spec.Pool.Generation = "old", 0
		w.slices = append(w.slices, old)
	}, Warning, []string{"pool gpu-1"}, "1 slices of older generations", "log"},
	{"nodes-publish", "ready", func(w *world) { w.withoutSlices("gpu-2") }, Error, []string{"node gpu-2"}, "the driver's pod is ready, and there are no ResourceSlices", "policy"},
	{"nodes-publish", "left alone", func(w *world) {
		w.withoutSlices("gpu-2")
		w.configs[0].Data[policyKey] += "rules:\n- name: leave\n  match: {productName: NVIDIA T*}\n  offer: {kinds: []}\n"
	}, Note, []string{"node gpu-2"}, "there are no ResourceSlices", "policy"},
	{"nodes-publish", "not ready", func(w *world) {
		w.withoutSlices("gpu-2")
		waits(w.plugin("gpu-2"), "", "")
	}, Error, []string{"node gpu-2"}, "is not ready", "driver-pods-ready"},
	{"taint-rules", "of an administrator", func(w *world) { w.rule(new("gpu-0000-1b-00-0")) }, Note, []string{"devicetaintrule repair"}, "example.com/repair with the effect NoSchedule to 1 device of", "delete"},
	{"nodes-offer", "all is withdrawn", func(w *world) { taintBoth(w, "withdrawn", "withdrawn") }, Warning, []string{"node gpu-2"}, "The sharing policy offers no device", "correct the policy"},
	{"nodes-offer", "withdrawn, or lost", func(w *world) { taintBoth(w, "withdrawn", "gpu-lost") }, Warning, []string{"node gpu-2"}, "The sharing policy offers no device", "correct the policy"},
	{"nodes-offer", "withdrawn, or cordoned", func(w *world) { taintBoth(w, "withdrawn", "cordoned") }, Warning, []string{"node gpu-2"}, "The sharing policy offers no device", "correct the policy"},
	{"nodes-offer", "all is cordoned", func(w *world) { taintBoth(w, "cordoned", "cordoned") }, Note, []string{"node gpu-2"}, "People keep pods off all devices", "if that is meant"},
	{"nodes-offer", "cordoned and lost", func(w *world) { taintBoth(w, "cordoned", "gpu-lost") }, OK, nil, "", ""},
	{"nodes-offer", "all is tainted by a rule", func(w *world) { w.rule(nil) }, Note, []string{"node gpu-2"}, "People keep pods off all devices", "if that is meant"},
	{"nodes-offer", "a GPU is left", func(w *world) {
		w.taint("gpu-2", "0000-1b-00-0", "withdrawn", "", resourceapi.DeviceTaintEffectNoSchedule)
	}, OK, nil, "", ""},
	{"nodes-offer", "a device is left", func(w *world) {
		taintBoth(w, "withdrawn", "withdrawn")
		w.device("gpu-2", "gpu-0000-1b-00-0").Taints = nil
	}, OK, nil, "", ""},
	{"nodes-offer", "gpus says what is wrong", func(w *world) { taintBoth(w, "gpu-lost", "xid") }, OK, nil, "", ""},
	{"nodes-offer", "a taint that only tells", func(w *world) {
		w.rule(nil)
		w.rules[0].Spec.Taint.Effect = resourceapi.DeviceTaintEffectNone
	}, OK, nil, "", ""},
}

// taintBoth taints all devices of both GPUs of gpu-2.
func taintBoth(w *world, first, second string) {
	w.taint("gpu-2", "0000-1b-00-0", first, "", resourceapi.DeviceTaintEffectNoSchedule)
	w.taint("gpu-2", "0000-43-00-0", second, "", resourceapi.DeviceTaintEffectNoSchedule)
}

// rule taints a device of gpu-2, or all, as an administrator does.
func (w *world) rule(device *string) {
	w.rules = []*resourceapi.DeviceTaintRule{{ObjectMeta: metav1.ObjectMeta{Name: "repair"}, Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: new("gpu-2"), Device: device},
		Taint:          resourceapi.DeviceTaint{Key: "example.com/repair", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}}}
}

var badClasses = []bad{
	{"device-classes", "missing", func(w *world) {
		w.classes = slices.DeleteFunc(w.classes, func(c *resourceapi.DeviceClass) bool { return c.Name == "mps.partage.dev" })
	}, Warning, []string{"deviceclass mps.partage.dev"}, "type mps", "helm upgrade"},
	{"class-selectors", "of another driver", func(w *world) {
		w.class("gpu.nvidia.com").Spec.Selectors[0].CEL.Expression = "device.driver == 'gpu.example.com'"
	}, Error, []string{"deviceclass gpu.nvidia.com"}, "selects no devices of the type gpu", "helm upgrade"},
	{"class-selectors", "not CEL", func(w *world) { w.class("gpu.nvidia.com").Spec.Selectors[0].CEL.Expression = "device." }, Error, []string{"deviceclass gpu.nvidia.com"}, "cannot be evaluated", "helm upgrade"},
	{"extended-resources", "twice", func(w *world) {
		w.class("mps.partage.dev").Spec.ExtendedResourceName = new("nvidia.com/gpu")
	}, Error, []string{"deviceclass gpu.resource.partage.dev", "deviceclass mps.partage.dev"}, "nvidia.com/gpu", "extendedResourceName"},
	{"claimed-classes", "template", func(w *world) {
		w.templates[0].Spec.Spec = asks("gpu.nvidia.con")
		w.wait("train", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("train")})
	}, Error, []string{"resourceclaimtemplate team/train"}, "gpu.nvidia.con, which does not exist: its pods wait", "Correct"},
	{"claimed-classes", "template that no pod waits for", func(w *world) {
		w.templates[0].Spec.Spec = asks("gpu.nvidia.con")
		w.wait("other", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("other")})
		for _, name := range []string{"runs", "ended"} {
			w.wait(name, corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("train")})
		}
		named(w.pods, "runs").Spec.NodeName = "gpu-1"
		named(w.pods, "ended").Status.Phase = corev1.PodFailed
	}, Warning, []string{"resourceclaimtemplate team/train"}, "which does not exist: a pod that uses it will wait", "Correct"},
	{"claimed-classes", "template whose pods may not be read", func(w *world) {
		w.templates[0].Spec.Spec = asks("gpu.nvidia.con")
		w.wait("train", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("train")})
		w.forbidden["pods"] = true
	}, Warning, []string{"resourceclaimtemplate team/train"}, "will wait. Whether one does is unknown, as far as pods may not be read", "Correct"},
	{"claimed-classes", "claim", func(w *world) {
		w.claims[0].Status = resourceapi.ResourceClaimStatus{}
		w.claims[0].Spec.Devices.Requests[0] = resourceapi.DeviceRequest{FirstAvailable: []resourceapi.DeviceSubRequest{{DeviceClassName: "gpu.nvidia.com"}, {DeviceClassName: "big"}}}
		w.wait("waits", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("train")})
		named(w.pods, "waits").Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{
			{Name: "gpu", ResourceClaimName: new("train-0-gpu")},
		}
	}, Error, []string{"resourceclaim team/train-0-gpu"}, "class big", "Correct"},
}

var badPolicies = []bad{
	{"sharing-policy", "invalid", func(w *world) { w.configs[0].Data[policyKey] += "default: {kinds: [mpss]}\n" }, Error, []string{"configmap partage/partage-sharing-policy"}, "mpss", "helm upgrade"},
	{"sharing-policy", "missing", func(w *world) { w.configs = nil }, Error, []string{"configmap partage/partage-sharing-policy"}, "does not exist", "helm upgrade"},
	{"sharing-policy", "no key", func(w *world) { w.configs[0].Data = nil }, Error, []string{"configmap partage/partage-sharing-policy"}, "leaves what is published as it is, which is nothing where the node or its kubelet has started anew, too: it has no policy.yaml", "helm upgrade"},
	{"sharing-policy", "nothing is offered", func(w *world) {
		w.configs[0].Data[policyKey] += "default: {kinds: []}\nrules: [{name: a, match: {architecture: Hopper}, offer: {kinds: []}}]\n"
	}, Warning, []string{"configmap partage/partage-sharing-policy"}, "offers nothing of any GPU", "helm upgrade"},
	{"sharing-policy", "something is offered", func(w *world) {
		w.configs[0].Data[policyKey] += "default: {kinds: []}\nrules: [{name: a, match: {architecture: Hopper}, offer: {kinds: [gpu]}}]\n"
	}, OK, nil, "", ""},
	{"driver-events", "invalid on a node", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "SharingPolicyInvalid", "invalid SharingPolicy: rules", time.Minute)
	}, Error, []string{"node gpu-1"}, "sharing policy cannot be used", "Correct"},
	{"driver-events", "corrected", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "SharingPolicyInvalid", "invalid SharingPolicy: rules", 2*time.Minute)
		w.event("Node", "gpu-1", driver, corev1.EventTypeNormal, "SharingPolicyValid", "The sharing policy can be used again", time.Minute)
	}, OK, nil, "", ""},
	{"driver-events", "unknown", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "SharingPolicyProfilesUnknown", "no GPU has the profile 1g.10bg", time.Minute)
	}, Warning, []string{"node gpu-1"}, "profiles that no GPU has", "Correct"},
	{"driver-events", "unknown, and corrected", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "SharingPolicyProfilesUnknown", "no GPU has the profile 1g.10bg", 3*time.Minute)
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "SharingPolicyProfilesUnknown", "no GPU has the profile 1g.10mb", 2*time.Minute)
		w.event("Node", "gpu-1", driver, corev1.EventTypeNormal, "SharingPolicyProfilesKnown", "it names none any more", time.Minute)
	}, OK, nil, "", ""},
}

// reference is a pod of NVIDIA's DRA driver, with the containers for GPUs or without.
func reference(node string, gpus bool) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: "nvidia-dra-driver-gpu-kubelet-plugin-x", UID: "reference"}, Spec: corev1.PodSpec{NodeName: node, Volumes: ofHost}}
	p.Spec.Containers = []corev1.Container{{Name: "compute-domains", Args: []string{"compute-domain-kubelet-plugin -v 4"}}}
	if gpus {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "gpus", Command: []string{"bash", "-c"}, Args: []string{"gpu-kubelet-plugin -v 4"}})
	}
	return p
}

func annotatedPod(namespace string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "annotated", Annotations: map[string]string{"nvidia.cdi.k8s.io/container.main": "nvidia.com/gpu=all"}}}
}

func takesAnnotations(driver *corev1.PodSpec, namespaces string) {
	driver.Containers = append(driver.Containers, corev1.Container{Env: []corev1.EnvVar{{Name: annotationNamespaces, Value: namespaces}}})
}

func migManagerPod(node string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-operator", Name: "nvidia-mig-manager-x", Labels: map[string]string{"app": "nvidia-mig-manager"}}, Spec: corev1.PodSpec{NodeName: node, Volumes: ofHost}}
}

// operated is a pod of the GPU operator that has NVIDIA's driver, on a node that the operator has labelled.
func operated(w *world, node string) *corev1.Pod {
	w.node(node).Labels[clientLabel] = "true"
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-operator", Name: "nvidia-driver-daemonset-x", Labels: map[string]string{componentLabel: "nvidia-driver"}}, Spec: corev1.PodSpec{NodeName: node, Volumes: ofHost}}
}

// paused is a node that the GPU operator's driver manager has got rid of its clients.
func paused(w *world, node string) {
	w.set(pluginLabel).Spec.Template.Spec.NodeSelector = map[string]string{clientLabel: "true"}
	w.node(node).Labels[clientLabel] = pausedValue
	w.pods = slices.DeleteFunc(w.pods, func(p *corev1.Pod) bool { return p.Labels[componentLabel] != "" && p.Spec.NodeName == node })
}

// ofTenant makes a pod one that somebody with a namespace may create, which enforces the Pod Security Standard baseline.
func ofTenant(p *corev1.Pod) *corev1.Pod {
	p.Namespace, p.Spec.Volumes = "team", nil
	return p
}

var badNeighbours = []bad{
	{"one-driver", "NVIDIA's", func(w *world) { w.pods = append(w.pods, reference("gpu-1", true)) }, Error, []string{"node gpu-1"}, "NVIDIA's DRA driver runs", "docs/how-to/install.md#from-nvidias-dra-driver"},
	{"one-driver", "NVIDIA's for compute domains only", func(w *world) { w.pods = append(w.pods, reference("gpu-1", false)) }, OK, nil, "", ""},
	{"one-driver", "two installations", func(w *world) {
		p := w.plugin("gpu-1").DeepCopy()
		p.Namespace, p.OwnerReferences[0].Name = "other", "other-gpu-kubelet-plugin"
		w.pods = append(w.pods, p)
	}, Error, []string{"node gpu-1"}, "other/other-gpu-kubelet-plugin and partage/partage-gpu-kubelet-plugin", "Uninstall"},
	{"one-driver", "an upgrade", func(w *world) {
		p := w.plugin("gpu-1").DeepCopy()
		p.Name = "new"
		w.pods = append(w.pods, p)
	}, OK, nil, "", ""},
	{"foreign-slices", "NVIDIA's", func(w *world) {
		s := w.slices[0].DeepCopy()
		s.Name, s.Spec.SharedCounters = "gpu-1-gpu.nvidia.com-x7z2k", nil
		s.Spec.Devices = []resourceapi.Device{{Name: "gpu-0"}}
		w.slices = append(w.slices, s)
	}, Error, []string{"resourceslice gpu-1-gpu.nvidia.com-x7z2k"}, "device gpu-0", "docs/how-to/install.md"},
	{"device-plugin", "same resource as a class", func(w *world) {
		w.node("gpu-1").Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("2")
	}, Error, []string{"node gpu-1"}, "nvidia.com/gpu on the node, and the driver offers the same GPUs: both give them away; pods that ask for nvidia.com/gpu", "nvidia.com/gpu.deploy.device-plugin=false"},
	{"device-plugin", "zero", func(w *world) {
		w.node("gpu-1").Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("0")
	}, OK, nil, "", ""},
	{"device-plugin", "network cards", func(w *world) {
		w.node("gpu-1").Status.Allocatable["nvidia.com/hostdev"] = resource.MustParse("2")
	}, OK, nil, "", ""},
	{"device-plugin", "on another node", func(w *world) {
		w.node("cpu-1").Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("2")
	}, OK, nil, "", ""},
	{"gpus-by-annotation", "of a tenant", func(w *world) { w.pods = append(w.pods, annotatedPod("team"), annotatedPod("gpu-operator")) }, Warning, []string{"pod team/annotated"}, "without a claim", "annotationPolicy"},
	{"gpus-by-annotation", "that NVIDIA's runtime reads", func(w *world) {
		p := annotatedPod("team")
		p.Annotations = map[string]string{"cdi.k8s.io/x": "nvidia.com/gpu=all"}
		w.pods = append(w.pods, p)
	}, Warning, []string{"pod team/annotated"}, "without a claim", "annotationPolicy"},
	{"gpus-by-annotation", "where the chart takes them", func(w *world) {
		w.pods = append(w.pods, annotatedPod("tools"))
		takesAnnotations(&w.set(pluginLabel).Spec.Template.Spec, "partage,tools")
	}, OK, nil, "", ""},
	{"gpus-by-annotation", "where a pod with a folder of the host says that the chart takes them", func(w *world) {
		driver := w.driverPod(pluginLabel, "gpu-1")
		driver.Namespace = "team"
		takesAnnotations(&driver.Spec, "team")
		w.pods = append(w.pods, driver, annotatedPod("team"))
	}, Warning, []string{"pod team/annotated"}, "without a claim", "annotationPolicy"},
	{"gpus-by-annotation", "in a namespace that the chart does not take", func(w *world) {
		w.pods = append(w.pods, annotatedPod("gpu-operator"))
		takesAnnotations(&w.set(pluginLabel).Spec.Template.Spec, "partage,nvidia")
	}, Warning, []string{"pod gpu-operator/annotated"}, "without a claim", "annotationPolicy"},
	{"gpus-by-annotation", "where nobody says what the chart takes", func(w *world) {
		w.class(fleet.MainClass).Annotations = nil
		w.pods = append(w.pods, annotatedPod("team"))
	}, Unknown, []string{"pod team/annotated"}, "not known without annotation partage.dev/driver-namespace of DeviceClass gpu.nvidia.com", "annotationPolicy"},
	{"gpu-operator", "does not know the driver", func(w *world) { w.pods = append(w.pods, operated(w, "gpu-1")) }, Warning, []string{"node gpu-1"}, "does not stop this driver", "gpuOperatorClient=true"},
	{"gpu-operator", "knows the driver", func(w *world) {
		w.pods = append(w.pods, operated(w, "gpu-1"))
		w.set(pluginLabel).Spec.Template.Spec.NodeSelector = map[string]string{clientLabel: "true"}
	}, OK, nil, "", ""},
	{"gpu-operator", "a tenant's pod that is called like its driver", func(w *world) { w.pods = append(w.pods, ofTenant(operated(w, "gpu-1"))) }, OK, nil, "", ""},
	{"gpu-operator", "replaces the driver", func(w *world) { paused(w, "gpu-1") }, Warning, []string{"node gpu-1"}, "(label nvidia.com/gpu.deploy.client is paused-for-driver-upgrade): pods with claims neither start nor end", "Wait"},
	{"driver-pods", "while the GPU operator replaces NVIDIA's driver", func(w *world) { paused(w, "gpu-1") }, OK, nil, "", ""},
	{"mps-supervisor", "while the GPU operator replaces NVIDIA's driver", func(w *world) { paused(w, "gpu-1") }, OK, nil, "", ""},
	{"mig-manager", "runs with a label", func(w *world) {
		w.pods = append(w.pods, migManagerPod("gpu-1"))
		w.node("gpu-1").Labels[migConfigLabel] = "all-1g.10gb"
	}, Error, []string{"node gpu-1"}, "all-1g.10gb", "nvidia.com/gpu.deploy.mig-manager=false"},
	{"mig-manager", "runs", func(w *world) { w.pods = append(w.pods, migManagerPod("gpu-1")) }, Warning, []string{"node gpu-1"}, "would remove", "nvidia.com/gpu.deploy.mig-manager=false"},
	{"mig-manager", "label", func(w *world) { w.node("gpu-2").Labels[migConfigLabel] = "all-disabled" }, Warning, []string{"node gpu-2"}, "has no effect", "Remove the label"},
	{"mig-manager", "label, where the operator keeps it off", func(w *world) {
		w.node("gpu-2").Labels[migConfigLabel], w.node("gpu-2").Labels[migManagerLabel] = "all-disabled", "false"
	}, OK, nil, "", ""},
	{"node-labels", "count", func(w *world) { w.node("gpu-2").Labels["nvidia.com/gpu.count"] = "3" }, Warning, []string{"node gpu-2"}, "nvidia.com/gpu.count is 3, and the driver publishes 2", "GPUNotListed"},
	{"node-labels", "reset", func(w *world) { w.node("gpu-2").Labels[driverLabel] = "reset" }, Warning, []string{"node gpu-2"}, "was kept off", "kubectl label"},
	{"one-driver", "a tenant's pods that are called so", func(w *world) {
		w.pods = append(w.pods, ofTenant(reference("gpu-1", true)), ofTenant(migManagerPod("gpu-1")))
		own := w.driverPod(pluginLabel, "gpu-1")
		own.Name, own.OwnerReferences[0].Name = "own", "own"
		w.pods = append(w.pods, ofTenant(own))
	}, OK, nil, "", ""},
	{"mig-manager", "a tenant's pod that is called so", func(w *world) { w.pods = append(w.pods, ofTenant(migManagerPod("gpu-1"))) }, OK, nil, "", ""},
}

func apiServer(v string) func(*world) {
	return func(w *world) {
		w.version = v
		for _, n := range w.nodes {
			n.Status.NodeInfo.KubeletVersion = v
		}
	}
}

func kubelet(v string) func(*world) {
	return func(w *world) { w.node("gpu-2").Status.NodeInfo.KubeletVersion = v }
}

// oldKubelet is one that does not know extended resources, and what the driver publishes there.
func oldKubelet(w *world) {
	kubelet("v1.35.2")(w)
	for _, s := range w.slices {
		for _, d := range s.Spec.Devices {
			if s.Spec.Pool.Name == "gpu-2" {
				delete(d.Attributes, device.ExtendedResources)
			}
		}
	}
}

var badVersions = []bad{
	{"apiserver-version", "too old", apiServer("v1.33.1"), Error, nil, "does not serve resource.k8s.io/v1", "1.36.2"},
	{"apiserver-version", "ignores counters", apiServer("v1.34.4"), Warning, nil, "ignores counters", "1.36.2"},
	{"apiserver-version", "forgets shares", apiServer("v1.36.1-gke.7"), Warning, nil, "kubernetes/kubernetes#139034", "1.36.2"},
	{"apiserver-version", "crashes", apiServer("v1.36.1"), Warning, nil, "kubernetes/kubernetes#138882", "helm upgrade"},
	{"apiserver-version", "gates", apiServer("v1.35.9"), Warning, nil, "off by default", "DRAPartitionableDevices"},
	{"apiserver-version", "no version", func(w *world) { w.version = "latest" }, Unknown, nil, "cannot be read", "compatibility"},
	{"kubelet-versions", "too old", kubelet("v1.33.1"), Error, []string{"node gpu-2"}, "older than 1.34", "Upgrade"},
	{"kubelet-versions", "extended resources", oldKubelet, Warning, []string{"node gpu-2"}, "for claims only", "1.36"},
	{"kubelet-versions", "pods without devices", kubelet("v1.35.2"), Error, []string{"node gpu-2"}, "nvidia.com/gpu (class gpu.resource.partage.dev)", "extendedResources"},
	{"kubelet-versions", "a pod without devices", func(w *world) {
		oldKubelet(w)
		c := w.claims[0].DeepCopy()
		c.Name, c.Annotations = "train-1-extended-resources-x", map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
		c.Status.Allocation.Devices.Results[0].Pool, c.Status.Allocation.Devices.Results[0].Device = "gpu-2", "gpu-0000-1b-00-0"
		w.claims = append(w.claims, c)
	}, Error, []string{"resourceclaim team/train-1-extended-resources-x"}, "runs without its devices", "Delete the pod"},
	{"feature-gates", "no counters", func(w *world) {
		for _, s := range w.slices {
			s.Spec.Devices = slices.DeleteFunc(s.Spec.Devices, func(d resourceapi.Device) bool { return d.Name != "gpu-0000-1b-00-0" })
		}
	}, Warning, []string{"GPU 0 (1b:00) on gpu-1", "GPU 0 (1b:00) on gpu-2"}, "Only the whole GPU", "DRAPartitionableDevices"},
	{"feature-gates", "no taints", func(w *world) { w.device("gpu-1", "gpu-0000-1b-00-0-observer").Taints = nil }, Error, []string{"GPU 0 (1b:00) on gpu-1"}, "not stored", "DRADeviceTaints"},
	{"driver-events", "event", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "ClusterLacksFeature", "No MPS and time-slice shares are offered", time.Minute)
	}, Warning, []string{"node gpu-1"}, "not everything is published", "1.36.2"},
}

var badRuntimes = []bad{
	{"cdi", "event", func(w *world) {
		w.event("Pod", "train-0", "kubelet", corev1.EventTypeWarning, "Failed", "CDI device injection failed: unresolvable CDI devices k8s.gpu.nvidia.com/claim=x", time.Minute)
	}, Error, []string{"pod train-0"}, "unresolvable CDI devices", "enable_cdi"},
}

var badClaims = []bad{
	{"claims-deleting", "waits for pods", func(w *world) { w.claims[0].DeletionTimestamp = new(ago(time.Hour)) }, Warning, []string{"resourceclaim team/train-0-gpu"}, "waits for its pods: train-0", "Terminating"},
	{"claims-deleting", "finalizer", func(w *world) {
		w.claims[0].DeletionTimestamp, w.claims[0].Status.ReservedFor = new(ago(time.Hour)), nil
	}, Error, []string{"resourceclaim team/train-0-gpu"}, "resource.kubernetes.io/delete-protection", "resourceclaim controller"},
	{"claims-devices", "no such device", func(w *world) {
		w.claims[0].Status.Allocation.Devices.Results[0].Device = "gpu-0"
	}, Error, []string{"resourceclaim team/train-0-gpu"}, "device gpu-0 of the pool gpu-1", "delete the claim's pods"},
	{"claims-devices", "no driver on the node", func(w *world) {
		w.claims[0].Status.Allocation.Devices.Results[0].Pool = "gpu-9"
	}, Error, []string{"resourceclaim team/train-0-gpu"}, "devices of the pool gpu-9", "See first that the driver's pod on the node is ready"},
}

var badEvents = []bad{
	{"driver-events", "of a GPU that was never there", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPUNotListed", "GPU 0000:99:00.0: it is on the PCI bus", time.Minute)
	}, Warning, []string{"gpu gpu-1/0000:99:00.0"}, "does not list it", "kernel log"},
	{"driver-events", "that nobody knows", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "Novel", "something new", time.Minute)
	}, Warning, []string{"node gpu-1"}, "Novel", "docs/how-to/troubleshoot.md"},
	{"driver-events", "over with the taint", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0: lost", 11*time.Minute)
	}, OK, nil, "", ""},
	{"driver-events", "an address that was corrected", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "CordonedGPUUnknown", `The annotation partage.dev/cordoned-gpus of the node has "gpu-1", which is no GPU of it`, time.Minute)
	}, OK, nil, "", ""},
	{"driver-events", "an address that is wrong", func(w *world) {
		w.node("gpu-1").Annotations = map[string]string{api.CordonAnnotation: "0000:1b:00.0,gpu-1"}
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "CordonedGPUUnknown", `The annotation partage.dev/cordoned-gpus of the node has "gpu-1", which is no GPU of it`, time.Minute)
	}, Warning, []string{"node gpu-1"}, "no GPU", "Correct it"},
	{"driver-events", "old", func(w *world) {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "GPULost", "GPU 0000:1b:00.0 is lost", 2*time.Hour)
	}, OK, nil, "", ""},
	{"driver-events", "of others", func(w *world) {
		w.event("Node", "gpu-1", "kubelet", corev1.EventTypeWarning, "Rebooted", "rebooted", time.Minute)
	}, OK, nil, "", ""},
}

// TestGolden compares everything that people and programs see of a cluster in a bad state.
func TestGolden(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, b := range slices.Concat(badPods[6:8], badGPUs[:2], badPolicies[:1], badNeighbours[:1], badNeighbours[5:6], badClaims[:1]) {
		b.spoil(w)
	}
	w.forbidden["devicetaintrules"] = true
	for _, n := range []string{"cpu-1", "gpu-1", "gpu-2"} {
		waits(w.supervisor(n), "ErrImagePull", "")
	}
	r := w.examine(t)
	compare(t, "bad.txt", text(t, r, printer.Format{}))
	compare(t, "bad-wide.txt", text(t, r, printer.Format{Wide: true}))
	encoded, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	compare(t, "bad.json", string(encoded)+"\n")
	compare(t, "good.txt", text(t, newWorld(t).examine(t), printer.Format{}))
}

func text(t *testing.T, r *Report, f printer.Format) string {
	t.Helper()
	var out bytes.Buffer
	if err := view(r, false).Write(&out, f); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func compare(t *testing.T, name, got string) {
	t.Helper()
	fleettest.Golden(t, *update, name, got)
}

// TestRights: what may not be read makes checks unknown, and never wrong.
func TestRights(t *testing.T) {
	t.Parallel()
	resources := []string{"nodes", "pods", "events", "daemonsets", "resourceslices", "deviceclasses", "resourceclaims", "resourceclaimtemplates", "devicetaintrules", "configmaps"}
	for _, resource := range resources {
		t.Run(resource, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.forbidden[resource], w.forbidden[install+"/"+resource] = true, true
			r := w.examine(t)
			if r.Count(Error)+r.Count(Warning) > 0 || r.Count(Unknown) == 0 {
				t.Errorf("got:\n%s", text(t, r, printer.Format{}))
			}
			if err := r.verdict(); err == nil || errors.Is(err, options.ErrFound) {
				t.Errorf("the command would end with %v, as if all were well, or something were found", err)
			}
			for _, c := range r.Checks {
				for _, f := range c.Findings {
					if !strings.HasPrefix(f.Message, "Unknown because ") || !strings.Contains(f.Remedy, resource) {
						t.Errorf("%s: %+v", c.ID, f)
					}
				}
			}
		})
	}
	t.Run("one namespace", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.namespaced = install
		for _, resource := range resources {
			w.forbidden[resource] = resource != "nodes" && resource != "resourceslices" && resource != "configmaps"
		}
		waits(w.plugin("gpu-1"), "ErrImagePull", "")
		r := w.examine(t)
		at := slices.IndexFunc(r.Checks, func(c Result) bool { return c.ID == "driver-pods-ready" })
		if got := r.Checks[at]; got.Severity != Error || len(got.Findings) != 2 || got.Findings[1].Severity != Unknown {
			t.Errorf("%+v", got)
		}
		if r.Count(Error) != 1 || !errors.Is(r.verdict(), options.ErrFound) {
			t.Errorf("got:\n%s", text(t, r, printer.Format{}))
		}
	})
}

// TestManyObjects: the objects of one finding are listed once.
func TestManyObjects(t *testing.T) {
	t.Parallel()
	var f findings
	for _, n := range []string{"a", "b", "c", "d", "e", "f", "g", "a"} {
		f.add(Error, "bad", "mend it", nodeRef(n))
	}
	f.add(Error, "bad", "mend it", Ref{Kind: "pod", Namespace: "ns", Name: "p"})
	if len(f) != 1 {
		t.Fatalf("%+v", f)
	}
	if got := objects(f[0].Objects, false); got != "node a, b, c, d, e and 3 more" {
		t.Error(got)
	}
	if got := objects(f[0].Objects, true); got != "node a, b, c, d, e, f, g, pod ns/p" {
		t.Error(got)
	}
}

// TestDocs writes the list of checks into the documentation, or compares it.
func TestDocs(t *testing.T) {
	t.Parallel()
	table := page.NewTable("check", "what is in order")
	for _, c := range Checks {
		table.Row(page.Code(c.ID), c.Title)
	}
	page.Generated(t, *update, "docs/reference/doctor.md", table.String())
}

// TestLinks: the pages and sections that remedies name exist.
func TestLinks(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	link := regexp.MustCompile(`(docs/[a-z-]+/[a-z-]+\.md)(?:#([a-z-]+))?`)
	looked := 0
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(string(source), -1) {
			page, err := os.ReadFile(filepath.Join("../../..", m[1]))
			if err != nil {
				t.Errorf("%s: %v", file, err)
				continue
			}
			looked++
			exists := m[2] == ""
			for line := range strings.Lines(string(page)) {
				if title, is := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); is && strings.HasPrefix(line, "#") {
					exists = exists || anchor(strings.TrimSpace(title)) == m[2]
				}
			}
			if !exists {
				t.Errorf("%s: %s has no section %s", file, m[1], m[2])
			}
		}
	}
	if looked < 12 {
		t.Errorf("%d links", looked)
	}
}

func anchor(title string) string {
	return strings.ReplaceAll(regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(title), ""), " ", "-")
}

// TestTaints: every reason for which the driver taints devices has a remedy, or is as it should be.
func TestTaints(t *testing.T) {
	t.Parallel()
	documented := map[string]bool{"": true}
	for _, row := range page.Rows(t, "docs/reference/taints.md", "key", "the device", "it goes away", "what to do") {
		for _, m := range regexp.MustCompile("`(?:gpu\\.nvidia\\.com|…)/([a-z-]+)`").FindAllStringSubmatch(row[0], -1) {
			documented[m[1]] = true
		}
	}
	for name := range documented {
		if causeOfTaint(name) == nil && name != "withdrawn" && name != "admin-access" && name != "" {
			t.Errorf("no remedy for the taint %s", name)
		}
	}
	for _, c := range causes {
		if !documented[c.taint] {
			t.Errorf("the taint %s does not exist", c.taint)
		}
	}
	if len(documented) < 18 {
		t.Errorf("docs/reference/taints.md has the taints %v only", documented)
	}
}

// TestEvents: the table has all warnings of the driver, and no others; what says that they are over exists, and so do the checks.
func TestEvents(t *testing.T) {
	t.Parallel()
	documented, warnings := map[string]bool{"": true}, 0
	for _, row := range page.Rows(t, "docs/reference/events.md", "event", "type", "of", "what it says", "what to do") {
		name := strings.Trim(row[0], "`")
		documented[name] = true
		if row[1] != corev1.EventTypeWarning {
			continue
		}
		warnings++
		if !slices.ContainsFunc(causes, func(c cause) bool { return c.event == name }) {
			t.Errorf("no cause for the event %s", name)
		}
	}
	for _, c := range causes {
		if !documented[c.event] || !documented[c.over] {
			t.Errorf("%s, %s: nothing writes one of the events", c.event, c.over)
		}
		if c.check != "" && !slices.ContainsFunc(Checks, func(k Check) bool { return k.ID == c.check }) {
			t.Errorf("%s: there is no check %s", c.event, c.check)
		}
		if c.check == "" && !c.past && (c.text == "" || c.remedy == "") {
			t.Errorf("%s: no text, or no remedy", c.event)
		}
	}
	if t.Logf("%d cases", warnings); warnings < 30 {
		t.Errorf("only %d events", warnings)
	}
}
