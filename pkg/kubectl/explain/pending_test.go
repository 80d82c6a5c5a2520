// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

var update = flag.Bool("update", false, "write golden files")

const (
	mig   = "mig.nvidia.com"
	whole = "gpu.nvidia.com"
	mps   = "mps.partage.dev"
	slice = "timeslice.partage.dev"
)

// now is two days after everything was made.
var now = fleettest.Start.Add(48 * time.Hour)

// pending is a cause for which a pod waits.
type pending struct {
	name string
	// make adds what the case needs to two nodes with two H100, and returns the pod.
	make func(f *fleettest.Fleet) *corev1.Pod
	want Cause
	// helps are the kinds of suggestions that there have to be, in this order.
	helps []SuggestionKind
	// limit is the time limit of a search, if it is not the default.
	limit time.Duration
	// admin are the namespaces that may use admin access.
	forbidAdmin bool
}

// waits makes a pod with a claim of its own.
func waits(requests ...resourceapi.DeviceRequest) func(f *fleettest.Fleet) *corev1.Pod {
	return func(f *fleettest.Fleet) *corev1.Pod {
		return f.Pod("team", "llm", fleettest.Uses(f.Claim("team", "llm", requests...)))
	}
}

// fill takes all GPUs.
func fill(f *fleettest.Fleet) {
	for _, node := range []string{"n1", "n2"} {
		for i := range 2 {
			f.Held("other", fmt.Sprintf("%s-%d", node, i), node, fleettest.Request(whole))
		}
	}
}

func alternatives(all ...resourceapi.DeviceRequest) resourceapi.DeviceRequest {
	r := resourceapi.DeviceRequest{Name: "gpu"}
	for i, one := range all {
		r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: fmt.Sprint("choice-", i), DeviceClassName: one.Exactly.DeviceClassName, Selectors: one.Exactly.Selectors,
			AllocationMode: one.Exactly.AllocationMode, Count: one.Exactly.Count, Capacity: one.Exactly.Capacity,
		})
	}
	return r
}

const memory80 = "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('90Gi')) >= 0"

func taint(f *fleettest.Fleet) {
	f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new(fleettest.Driver)},
		Taint:          resourceapi.DeviceTaint{Key: "maintenance", Value: "firmware", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}})
}

