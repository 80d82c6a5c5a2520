// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestAllocated: what a pod got.
func TestAllocated(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 2)
	claim := f.Held("team", "llm", "n1", fleettest.Request(mig, fleettest.Profile("2g.20gb")), fleettest.Share(mps, "10Gi", "25"))
	r := claim.Status.Allocation.Devices.Results[1]
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: r.Driver, Pool: r.Pool, Device: r.Device, ShareID: new(string(*r.ShareID)),
		Conditions: []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue, Message: "MPS accepts processes"}},
		Data:       &runtime.RawExtension{Raw: []byte(`{"limits":{"memory":"10Gi"}}`)},
	}}
	x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
	for _, argument := range []string{"llm", "pod/llm", "claim/llm", "resourceclaim/llm"} {
		all, err := x.Named(t.Context(), "team", argument)
		if err != nil {
			t.Fatal(err)
		}
		e := all[0]
		if e.Verdict != Allocated || e.Found() {
			t.Errorf("%s: %s", argument, e.Verdict)
		}
		golden(t, "allocated/"+strings.ReplaceAll(argument, "/", "-")+".txt", printed(t, e))
	}
	for argument, want := range map[string]string{
		"other":       "there is no pod or claim other in namespace team",
		"claim/other": "there is no claim other in namespace team",
		"node/llm":    "the kind must be pod, claim, deployment",
		"job/llm":     "there is no pod of job llm in namespace team",
	} {
		if _, err := x.Named(t.Context(), "team", argument); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", argument, err)
		}
	}
}

// TestTainted: who has a device that is lost is told of it, and who is evicted: Kubernetes leaves pods alone that ask for an extended resource.
func TestTainted(t *testing.T) {
	for name, c := range map[string]struct {
		reason, value string
		effect        resourceapi.DeviceTaintEffect
		extended      bool
		tolerated     bool
		says          string
	}{
		"lost":              {"gpu-lost", "", resourceapi.DeviceTaintEffectNoSchedule, false, false, "gpu-lost:NoSchedule: lost. It keeps new claims away, and evicts no pod"},
		"lost, extended":    {"gpu-lost", "", resourceapi.DeviceTaintEffectNoSchedule, true, false, "gpu-lost:NoSchedule: lost. It keeps new claims away, and evicts no pod"},
		"evicted":           {"xid", "79", resourceapi.DeviceTaintEffectNoExecute, false, false, "xid=79:NoExecute: XID 79. It evicts the pods that use the claim\n"},
		"tolerated":         {"xid", "79", resourceapi.DeviceTaintEffectNoExecute, false, true, "xid=79:NoExecute: XID 79. The claim tolerates it\n"},
		"evicted, extended": {"xid", "79", resourceapi.DeviceTaintEffectNoExecute, true, false, "extended resource (kubernetes#141290): kubectl delete pod -n team llm\n"},
		"no effect":         {"row-remap-pending", "", resourceapi.DeviceTaintEffectNone, false, false, "row-remap-pending:None: memory will be repaired at the next reset\n"},
		"admin access":      {"admin-access", "", resourceapi.DeviceTaintEffectNoSchedule, false, false, ""},
		"not published":     {says: "not published: no ResourceSlice has it"},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		claim, pod := f.Held("team", "llm", "n1", fleettest.Request(whole)), f.Pods[0]
		result := &claim.Status.Allocation.Devices.Results[0]
		if c.reason == "" {
			result.Device = "gpu-gone"
		} else {
			f.TaintRules = append(f.TaintRules, &resourceapi.DeviceTaintRule{Spec: resourceapi.DeviceTaintRuleSpec{
				DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new(fleettest.Driver)},
				Taint:          resourceapi.DeviceTaint{Key: fleettest.Driver + "/" + c.reason, Value: c.value, Effect: c.effect},
			}})
		}
		if c.tolerated {
			result.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists, Effect: c.effect}}
		}
		if c.extended {
			claim.Annotations = map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
			pod.Spec.ResourceClaims = nil
			pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: claim.Name}
		}
		x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
		for _, e := range []*Explanation{x.Pod(t.Context(), pod), x.Claim(t.Context(), claim)} {
			got := text(t, e)
			if !strings.Contains(got, c.says) || strings.Contains(got, "some are tainted or not published") != (c.says != "") ||
				strings.Contains(got, "141290") != strings.Contains(c.says, "141290") {
				t.Errorf("%s: want %q in:\n%s", name, c.says, got)
			}
		}
	}
}

