// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

func gpus(n string, c corev1.Container) corev1.Container {
	c.Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(n), "cpu": resource.MustParse("1")}
	return c
}

// TestExtendedClaim: one request per container that stays, one for the init container that
// wants most beyond what comes after it, and nothing where a device plugin has the resource.
func TestExtendedClaim(t *testing.T) {
	f := fleettest.New(t)
	for i, name := range []string{"old", "new"} {
		class := fleettest.Class(name, "true")
		class.CreationTimestamp = metav1.NewTime(fleettest.Start.AddDate(0, 0, i))
		class.Spec.ExtendedResourceName = new("nvidia.com/gpu")
		f.Classes = append(f.Classes, class)
	}
	p := allocation.New(f.Snapshot)
	sidecar := gpus("1", corev1.Container{RestartPolicy: new(corev1.ContainerRestartPolicyAlways)})
	for name, c := range map[string]struct {
		init, main []corev1.Container
		want       []string
	}{
		"two containers":    {nil, []corev1.Container{gpus("1", corev1.Container{}), gpus("2", corev1.Container{})}, []string{"container-0-request-1 1", "container-1-request-1 2"}},
		"init that is less": {[]corev1.Container{gpus("1", corev1.Container{})}, []corev1.Container{gpus("2", corev1.Container{})}, []string{"container-1-request-1 2"}},
		"init that is more": {[]corev1.Container{gpus("3", corev1.Container{})}, []corev1.Container{gpus("2", corev1.Container{})}, []string{"container-0-request-1 1", "container-1-request-1 2"}},
		"sidecar before":    {[]corev1.Container{sidecar, gpus("2", corev1.Container{})}, []corev1.Container{gpus("1", corev1.Container{})}, []string{"container-0-request-1 1", "container-1-request-1 1", "container-2-request-1 1"}},
		"none":              {nil, []corev1.Container{{}}, nil},
	} {
		pod := f.Pod("a", name)
		pod.Spec.InitContainers, pod.Spec.Containers = c.init, c.main
		var got []string
		if claim := p.Cluster.ExtendedClaim(pod, nil); claim != nil {
			for _, r := range claim.Spec.Devices.Requests {
				got = append(got, fmt.Sprint(r.Name, " ", r.Exactly.Count))
				if r.Exactly.DeviceClassName != "new" {
					t.Errorf("%s: class %s", name, r.Exactly.DeviceClassName)
				}
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
		plugin := &corev1.Node{Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}}}
		if claim := p.Cluster.ExtendedClaim(pod, plugin); claim != nil {
			t.Errorf("%s: a claim where a device plugin offers the resource", name)
		}
	}
}

// TestRuleCovers: no selector is no device, an empty one is all.
func TestRuleCovers(t *testing.T) {
	for name, c := range map[string]struct {
		selector *resourceapi.DeviceTaintSelector
		want     bool
	}{
		"none":   {nil, false},
		"empty":  {&resourceapi.DeviceTaintSelector{}, true},
		"device": {&resourceapi.DeviceTaintSelector{Driver: new("d"), Pool: new("p"), Device: new("x")}, true},
		"pool":   {&resourceapi.DeviceTaintSelector{Pool: new("q")}, false},
	} {
		rule := &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{DeviceSelector: c.selector}}
		if got := fleet.RuleCovers(rule, "d", "p", "x"); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestPoolsOn: the newest generation counts, and says whether it is whole.
func TestPoolsOn(t *testing.T) {
	f := fleettest.New(t)
	node := f.AddNode("n", "h100-80-sxm", 2)
	old := f.Slices
	f.Slices = nil
	for _, s := range old {
		f.Slices = append(f.Slices, s)
		newer := s.DeepCopy()
		newer.Spec.Pool.Generation++
		newer.Name += "-new"
		f.Slices = append(f.Slices, newer)
	}
	f.Slices = f.Slices[:len(f.Slices)-1]
	cluster := allocation.New(f.Snapshot).Cluster
	devices := 0
	for d := range cluster.Devices(node) {
		if !d.Incomplete() || len(d.Slices) != len(old)-1 {
			t.Fatalf("%+v", d.Pool)
		}
		devices++
	}
	if devices == 0 {
		t.Error("no device")
	}
	for d := range cluster.Devices(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}) {
		t.Errorf("%+v", d)
	}
}