var pendings = []pending{
	{name: "profile misspelt", make: waits(fleettest.Request(mig, fleettest.Profile("1g.5gb"))), want: NotSelected, helps: []SuggestionKind{ChangeValue, ChangeValue, ChangeValue, DropSelector}},
	{name: "partition too large", make: waits(fleettest.Request(mig, memory80)), want: NotSelected, helps: []SuggestionKind{ChangeValue, DropSelector}},
	{name: "share over the limit", make: waits(fleettest.Share(mps, "90Gi", "")), want: CapacityTooLarge, helps: []SuggestionKind{LowerCapacity}},
	{name: "share out of percent", make: waits(fleettest.Share(mps, "10Gi", "101")), want: CapacityTooLarge, helps: []SuggestionKind{LowerCapacity}},
	{name: "capacity that devices do not have", make: func(f *fleettest.Fleet) *corev1.Pod {
		r := fleettest.Share(mps, "10Gi", "")
		r.Exactly.Capacity.Requests["tensorCores"] = resource.MustParse("4")
		return waits(r)(f)
	}, want: CapacityUnknown, helps: []SuggestionKind{DropCapacity}},
	{name: "capacity that partitions do not have", make: waits(fleettest.Share(mig, "10Gi", "25")), want: CapacityUnknown, helps: []SuggestionKind{DropCapacity}},
	{name: "three GPUs of two", make: waits(fleettest.Count(3, whole)), want: TooFewDevices, helps: []SuggestionKind{LowerCount}},
	{name: "more than a claim can have", make: waits(fleettest.Count(33, whole)), want: TooManyResults, helps: []SuggestionKind{LowerCount}},
	{name: "occupied", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		return waits(fleettest.Request(whole))(f)
	}, want: Held, helps: []SuggestionKind{EndClaims}},
	{name: "one free of two", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Held("other", "a", "n1", fleettest.Request(whole))
		f.Held("other", "b", "n2", fleettest.Request(mig))
		return waits(fleettest.Count(2, whole))(f)
	}, want: Held, helps: []SuggestionKind{LowerCount, EndClaims}},
	{name: "partitions in the way", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, node := range []string{"n1", "n2"} {
			f.Held("other", node+"-a", node, fleettest.Request(whole))
			f.Held("other", node+"-b", node, fleettest.Request(mig, fleettest.Profile("1g.10gb")))
			f.Held("other", node+"-c", node, fleettest.Request(mig, fleettest.Profile("2g.20gb")))
		}
		return waits(fleettest.Request(mig, fleettest.Profile("7g.80gb")))(f)
	}, want: CountersUsed, helps: []SuggestionKind{ChangeValue, ChangeValue, ChangeValue, DropSelector, EndClaims}},
	{name: "shares used up", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, node := range []string{"n1", "n2"} {
			f.Held("other", node+"-a", node, fleettest.Request(whole))
			f.Held("other", node+"-b", node, fleettest.Share(mps, "60Gi", "50"))
		}
		return waits(fleettest.Share(mps, "30Gi", "20"))(f)
	}, want: CapacityUsed, helps: []SuggestionKind{LowerCapacity, EndClaims}},
	{name: "selector for whole GPUs in a class of partitions", make: waits(fleettest.Request(mig, "device.capacity['gpu.nvidia.com'].smPercent == quantity('100')")),
		want: ExpressionError, helps: []SuggestionKind{DropSelector}},
	{name: "selector fails", make: waits(fleettest.Request(whole, "device.attributes['gpu.nvidia.com'].nosuch == 'x'")), want: ExpressionError, helps: []SuggestionKind{DropSelector}},
	{name: "class misspelt", make: waits(fleettest.Request("mig.nvidia.con")), want: ClassMissing, helps: []SuggestionKind{ChangeClass}},
	{name: "class of another driver", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Classes = append(f.Classes, fleettest.Class("fpga", "device.driver == 'fpga.example.com'"))
		return waits(fleettest.Request("fpga"))(f)
	}, want: NotOfClass},
	{name: "tainted", make: func(f *fleettest.Fleet) *corev1.Pod {
		taint(f)
		return waits(fleettest.Request(whole))(f)
	}, want: Tainted, helps: []SuggestionKind{AddToleration}},
	{name: "in use by a claim of another driver", make: func(f *fleettest.Fleet) *corev1.Pod {
		taint(f)
		f.TaintRules[0].Spec.Taint.Key, f.TaintRules[0].Spec.Taint.Value = fleettest.Driver+"/foreign-claim", "ml.train"
		return waits(fleettest.Request(whole))(f)
	}, want: Tainted, helps: []SuggestionKind{EndForeignClaim}},
	// What tolerates it gets a GPU that does nothing, and its pod does not start.
	{name: "GPUs that are lost", make: func(f *fleettest.Fleet) *corev1.Pod {
		taint(f)
		f.TaintRules[0].Spec.Taint.Key, f.TaintRules[0].Spec.Taint.Value = fleettest.Driver+"/gpu-lost", ""
		return waits(fleettest.Request(whole))(f)
	}, want: Tainted, helps: []SuggestionKind{EndTaint}},
	{name: "GPUs that are cordoned", make: func(f *fleettest.Fleet) *corev1.Pod {
		taint(f)
		taint(f)
		f.TaintRules[0].Spec.Taint.Key, f.TaintRules[0].Spec.Taint.Value = fleettest.Driver+"/cordoned", ""
		return waits(fleettest.Request(whole))(f)
	}, want: Tainted, helps: []SuggestionKind{EndTaint}},
	{name: "constraint not satisfiable", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Count(2, whole))(f)
		name := resourceapi.FullyQualifiedName(fleettest.Driver + "/uuid")
		f.Claims[0].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &name}}
		return pod
	}, want: NotTogether, helps: []SuggestionKind{LowerCount, DropConstraint}},
	{name: "no pair is free", make: func(f *fleettest.Fleet) *corev1.Pod {
		halfOfEveryPair(f)
		pod := waits(fleettest.Count(2, whole))(f)
		f.Claims[len(f.Claims)-1].Spec.Devices.Constraints = sameAs("gpu.nvidia.com/nvlinkDomain")
		return pod
	}, want: NotTogether, helps: []SuggestionKind{LowerCount, DropConstraint, EndClaims}},
	{name: "network card elsewhere", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, node := range []string{"n1", "n2"} {
			f.AddNetworkCard(node, "nic", "pci0000:47")
		}
		pod := waits(fleettest.Request(whole), named("nic", fleettest.Request("nic")))(f)
		f.Claims[len(f.Claims)-1].Spec.Devices.Constraints = sameAs("resource.kubernetes.io/pcieRoot")
		return pod
	}, want: NotTogether, helps: []SuggestionKind{DropConstraint}},
	{name: "constraint on an attribute that is not there", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		name := resourceapi.FullyQualifiedName("example.com/rack")
		f.Claims[0].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{DistinctAttribute: &name}}
		return pod
	}, want: Unconstrained, helps: []SuggestionKind{DropConstraint}},
	{name: "claims not together", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, node := range []string{"n1", "n2"} {
			f.Held("other", node, node, fleettest.Request(whole))
		}
		one, two := f.Claim("team", "one", fleettest.Request(whole)), f.Claim("team", "two", fleettest.Request(slice))
		second := fleettest.Uses(two)
		second.Name = "second"
		return f.Pod("team", "llm", fleettest.Uses(one), second)
	}, want: NotTogether, helps: []SuggestionKind{EndClaims}},
	{name: "admin access without label", forbidAdmin: true, make: func(f *fleettest.Fleet) *corev1.Pod {
		r := fleettest.Request("observer.partage.dev")
		r.Exactly.AdminAccess = new(true)
		return waits(r)(f)
	}, want: AdminForbidden, helps: []SuggestionKind{LabelNamespace}},
	{name: "nodeSelector excludes", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Nodes[0].Labels["gpu"] = "h100"
		f.Held("other", "a", "n1", fleettest.Count(2, whole))
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.NodeSelector = map[string]string{"gpu": "h100"}
		return pod
	}, want: NodeExcluded, helps: []SuggestionKind{EndClaims, ChangeNode}},
	{name: "node cordoned", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, n := range f.Nodes {
			n.Spec.Unschedulable = true
		}
		return waits(fleettest.Request(whole))(f)
	}, want: NodeExcluded, helps: []SuggestionKind{ChangeNode}},
	{name: "node tainted", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, n := range f.Nodes {
			n.Spec.Taints = []corev1.Taint{{Key: "nvidia.com/gpu", Value: "present", Effect: corev1.TaintEffectNoSchedule}}
		}
		return waits(fleettest.Request(whole))(f)
	}, want: NodeExcluded, helps: []SuggestionKind{ChangeNode}},
	{name: "too little CPU", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("65")}
		return pod
	}, want: NodeExcluded, helps: []SuggestionKind{ChangeNode}},
	{name: "pool incomplete", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices = f.Slices[1:4]
		return waits(fleettest.Request(whole))(f)
	}, want: PoolIncomplete},
	{name: "no slices", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Slices = nil
		return waits(fleettest.Request(whole))(f)
	}, want: NoSlices, helps: []SuggestionKind{InstallDriver}},
	{name: "claim does not exist", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Claim("team", "training", fleettest.Request(whole))
		return f.Pod("team", "llm", corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: new("trainin")})
	}, want: ClaimMissing, helps: []SuggestionKind{ChangeReference, CreateObject}},
	{name: "template does not exist", make: func(f *fleettest.Fleet) *corev1.Pod {
		return f.Pod("team", "llm", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("one-gpu")})
	}, want: TemplateMissing, helps: []SuggestionKind{CreateObject}},
	{name: "scheduling gate", make: func(f *fleettest.Fleet) *corev1.Pod {
		pod := waits(fleettest.Request(whole))(f)
		pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/quota"}}
		return pod
	}, want: Gated, helps: []SuggestionKind{RemoveGates}},
	{name: "claim of another pod", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Claim("team", "llm-gpu-x", fleettest.Request(whole))
		pod := f.Pod("team", "llm", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("one-gpu")})
		pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: new("llm-gpu-x")}}
		return pod
	}, want: ClaimNotOwned},
	{name: "claim used by too many", make: func(f *fleettest.Fleet) *corev1.Pod {
		c := f.Held("team", "shared", "n1", fleettest.Request(whole))
		for range 255 {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: "u"})
		}
		return f.Pod("team", "llm", fleettest.Uses(c))
	}, want: ClaimFull},
	{name: "claim on a node that the pod may not use", make: func(f *fleettest.Fleet) *corev1.Pod {
		c := f.Held("team", "shared", "n1", fleettest.Request(whole))
		pod := f.Pod("team", "llm", fleettest.Uses(c))
		pod.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "n2"}
		return pod
	}, want: NodeExcluded, helps: []SuggestionKind{ChangeNode}},
	{name: "search too long", limit: 1, make: waits(fleettest.Request(whole)), want: SearchTooLong},
	{name: "extended resource", make: func(f *fleettest.Fleet) *corev1.Pod {
		fill(f)
		for _, c := range f.Classes {
			if c.Name == whole {
				c.Spec.ExtendedResourceName = new("nvidia.com/gpu")
			}
		}
		pod := f.Pod("team", "llm")
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		return pod
	}, want: Held, helps: []SuggestionKind{EndClaims}},
	{name: "extended resource of old nodes", make: func(f *fleettest.Fleet) *corev1.Pod {
		for _, c := range f.Classes {
			if c.Name == whole {
				c.Spec.ExtendedResourceName = new("nvidia.com/gpu")
				c.Spec.Selectors = append(c.Spec.Selectors, fleettest.Selectors("has(device.attributes['"+fleettest.Driver+"'].extendedResources)")...)
			}
		}
		f.Nodes[0].Status.NodeInfo.KubeletVersion, f.Nodes[1].Status.NodeInfo.KubeletVersion = "v1.35.9", ""
		pod := f.Pod("team", "llm")
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		return pod
	}, want: NotOfClass},
	{name: "all alternatives fail", make: waits(alternatives(fleettest.Request(mig, memory80), fleettest.Count(3, whole))), want: NotSelected, helps: []SuggestionKind{ChangeValue, DropSelector, LowerCount}},
	{name: "all devices of a node in use", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Held("other", "a", "n1", fleettest.Request(whole))
		f.Held("other", "b", "n2", fleettest.Request(whole))
		r := fleettest.Request(whole)
		r.Exactly.AllocationMode, r.Exactly.Count = resourceapi.DeviceAllocationModeAll, 0
		return waits(r)(f)
	}, want: Held, helps: []SuggestionKind{EndClaims}},
	{name: "template not made into a claim yet", make: func(f *fleettest.Fleet) *corev1.Pod {
		f.Templates = append(f.Templates, &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "huge"}})
		f.Templates[0].Spec.Spec.Devices.Requests = []resourceapi.DeviceRequest{fleettest.Count(9, whole)}
		return f.Pod("team", "llm", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("huge")})
	}, want: TooFewDevices, helps: []SuggestionKind{LowerCount}},
}