// TestTolerates: only tolerations of the effect itself keep pods from being evicted, and those with seconds for so long, as in Kubernetes.
func TestTolerates(t *testing.T) {
	const evicts = "evicts the pods that use the claim"
	seconds := func(n int64) resourceapi.DeviceToleration {
		return resourceapi.DeviceToleration{
			Operator: resourceapi.DeviceTolerationOpExists, Effect: resourceapi.DeviceTaintEffectNoExecute, TolerationSeconds: &n,
		}
	}
	forever := seconds(0)
	forever.TolerationSeconds = nil
	for says, tolerations := range map[string][]resourceapi.DeviceToleration{
		". The claim tolerates it\n":                                 {seconds(300), forever},
		". The claim tolerates it for 30 seconds. Then it " + evicts: {seconds(300), seconds(30)},
		". It " + evicts: {{Operator: resourceapi.DeviceTolerationOpExists}},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.Held("team", "llm", "n1", fleettest.Request(whole)).Status.Allocation.Devices.Results[0].Tolerations = tolerations
		taint(f)
		f.TaintRules[0].Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
		if got := text(t, New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pods[0])); !strings.Contains(got, says) {
			t.Errorf("want %q in:\n%s", says, got)
		}
	}
}

// TestHalfWritten: while the ResourceSlices of a pool are written anew, what it has is not known.
func TestHalfWritten(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 8)
	f.Held("team", "llm", "n1", fleettest.Request(whole))
	f.Slices[0].Spec.Pool.Generation++
	got := text(t, New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pods[0]))
	if strings.Contains(got, "not published") || !strings.Contains(got, "unknown") {
		t.Errorf("a slice has the device:\n%s", got)
	}
}

// TestTaintedTogether: a taint keeps no pod from a claim that has its device already.
func TestTaintedTogether(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	claim := f.Held("team", "llm", "n1", fleettest.Request(whole))
	taint(f)
	got := text(t, New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pod("team", "second", fleettest.Uses(claim))))
	if !strings.Contains(got, "can be allocated now") || strings.Contains(got, "keeps new pods away") {
		t.Errorf("it is not kept away:\n%s", got)
	}
}

// TestEnded: a pod that has failed, or is being deleted, is said to be so, and by what.
func TestEnded(t *testing.T) {
	deleted := new(metav1.NewTime(now.Add(20 * time.Second)))
	by := []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: "DeletionByDeviceTaintManager", Message: "deleting due to NoExecute taint"}}
	const manager, failed = "DeletionByDeviceTaintManager: deleting due to NoExecute taint", "has failed, and needs its devices no more."
	for name, c := range map[string]struct {
		status  corev1.PodStatus
		deleted *metav1.Time
		says    []string
	}{
		"evicted by the kubelet": {corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted", Message: "The node was low on memory."}, nil, []string{failed, "Evicted: The node was low on memory."}},
		"evicted by a taint":     {corev1.PodStatus{Phase: corev1.PodFailed, Conditions: by}, nil, []string{failed, manager}},
		"being evicted":          {corev1.PodStatus{Phase: corev1.PodRunning, Conditions: by}, deleted, []string{"is being deleted, and keeps what devices it has until it has ended.", manager}},
		"being deleted":          {corev1.PodStatus{Phase: corev1.PodRunning}, deleted, []string{"is being deleted", "does not say by whom"}},
		"out of memory": {corev1.PodStatus{Phase: corev1.PodFailed, ContainerStatuses: []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled"}}}}}, nil, []string{failed, "container main ended with exit code 137: OOMKilled"}},
		"failed":  {corev1.PodStatus{Phase: corev1.PodFailed}, nil, []string{failed, "does not say by whom"}},
		"success": {corev1.PodStatus{Phase: corev1.PodSucceeded}, nil, []string{"has ended, and needs its devices no more."}},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.Held("team", "llm", "n1", fleettest.Request(whole))
		f.Pods[0].Status, f.Pods[0].DeletionTimestamp = c.status, c.deleted
		e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), f.Pods[0])
		got := text(t, e)
		for _, part := range c.says {
			if !strings.Contains(got, part) || e.Found() || (len(e.Reasons) > 0) != (len(c.says) > 1) {
				t.Errorf("%s: want %q in:\n%s", name, part, got)
			}
		}
	}
}

// TestDeletedBy: with what a container has ended an hour ago does not delete a pod, and one that never got its devices has none.
func TestDeletedBy(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("team", "llm", "n1", fleettest.Request(whole))
	f.Pods[0].Status.ContainerStatuses = []corev1.ContainerStatus{
		{Name: "main", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}},
		{Name: "sync", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			ExitCode: 1, Reason: "Error", FinishedAt: metav1.NewTime(now.Add(-time.Hour)),
		}}},
	}
	f.Pod("team", "never", fleettest.Uses(f.Claim("team", "never", fleettest.Request(whole)))).Spec.NodeName = "n1"
	for _, pod := range f.Pods {
		pod.DeletionTimestamp = new(metav1.NewTime(now.Add(20 * time.Second)))
		got := text(t, New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod))
		if !strings.Contains(got, noReasonGiven) || strings.Contains(got, "has its devices") {
			t.Errorf("%s", got)
		}
	}
}