// TestObstacles: what keeps a pod off a node, devices aside.
func TestObstacles(t *testing.T) {
	for kind, change := range map[allocation.ObstacleKind]func(*corev1.Pod, *corev1.Node){
		"":                        func(*corev1.Pod, *corev1.Node) {},
		allocation.ByNodeName:     func(p *corev1.Pod, _ *corev1.Node) { p.Spec.NodeName = "other" },
		allocation.ByCordon:       func(_ *corev1.Pod, n *corev1.Node) { n.Spec.Unschedulable = true },
		allocation.ByNodeSelector: func(p *corev1.Pod, _ *corev1.Node) { p.Spec.NodeSelector = map[string]string{"gpu": "h100"} },
		allocation.ByNodeTaint:    func(_ *corev1.Pod, n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "x", Effect: "NoExecute"}} },
		allocation.ByNodeResources: func(_ *corev1.Pod, n *corev1.Node) {
			n.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("1")
		},
		allocation.ByNodeAffinity: func(p *corev1.Pod, _ *corev1.Node) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "gpu", Operator: corev1.NodeSelectorOpExists}}}},
			}}}
		},
	} {
		f := fleettest.New(t)
		node := f.AddNode("n", "h100-80-sxm", 1)
		running := f.Pod("a", "running")
		running.Spec.NodeName = "n"
		running.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
		pod := f.Pod("a", "pod")
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
		change(pod, node)
		got := allocation.New(f.Snapshot).Obstacles(pod, node)
		if kind == "" && len(got) == 0 {
			continue
		}
		if len(got) != 1 || got[0].Kind != kind || got[0].Text == "" {
			t.Errorf("%s: %+v", kind, got)
		}
	}
}

// TestFeatures: what slices show is not assumed.
func TestFeatures(t *testing.T) {
	f := fleettest.New(t)
	if p := allocation.New(f.Snapshot); p.Cluster.Features != allocation.DefaultFeatures || !strings.Contains(p.Cluster.Assumptions[0], "DRAPartitionableDevices") {
		t.Errorf("%+v, %v", p.Cluster.Features, p.Cluster.Assumptions)
	}
	f.AddNode("n", "h100-80-sxm", 1)
	if p := allocation.New(f.Snapshot); strings.Contains(p.Cluster.Assumptions[0], "DRAPartitionableDevices") {
		t.Error(p.Cluster.Assumptions)
	}
	f.Slices[0].Spec.Devices = []resourceapi.Device{{Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"a": {IntValues: []int64{1}}}}}
	if p := allocation.New(f.Snapshot); !p.Cluster.Features.ListTypeAttributes {
		t.Error("list attributes are not seen")
	}
}

// TestClaimsOf: a pod's claims, or why there is none.
func TestClaimsOf(t *testing.T) {
	f := fleettest.New(t)
	claim := f.Claim("a", "claim", fleettest.Request(whole))
	f.Templates = append(f.Templates, &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "template"}})
	pod := f.Pod("a", "pod", fleettest.Uses(claim),
		corev1.PodResourceClaim{Name: "made", ResourceClaimTemplateName: new("template")},
		corev1.PodResourceClaim{Name: "no claim", ResourceClaimName: new("other")},
		corev1.PodResourceClaim{Name: "no template", ResourceClaimTemplateName: new("other")},
		corev1.PodResourceClaim{Name: "not needed", ResourceClaimTemplateName: new("template")},
		corev1.PodResourceClaim{Name: "not owned", ResourceClaimTemplateName: new("template")})
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "not needed"}, {Name: "not owned", ResourceClaimName: new("claim")}}
	got := allocation.ClaimsOf(f.Snapshot, pod)
	if len(got) != 6 || got[0].Claim != claim || got[0].New || !got[1].New || got[1].Claim.Name != "pod-made" || got[4].Claim != nil || got[4].Err != nil {
		t.Errorf("%+v", got)
	}
	for i, want := range map[int]error{2: allocation.ErrNoClaim, 3: allocation.ErrNoTemplate, 5: allocation.ErrNotOwned} {
		if !errors.Is(got[i].Err, want) {
			t.Errorf("%s: %v, want %v", got[i].Name, got[i].Err, want)
		}
	}
}