// TestPending: the right cause is named first, and what would help was confirmed.
func TestPending(t *testing.T) {
	names := map[string]bool{}
	for _, c := range pendings {
		names[c.name] = true
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 2)
			f.AddNode("n2", "h100-80-sxm", 2)
			pod := c.make(f)
			// However busy the machine is, nothing is stopped but what has to be.
			x := within(f, cmp.Or(c.limit, time.Hour))
			x.budget, x.tryFor = time.Hour, time.Hour
			x.AdminAllowed = func(string) (bool, bool) { return !c.forbidAdmin, true }
			e := x.Pod(t.Context(), pod)
			if e.Verdict != Waits || len(e.Reasons) == 0 || e.Reasons[0].Cause != c.want {
				t.Errorf("%s, reasons %+v, want %s", e.Verdict, e.Reasons, c.want)
			}
			var helps []SuggestionKind
			for _, s := range e.Suggestions {
				helps = append(helps, s.Kind)
			}
			if diff := gocmp.Diff(c.helps, helps); diff != "" {
				t.Errorf("suggestions -want +got:\n%s", diff)
			}
			golden(t, "pending/"+strings.ReplaceAll(c.name, " ", "-")+".txt", printed(t, e))
		})
	}
	if len(names) < 30 {
		t.Errorf("%d causes", len(names))
	}
}