// TestAllocatable: a claim that fits waits for a pod, a pod that fits for the scheduler.
func TestAllocatable(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	claim := f.Claim("team", "llm", fleettest.Share(mps, "10", ""))
	pod := f.Pod("team", "llm", fleettest.Uses(claim))
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/1 nodes are available: 1 cannot allocate all claims."}}
	plain := f.Pod("team", "plain")
	x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
	golden(t, "allocatable/claim.txt", printed(t, x.Claim(t.Context(), claim)))
	golden(t, "allocatable/pod.txt", printed(t, x.Pod(t.Context(), pod)))
	golden(t, "allocatable/plain.txt", printed(t, x.Pod(t.Context(), plain)))
}

// TestUnreadable: what cannot be read is no reason, and the right that is missing is named.
func TestUnreadable(t *testing.T) {
	for _, missing := range []fleet.Missing{
		{Resource: fleet.ResourceSlices, Err: errors.New("forbidden")},
		{Resource: fleet.ResourceClasses, Err: errors.New("forbidden")},
		{Resource: fleet.ResourceTemplates, Namespace: "team", Err: errors.New("forbidden")},
	} {
		f := fleettest.New(t)
		f.Missing = []fleet.Missing{missing}
		pod := f.Pod("team", "llm", corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: new("one")})
		if missing.Resource != fleet.ResourceTemplates {
			f.Templates = []*resourceapi.ResourceClaimTemplate{{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "one"}}}
		}
		e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod)
		if e.Verdict != Unknown || len(e.Reasons) > 0 || !strings.Contains(text(t, e), "cannot list "+missing.Resource) {
			t.Errorf("%s: %s, %+v", missing.Resource, e.Verdict, e.Reasons)
		}
	}
}

// TestWaitingUnread: that nothing waits is said only of pods that were read.
func TestWaitingUnread(t *testing.T) {
	for _, c := range []struct{ asked, read, want string }{
		{"", "", "All namespaces may have pods that wait: that is unknown."},
		{"team", "", "Namespace team may have pods that wait: that is unknown."},
		{"team", "team", "No pod that can be read waits"},
	} {
		f := fleettest.New(t)
		forbidden(f, fleet.ResourcePods)
		f.Namespace = c.asked
		if c.asked != c.read {
			f.Missing = append(f.Missing, fleet.Missing{Resource: fleet.ResourcePods, Namespace: c.asked, Err: f.Missing[0].Err})
		}
		all := New(fleet.New(f.Snapshot, fleettest.Driver), now).Waiting(t.Context(), c.asked)
		got, unknown := text(t, all...), strings.Contains(c.want, "unknown")
		if !strings.Contains(got, c.want) || unknown != strings.Contains(got, "cannot list pods") || unknown != (len(all) > 0 && all[0].Found()) {
			t.Errorf("%+v:\n%s", c, got)
		}
	}
}

// TestUncreated: a workload whose pods cannot be created is found by the events of what makes them.
func TestUncreated(t *testing.T) {
	failed := func(kind, name string, ago time.Duration) corev1.Event {
		return corev1.Event{
			InvolvedObject: corev1.ObjectReference{Kind: kind, Namespace: "team", Name: name}, LastTimestamp: metav1.NewTime(now.Add(-ago)),
			Message: `Error creating: pods "x" is forbidden: exceeded quota: small`,
		}
	}
	asks := corev1.PodTemplateSpec{Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("one")}}}}
	for name, c := range map[string]struct {
		event corev1.Event
		// owner is what makes the pods, nil if it may not be read.
		owner runtime.Object
		// argument is what is asked for, "" for what waits.
		argument string
		// pod is when a pod of it was created, if one was.
		pod  time.Duration
		says string
	}{
		"a ReplicaSet":       {event: failed("ReplicaSet", "qd-5d4", time.Minute), owner: &appsv1.ReplicaSet{Spec: appsv1.ReplicaSetSpec{Template: asks}}, says: "ReplicaSet team/qd-5d4 waits: its pods cannot be created."},
		"for no devices":     {event: failed("ReplicaSet", "qd-5d4", time.Minute), owner: &appsv1.ReplicaSet{}},
		"may not be read":    {event: failed("Job", "qd", time.Minute), says: "Whether it asks for devices is unknown: forbidden"},
		"long ago":           {event: failed("Job", "qd", time.Hour)},
		"over":               {event: failed("Job", "qd", 2*time.Minute), pod: time.Minute},
		"over before":        {event: failed("Job", "qd", time.Minute), pod: 2 * time.Minute, says: "Job team/qd waits"},
		"a Deployment":       {event: failed("ReplicaSet", "qd-5d4", time.Minute), argument: "deploy/qd", says: "exceeded quota: small (60s ago)"},
		"another Deployment": {event: failed("ReplicaSet", "qd-two-5d4", time.Minute), argument: "deploy/qd"},
		"a Job":              {event: failed("Job", "qd", time.Minute), argument: "job/qd", says: "with a larger quota: kubectl describe quota -n team"},
		"something else":     {event: failed("Set", "qd", time.Minute)},
		"another kind":       {event: failed("StatefulSet", "qd", time.Minute), argument: "job/qd"},
	} {
		f := fleettest.New(t)
		if c.pod != 0 {
			pod := f.Pod("team", "qd-x")
			pod.CreationTimestamp = metav1.NewTime(now.Add(-c.pod))
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: "Job", Name: "qd", Controller: new(true)}}
		}
		x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
		x.Failed = func(string) ([]corev1.Event, error) {
			return []corev1.Event{failed(c.event.InvolvedObject.Kind, c.event.InvolvedObject.Name, 2*time.Hour), c.event}, nil
		}
		x.Owner = func(corev1.ObjectReference) (runtime.Object, error) {
			if c.owner == nil {
				return nil, errors.New("forbidden")
			}
			return c.owner, nil
		}
		all := x.Waiting(t.Context(), "team")
		if c.argument != "" {
			var err error
			if all, err = x.Named(t.Context(), "team", c.argument); (err == nil) != (c.says != "") {
				t.Errorf("%s: %v", name, err)
			}
		}
		if got := text(t, all...); len(all) != min(1, len(c.says)) || !strings.Contains(got, c.says) || len(all) > 0 && !all[0].Found() {
			t.Errorf("%s: want %q in:\n%s", name, c.says, got)
		}
	}
}

const manifest = `
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: huge}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: gpu.nvidia.com
          count: 9
---
apiVersion: %s
kind: %s
metadata: {name: train}
spec:%s
      containers:
      - name: main
        image: main
        resources: {claims: [{name: gpu}]}
      resourceClaims:
      - name: gpu
        resourceClaimTemplateName: huge
`

// TestManifest: workloads of a file stand for their pods.
func TestManifest(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 2)
	template := "\n  template:\n    spec:"
	for kind, c := range map[string]struct{ version, spec string }{
		"Deployment":  {"apps/v1", template},
		"StatefulSet": {"apps/v1", template},
		"DaemonSet":   {"apps/v1", template},
		"Job":         {"batch/v1", template},
		"CronJob":     {"batch/v1", "\n  jobTemplate: {spec: {template: {spec: {containers: [{name: main}], resourceClaims: [{name: gpu, resourceClaimTemplateName: huge}]}}}}\n#"},
	} {
		text := fmt.Sprintf(manifest, c.version, kind, c.spec)
		if before, _, cut := strings.Cut(text, "\n#"); cut {
			text = before
		}
		m, err := Parse([]byte(text), "team")
		if err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		all := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now).Manifest(t.Context(), m)
		if len(all) != 1 || all[0].Subject != (Subject{"Pod", "team", "train"}) || all[0].Verdict != Waits || all[0].Reasons[0].Cause != TooFewDevices {
			t.Errorf("%s: %+v", kind, all)
		}
	}
	m, err := Parse([]byte(strings.Split(manifest, "---")[1]), "team")
	if err != nil {
		t.Fatal(err)
	}
	all := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now).Manifest(t.Context(), m)
	if len(all) != 1 || all[0].Subject.Kind != "ResourceClaimTemplate" || all[0].Reasons[0].Cause != TooFewDevices {
		t.Errorf("%+v", all)
	}
}