func text(t *testing.T, all ...*Explanation) string {
	t.Helper()
	var out bytes.Buffer
	if err := View(all...).Write(&out, printer.Format{}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// printed is the text as the command prints it.
func printed(t *testing.T, all ...*Explanation) string {
	t.Helper()
	var out bytes.Buffer
	if err := View(all...).Write(&out, printer.Format{Width: printer.Width}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s, -want +got:\n%s", file, diff)
	}
}

// TestTaintsApart: devices are counted for what taints each of them.
func TestTaintsApart(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 4)
	for device, keys := range map[string][]string{"1b": {"xid", "gpu-lost"}, "28": {"gpu-lost"}, "35": {"xid"}, "42": {"xid"}} {
		for _, key := range keys {
			f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
				DeviceSelector: &resourceapi.DeviceTaintSelector{Device: new("gpu-0000-" + device + "-00-0")},
				Taint:          resourceapi.DeviceTaint{Key: key, Effect: resourceapi.DeviceTaintEffectNoSchedule},
			}})
		}
	}
	claim := f.Claim("team", "llm", fleettest.Request(whole))
	got := text(t, New(fleet.New(f.Snapshot, fleettest.Driver), now).Claim(t.Context(), claim))
	want := "4 of 4 matching devices are tainted: xid:NoSchedule (2), gpu-lost:NoSchedule (1), xid:NoSchedule and gpu-lost:NoSchedule (1)"
	if !strings.Contains(got, want) {
		t.Errorf("want %q in:\n%s", want, got)
	}
}