// TestReplicas: of a workload with several pods, it is said how many fit, or that this was not looked at.
func TestReplicas(t *testing.T) {
	template := "\n  template:\n    spec:"
	replicas := "\n  replicas: %d" + template
	const hidden = "\n  # hidden" // claims of others are
	for _, c := range []struct {
		version, kind, spec, want string
		named                     bool
		cpu                       string
		verdict                   Verdict
	}{
		{"apps/v1", "Deployment", template, "It fits on node n1.\n", false, "1", Allocatable},
		{"apps/v1", "Deployment", fmt.Sprintf(replicas, 2), "All 2 pods of the workload fit at once.", false, "1", Allocatable},
		{"apps/v1", "Deployment", hidden + fmt.Sprintf(replicas, 2), "All 2 pods of the workload may fit at once, but", false, "1", Unknown},
		{"apps/v1", "Deployment", hidden + fmt.Sprintf(replicas, 3), "at most 2 of the workload's 3 pods fit at once", false, "1", Waits},
		{"apps/v1", "StatefulSet", fmt.Sprintf(replicas, 10), "2 of the workload's 10 pods fit at once", false, "1", Waits},
		{"apps/v1", "ReplicaSet", fmt.Sprintf(replicas, 2), "1 of the workload's 2 pods fits at once", false, "40", Waits},
		{"batch/v1", "Job", "\n  parallelism: 5\n  completions: 3" + template, "2 of the workload's 3 pods fit at once", false, "1", Waits},
		{"batch/v1", "Job", "\n  completions: 3" + template, "It fits on node n1.\n", false, "1", Allocatable},
		{"apps/v1", "Deployment", fmt.Sprintf(replicas, 10), "All 10 pods of the workload fit at once.", true, "1", Allocatable},
		{"apps/v1", "Deployment", fmt.Sprintf(replicas, 10), "1 of the workload's 10 pods fits at once", true, "40", Waits},
	} {
		text1 := strings.ReplaceAll(fmt.Sprintf(manifest, c.version, c.kind, c.spec), "count: 9", "count: 1")
		text1 = strings.ReplaceAll(text1, "resources: {claims", "resources: {requests: {cpu: "+c.cpu+"}, claims")
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 2)
		if strings.HasPrefix(c.spec, hidden) {
			forbidden(f, fleet.ResourceClaims)
		}
		if c.named {
			f.Claim("team", "one", fleettest.Request(whole))
			text1 = strings.ReplaceAll(text1, "resourceClaimTemplateName: huge", "resourceClaimName: one")
		}
		m, err := Parse([]byte(text1), "team")
		if err != nil {
			t.Fatal(err)
		}
		all := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now).Manifest(t.Context(), m)
		if got := text(t, all...); all[0].Verdict != c.verdict || !strings.Contains(got, c.want) || strings.Contains(got, "pods") != strings.Contains(c.want, "pods") {
			t.Errorf("%s, want %s, %q in:\n%s", all[0].Verdict, c.verdict, c.want, got)
		}
	}
}

// TestReplicasUnknown: of what could contradict that all pods fit, and was not looked at, nothing fits.
func TestReplicasUnknown(t *testing.T) {
	deployment := func(name string, replicas int) string {
		text := fmt.Sprintf(manifest, "apps/v1", "Deployment", fmt.Sprintf("\n  replicas: %d\n  template:\n    spec:", replicas))
		return strings.ReplaceAll(strings.ReplaceAll(text, "count: 9", "count: 1"), "name: train", "name: "+name)
	}
	other := func(name string, replicas int) string {
		return strings.ReplaceAll(deployment(name, replicas), "huge", "other")
	}
	shared := func(name string, replicas int) string {
		return strings.ReplaceAll(deployment(name, replicas), "resourceClaimTemplateName: huge", "resourceClaimName: shared")
	}
	for name, c := range map[string]struct {
		file     string
		quotas   []string
		old      int
		verdicts []Verdict
		says     string
	}{
		"no quota":                   {deployment("a", 3), nil, 0, []Verdict{Allocatable}, "All 3 pods of the workload fit at once."},
		"a quota":                    {deployment("a", 3), []string{"team"}, 0, []Verdict{Unknown}, "whether quota team allows all 3 pods"},
		"a quota, one pod":           {deployment("a", 1), []string{"team"}, 0, []Verdict{Allocatable}, "It fits on node n1."},
		"more pods than there are":   {deployment("train", 9), nil, 1, []Verdict{Unknown}, "whether all 9 pods of the workload fit, which has 1"},
		"two objects that fit":       {deployment("a", 2) + "\n---\n" + deployment("b", 2), nil, 0, []Verdict{Allocatable, Allocatable}, "fit at once."},
		"the first fits in part":     {deployment("a", 5) + "\n---\n" + deployment("b", 1), nil, 0, []Verdict{Waits, Unknown}, "beside the other objects of the file"},
		"the first never fits":       {strings.ReplaceAll(deployment("a", 1), "count: 1", "count: 9") + "\n---\n" + other("b", 4), nil, 0, []Verdict{Waits, Allocatable}, "All 4 pods"},
		"the first is not known":     {strings.ReplaceAll(deployment("a", 1), "TemplateName: huge", "TemplateName: none") + "\n---\n" + other("b", 1), nil, 0, []Verdict{Waits, Unknown}, "what a would take is unknown"},
		"the first has pods":         {deployment("train", 1) + "\n---\n" + deployment("b", 4), nil, 1, []Verdict{Allocatable, Unknown}, "what train would take is unknown"},
		"the first shares a claim":   {shared("a", 3) + "\n---\n" + deployment("b", 4), nil, 0, []Verdict{Allocatable, Unknown}, "All 3 pods"},
		"both share a claim":         {shared("a", 3) + "\n---\n" + shared("b", 3) + "\n---\n" + deployment("c", 3), nil, 0, []Verdict{Allocatable, Allocatable, Allocatable}, "All 3 pods"},
		"two objects, one too large": {deployment("a", 3) + "\n---\n" + deployment("b", 2), nil, 0, []Verdict{Allocatable, Unknown}, "beside the other objects of the file"},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 4+c.old)
		f.Claim("team", "shared", fleettest.Request(whole))
		for range c.old {
			f.Held("team", "old", "n1", fleettest.Request(whole))
			old := f.Pods[len(f.Pods)-1]
			old.Labels = map[string]string{"pod-template-hash": "5d4"}
			old.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "train-5d4", Controller: new(true)}}
		}
		m, err := Parse([]byte(c.file), "team")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		x := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now)
		x.Quotas = func(string) ([]string, error) { return c.quotas, nil }
		all := x.Manifest(t.Context(), m)
		var verdicts []Verdict
		for _, e := range all {
			verdicts = append(verdicts, e.Verdict)
		}
		if got := text(t, all...); !slices.Equal(verdicts, c.verdicts) || !strings.Contains(got, c.says) {
			t.Errorf("%s: %v, want %v and %q in:\n%s", name, verdicts, c.verdicts, c.says, got)
		}
	}
}

// TestExists: what the pods of a workload have that a file changes is free for its new ones where these start only after the old ones have ended.
func TestExists(t *testing.T) {
	const stuck = "# a pod of it waits\n  "
	for _, c := range []struct {
		kind, strategy string
		verdict        Verdict
		says           string
	}{
		{"Deployment", "strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}", Allocatable, "old ends before a new pod starts: what it has counts as free"},
		{"Deployment", "strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 0}}", Allocatable, "old ends before a new pod starts: what it has counts as free"},
		{"Deployment", "strategy: {type: Recreate}", Allocatable, "old ends before a new pod starts: what it has counts as free"},
		{"Deployment", "replicas: 4", Waits, "with maxSurge 0 and maxUnavailable 4"}, // three of four have to stay
		{"Deployment", "replicas: 1", Waits, "train waits for its own predecessor"},
		{"Deployment", "strategy: {rollingUpdate: {maxUnavailable: 50%}}", Waits, "as long as its pod template stays the same"},
		{"StatefulSet", "replicas: 1", Allocatable, "old ends before a new pod starts: what it has counts as free"},
		{"DaemonSet", "minReadySeconds: 1", Allocatable, "old ends before a new pod starts: what it has counts as free"},
		{"DaemonSet", "updateStrategy: {rollingUpdate: {maxSurge: 1}}", Waits, "is taken"},
		{"ReplicaSet", "replicas: 1", Waits, "is taken"},
		{"Deployment", stuck + "strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}", Allocatable, "update, old ends before a new pod"},
		{"Deployment", stuck + "strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}", Waits, "with maxSurge 0 and maxUnavailable 1"},
		{"Deployment", stuck + "replicas: 2\n  strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}", Waits, "and maxUnavailable 2"},
		{"StatefulSet", stuck + "replicas: 2", Waits, "is taken"},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		var pending *corev1.Pod
		if strings.HasPrefix(c.strategy, stuck) {
			pending = f.Pod("team", "before-old")
		}
		claim := f.Held("team", "old", "n1", fleettest.Request(whole))
		old := f.Pods[len(f.Pods)-1]
		claim.OwnerReferences = []metav1.OwnerReference{{Kind: "Pod", Name: old.Name, UID: old.UID, Controller: new(true)}}
		old.OwnerReferences = []metav1.OwnerReference{{Kind: c.kind, Name: "train", Controller: new(true)}}
		if c.kind == "Deployment" {
			old.Labels = map[string]string{"pod-template-hash": "5d4"}
			old.OwnerReferences[0].Kind, old.OwnerReferences[0].Name = "ReplicaSet", "train-5d4"
		}
		if pending != nil {
			pending.Labels, pending.OwnerReferences = old.Labels, old.OwnerReferences
		}
		m, err := Parse([]byte(strings.ReplaceAll(fmt.Sprintf(manifest, "apps/v1", c.kind, "\n  "+c.strategy+"\n  template:\n    spec:"), "count: 9", "count: 1")), "team")
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // as with --watch
			x := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now)
			x.Refused = func(o *unstructured.Unstructured) (refused, unseen string) {
				if o.GetKind() == "Pod" && len(o.GetOwnerReferences()) > 0 {
					t.Errorf("the API server is asked about a pod of %v", o.GetOwnerReferences())
				}
				if o.GetKind() == "Pod" && c.verdict == Allocatable {
					return "exceeded quota: pods", "" // by the old pod
				}
				return "", ""
			}
			if all := x.Manifest(t.Context(), m); all[0].Verdict != c.verdict || !strings.Contains(text(t, all...), c.says) {
				t.Errorf("%+v:\n%s", c, text(t, all...))
			}
		}
	}
}

// TestFileHasObjects: what a file has counts as existing.
func TestFileHasObjects(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	spec := strings.ReplaceAll(fmt.Sprintf(manifest, "apps/v1", "Deployment", "\n  template:\n    spec:"), "count: 9", "count: 1")
	spec = strings.ReplaceAll(spec, "image: main", "envFrom: [{configMapRef: {name: settings}}]")
	m, err := Parse([]byte(spec), "team")
	if err != nil {
		t.Fatal(err)
	}
	x := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now)
	x.Exists = func(kind, namespace, name string) (bool, error) {
		t.Errorf("%s %s/%s is read", kind, namespace, name)
		return false, nil
	}
	if all := x.Manifest(t.Context(), m); all[0].Verdict != Allocatable {
		t.Error(text(t, all...))
	}
}

// TestPodExists: a pod that is there keeps what it has.
func TestPodExists(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	claim := f.Held("team", "train-gpu-x", "n1", fleettest.Request(whole))
	pod := f.Pods[0]
	pod.Name, pod.Status.ResourceClaimStatuses = "train", []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim.Name}}
	claim.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID, Controller: new(true)}}
	m, err := Parse([]byte(strings.ReplaceAll(fmt.Sprintf(manifest, "v1", "Pod", ""), "count: 9", "count: 1")), "team")
	if err != nil {
		t.Fatal(err)
	}
	x := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now)
	x.Refused = func(o *unstructured.Unstructured) (refused, unseen string) {
		if o.GetKind() == "ResourceClaim" {
			return "exceeded quota: claims", ""
		}
		return "", ""
	}
	if all := x.Manifest(t.Context(), m); all[0].Verdict != Allocated {
		t.Error(text(t, all...))
	}
}

// TestVolumeClaimTemplates: the pods of a StatefulSet have volumes that its pod template does not.
func TestVolumeClaimTemplates(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 2)
	m, err := Parse([]byte(strings.ReplaceAll(fmt.Sprintf(manifest, "apps/v1", "StatefulSet", `
  volumeClaimTemplates: [{metadata: {name: d}, spec: {accessModes: [ReadWriteOnce]}}]
  template:
    spec:`), "count: 9", "count: 1")), "team")
	if err != nil {
		t.Fatal(err)
	}
	var tried *unstructured.Unstructured
	x := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now)
	x.Volume = func(_, name string) (bool, string) {
		t.Errorf("%s is of a pod that there is not", name)
		return false, ""
	}
	x.Refused = func(o *unstructured.Unstructured) (refused, unseen string) {
		if o.GetKind() == "Pod" {
			tried = o
		}
		return "", ""
	}
	if all := x.Manifest(t.Context(), m); all[0].Verdict != Unknown || !strings.Contains(text(t, all...), "volume d is made for the pod") {
		t.Errorf("%s", text(t, all...))
	}
	if volumes, _, err := unstructured.NestedSlice(tried.Object, "spec", "volumes"); err != nil || len(volumes) != 1 {
		t.Errorf("the API server is asked about a pod with volumes %v, %v", volumes, err)
	}
}

// TestParseRefuses: what the API server would drop is an error here.
func TestParseRefuses(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"unknown field": {"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {resourceClaim: []}", `unknown field "spec.resourceClaim"`},
		"twice":         {"apiVersion: v1\nkind: Pod\nkind: Pod", `"kind" already set`},
		"no kind":       {"metadata: {name: a}", "Kind"},
		"no YAML":       {"a: b: c", "document in line 1"},
	} {
		if _, err := Parse([]byte(c.text), "team"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	m, err := Parse([]byte("# nothing\n---\napiVersion: example.com/v1\nkind: Other\n"), "team")
	if err != nil || len(m.Ignored) != 1 || m.Ignored[0] != "Other" {
		t.Errorf("%+v, %v", m, err)
	}
}

// BenchmarkFiveHundredNodes explains a pod that waits for a GPU on 500 nodes of eight.
func BenchmarkFiveHundredNodes(b *testing.B) {
	f := fleettest.New(b)
	f.AddNode("node-0", "h100-80-sxm", 8)
	template := f.Slices
	f.Slices, f.Nodes = nil, nil
	for i := range 500 {
		name := fmt.Sprint("node-", i)
		f.Nodes = append(f.Nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		for _, s := range template {
			c := *s
			c.Name, c.Spec.NodeName, c.Spec.Pool.Name = name+c.Name, &name, name
			f.Slices = append(f.Slices, &c)
		}
		claim := f.Claim("other", name)
		claim.Status.Allocation = &resourceapi.AllocationResult{}
		for n := range 8 {
			devices := template[1+n%8].Spec.Devices
			claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
				Driver: fleettest.Driver, Pool: name, Device: devices[(7*i+n)%len(devices)].Name,
			})
		}
	}
	for _, c := range []struct {
		name    string
		request resourceapi.DeviceRequest
	}{
		{"occupied", fleettest.Count(8, whole)},
		{"misspelt", fleettest.Request(mig, fleettest.Profile("1g.1gb"))},
	} {
		pod := f.Pod("team", c.name, fleettest.Uses(f.Claim("team", c.name, c.request)))
		b.Run(c.name, func(b *testing.B) {
			before := cpuTime(b)
			for b.Loop() {
				x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
				if e := x.Pod(b.Context(), pod); e.Verdict != Waits {
					b.Fatal(e.Verdict)
				}
			}
			b.ReportMetric(float64((cpuTime(b)-before).Milliseconds())/float64(b.N), "cpu-ms/explanation")
		})
	}
}

// cpuTime returns what the process has used: on a machine that does other things, too, it says
// more than the clock.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// TestOldKubelet: a user who has, or would get, devices that the kubelet does not hand out is told so.
func TestOldKubelet(t *testing.T) {
	for _, c := range []struct {
		kubelet string
		runs    bool
		want    string
	}{
		{kubelet: "v1.36.0"},
		{kubelet: "v1.36.0", runs: true},
		{kubelet: "v1.35.9", want: "On node n1 the kubelet is older than 1.36"},
		{kubelet: "v1.35.9", runs: true, want: "On node n1 the kubelet is older than 1.36"},
		{kubelet: "unknown", want: "On node n1 the version of the kubelet cannot be read"},
		{kubelet: "unknown", runs: true, want: "On node n1 the version of the kubelet cannot be read"},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", 1)
		f.Nodes[0].Status.NodeInfo.KubeletVersion = c.kubelet
		pod := f.Pod("team", "llm")
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"deviceclass.resource.kubernetes.io/gpu.nvidia.com": resource.MustParse("1")}
		if c.runs {
			claim := f.Held("team", "llm-extended-resources-x", "n1", fleettest.Request("gpu.nvidia.com"))
			pod.Spec.NodeName, pod.Status.Phase = "n1", corev1.PodRunning
			pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: claim.Name}
		}
		e := New(fleet.New(f.Snapshot, fleettest.Driver), now).Pod(t.Context(), pod)
		if c.want == "" && len(e.Notes) > 0 || c.want != "" && (len(e.Notes) != 1 || !strings.HasPrefix(e.Notes[0], c.want)) {
			t.Errorf("kubelet %s, runs %t: %s, notes %q, want %q", c.kubelet, c.runs, e.Verdict, e.Notes, c.want)
		}
	}
}

// TestAlternativeThatDoes: while one alternative can be allocated, none of the others is said to keep the claim waiting, not even because of a
// pool that is being updated.
func TestAlternativeThatDoes(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 2)
	f.AddNode("n2", "h100-80-sxm", 2)
	for _, s := range f.Slices {
		if *s.Spec.NodeName == "n1" {
			s.Spec.Pool.ResourceSliceCount++
		}
	}
	claim := f.Claim("team", "c", alternatives(fleettest.Request(whole), fleettest.Request(mig)), fleettest.Request(mig, fleettest.Profile("9g.9gb")))
	pod := f.Pod("team", "p", fleettest.Uses(claim))
	e := within(f, time.Hour).Pod(t.Context(), pod)
	if got := text(t, e); strings.Contains(got, "none of the") || strings.Contains(got, "alternatives are taken") || !strings.Contains(got, "profile") {
		t.Errorf("%s", got)
	}
}

// within returns an Explainer that searches for so long on a node.
func within(f *fleettest.Fleet, limit time.Duration) *Explainer {
	x := New(fleet.New(f.Snapshot, fleettest.Driver), now)
	x.planner = x.planner.Within(limit)
	return x
}
