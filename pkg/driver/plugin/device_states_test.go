// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drahealthalpha "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/claimstatus"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
)

// TestJudge: what is said of a device with several troubles.
func TestJudge(t *testing.T) {
	t.Parallel()
	const healthy, unknown, unhealthy = kubeletplugin.HealthStatusHealthy, kubeletplugin.HealthStatusUnknown, kubeletplugin.HealthStatusUnhealthy
	on := func(reason device.Reason) device.Condition {
		return device.Condition{PCIAddress: firstGPU, Reason: reason, Message: "GPU " + firstGPU + ": because of " + string(reason)}
	}
	degraded := on(device.Throttled)
	degraded.Effect = policy.EffectNone
	whole := claim.LiveDevice{PCIAddress: firstGPU}
	gone, stopped := whole, whole
	gone.Partition, stopped.Session = &claim.LivePartition{Gone: true}, &claim.LiveSession{}
	for name, test := range map[string]struct {
		device     claim.LiveDevice
		conditions []device.Condition
		health     kubeletplugin.HealthStatus
		reason     string
		says       []string
	}{
		"well":             {device: whole, health: healthy, reason: "Ready", says: []string{"The device is ready."}},
		"partition, well":  {device: claim.LiveDevice{PCIAddress: firstGPU, Partition: &claim.LivePartition{PartitionID: gpu.PartitionID{UUID: "MIG-1"}}}, health: healthy, reason: "Ready"},
		"lost":             {device: whole, conditions: []device.Condition{on(device.Lost)}, health: unhealthy, reason: "GPULost", says: []string{"The GPU is lost (because of gpu-lost)", "get another device"}},
		"reset":            {device: whole, conditions: []device.Condition{on(device.ResetRequired)}, health: unhealthy, reason: "GPUResetRequired", says: []string{"administrator"}},
		"hung":             {device: whole, conditions: []device.Condition{on(device.Unresponsive)}, health: unknown, reason: "GPUUnresponsive", says: []string{"does not answer"}},
		"degraded":         {device: whole, conditions: []device.Condition{degraded}, health: healthy, reason: "GPUThrottled", says: []string{"because of throttled"}},
		"degraded, lost":   {device: whole, conditions: []device.Condition{degraded, on(device.Lost)}, health: unhealthy, reason: "GPULost"},
		"MPS":              {device: whole, conditions: []device.Condition{on(device.MPSUnhealthy)}, health: unhealthy, reason: "MPSUnhealthy"},
		"no supervisor":    {device: whole, conditions: []device.Condition{on(device.MPSUnavailable)}, health: unknown, reason: "MPSUnavailable", says: []string{"supervisor", "until it is back"}},
		"nothing of users": {device: whole, conditions: []device.Condition{on(device.Withdrawn), on(device.ReleasePending), on(device.Occupied)}, health: healthy, reason: "Ready"},
		"gone":             {device: gone, health: unhealthy, reason: "PartitionGone", says: []string{"was removed", "delete the pods"}},
		"stopped":          {device: stopped, health: unhealthy, reason: "MPSStopped"},
		"lost and gone":    {device: gone, conditions: []device.Condition{on(device.Lost)}, health: unhealthy, reason: "GPULost", says: []string{"is lost", "was removed"}},
		"hung and gone":    {device: gone, conditions: []device.Condition{on(device.Unresponsive)}, health: unhealthy, reason: "PartitionGone", says: []string{"does not answer", "was removed"}},
	} {
		got := judge(&test.device, test.conditions)
		if got.health != test.health || got.reason != test.reason || got.ready() != (test.health == healthy) {
			t.Errorf("%s: %+v", name, got)
		}
		for _, text := range test.says {
			if !strings.Contains(got.message, text) {
				t.Errorf("%s: the message lacks %q: %s", name, text, got.message)
			}
		}
	}
}

// TestMessageStays: words that change while nothing else does are not worth a request.
func TestMessageStays(t *testing.T) {
	t.Parallel()
	start := time.Now()
	say := func(before verdict, health kubeletplugin.HealthStatus, findings, message string, after time.Duration) verdict {
		v := verdict{health: health, reason: findings, findings: findings, message: message}
		v.keepMessage(before, start.Add(after))
		return v
	}
	const unhealthy = kubeletplugin.HealthStatusUnhealthy
	first := say(verdict{}, unhealthy, "a", "for 10 s", 0)
	if second := say(first, unhealthy, "a", "for 20 s", 10*time.Second); second != first {
		t.Errorf("%+v", second)
	}
	if later := say(first, unhealthy, "a", "for 11 m", 11*time.Minute); later.message != "for 11 m" {
		t.Errorf("%+v", later)
	}
	if more := say(first, unhealthy, "a b", "and b", time.Second); more.message != "and b" {
		t.Errorf("%+v", more)
	}
	if other := say(first, kubeletplugin.HealthStatusUnknown, "a", "who knows", time.Second); other.message != "who knows" {
		t.Errorf("%+v", other)
	}
	if same := say(first, unhealthy, "a", "for 10 s", time.Hour); same != first {
		t.Errorf("%+v", same)
	}
}

var (
	liveSlice = claim.LiveDevice{
		Requests: []string{"r"}, Pool: testNode, Device: "gpu-0000-1b-00-0-mig-1g4gb-1", Kind: device.Partition, PCIAddress: firstGPU, GPU: "GPU-" + firstGPU,
		Partition: &claim.LivePartition{Profile: "1g.4gb", Placement: gpu.Placement{Start: 1, Size: 1}, PartitionID: gpu.PartitionID{UUID: "MIG-7", InstanceID: 3}},
		Resources: gpu.Resources{MemoryBytes: 4 << 30, Multiprocessors: 8},
	}
	liveShare = claim.LiveDevice{
		Requests: []string{"r/a"}, Pool: testNode, Device: "gpu-0000-1b-00-0-mps", ShareID: ptr.To(types.UID("s1")), Kind: device.MPS, PCIAddress: firstGPU, GPU: "GPU-" + firstGPU,
		Limits:     &claim.LiveLimits{MemoryBytes: 2 << 30, Percent: 30, Multiprocessors: 4},
		Session:    &claim.LiveSession{ID: "gpu-0000-1b-00-0", Running: true, Losses: 2, Priority: policy.PriorityBelowNormal},
		Resources:  gpu.Resources{MemoryBytes: 8 << 30, Multiprocessors: 16},
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"driverVersion": {VersionValue: ptr.To("580.95.5")}, "uuid": {StringValue: ptr.To("GPU-x")}},
	}
)

// TestStatusData: what the driver writes into the status of a claim.
func TestStatusData(t *testing.T) {
	t.Parallel()
	unmade := liveSlice
	unmade.Partition = &claim.LivePartition{Profile: "1g.4gb", Placement: liveSlice.Partition.Placement, Gone: true}
	for name, test := range map[string]struct {
		device claim.LiveDevice
		want   api.DeviceStatus
	}{
		"partition": {liveSlice, api.DeviceStatus{
			Type: "mig", UUID: "MIG-7", ParentUUID: "GPU-" + firstGPU, PCIBusID: firstGPU,
			MIG: &api.MIGStatus{Profile: "1g.4gb", Placement: api.PlacementStatus{Start: 1, Size: 1}, GPUInstanceID: ptr.To(3), ComputeInstanceID: ptr.To(0)},
		}},
		"partition that is gone": {unmade, api.DeviceStatus{
			Type: "mig", ParentUUID: "GPU-" + firstGPU, PCIBusID: firstGPU,
			MIG: &api.MIGStatus{Profile: "1g.4gb", Placement: api.PlacementStatus{Start: 1, Size: 1}},
		}},
		"share": {liveShare, api.DeviceStatus{
			Type: "mps", UUID: "GPU-" + firstGPU, ParentUUID: "GPU-" + firstGPU, PCIBusID: firstGPU,
			Limits: &api.LimitsStatus{MemoryBytes: 2 << 30, SMPercent: 30, Multiprocessors: 4, EffectiveSMPercent: 25},
			MPS:    &api.MPSStatus{Session: "gpu-0000-1b-00-0", ServersLost: 2, ClientPriority: api.PriorityBelowNormal},
		}},
	} {
		test.want.APIVersion, test.want.Kind = api.StatusVersion, api.DeviceStatusKind
		var got api.DeviceStatus
		data := statusData(&test.device)
		if err := json.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if len(data) > resourceapi.AllocatedDeviceStatusDataMaxLength/4 {
			t.Errorf("%s: %d bytes", name, len(data))
		}
	}
}

// allocated stores a claim that has a device, and says what it has.
func (r *rig) allocated(name string, d claim.LiveDevice) claim.LiveClaim {
	result := resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: testDriver, Pool: testNode, Device: d.Device, ShareID: d.ShareID}
	stored := r.api.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: objectMeta(name),
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}},
	})
	return claim.LiveClaim{Claim: claim.Ref{Namespace: stored.Namespace, Name: stored.Name, UID: stored.UID}, Devices: []claim.LiveDevice{d}}
}

// untilReady waits for the Ready condition of a claim's device: "True/Ready".
func (r *rig) untilReady(t *testing.T, name, want string) {
	t.Helper()
	r.until(t, "status of claim "+name, func(context.Context) error {
		got := "none"
		if devices := r.api.Claim("default", name).Status.Devices; len(devices) > 0 {
			c := meta.FindStatusCondition(devices[0].Conditions, claimstatus.ConditionReady)
			got = fmt.Sprintf("%s/%s", c.Status, c.Reason)
		}
		if got != want {
			return fmt.Errorf("%s, want %s", got, want)
		}
		return nil
	})
}

// TestTroubleReachesTheClaim: a lost GPU is in the status of its claim and in the health that
// the kubelet gets, and so is that it is back.
func TestTroubleReachesTheClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.options.StatusClient = r.options.KubeClient
	r.start(t)
	r.claims.setLive(r.allocated("slice", liveSlice), r.allocated("share", liveShare))
	r.untilReady(t, "slice", "True/Ready")
	r.untilReady(t, "share", "True/Ready")
	health := r.watchHealth(t)
	health.until(t, liveSlice.Device, "HEALTHY", "")
	health.until(t, liveShare.Device, "HEALTHY", "")

	r.hardware.setNode(withBroken(testNodeWith(), broken(firstGPU, gpu.ErrLost)))
	r.untilReady(t, "slice", "False/GPULost")
	health.until(t, liveSlice.Device, "UNHEALTHY", "The GPU is lost")
	r.hardware.setNode(testNodeWith(firstGPU))
	r.untilReady(t, "slice", "True/Ready")
	health.until(t, liveSlice.Device, "HEALTHY", "")
}

// healthWatch is a kubelet that watches the health of devices.
type healthWatch struct {
	stream drahealth.DRAResourceHealth_NodeWatchResourcesClient
}

func (r *rig) watchHealth(t *testing.T) healthWatch {
	t.Helper()
	r.register(t)
	stream, err := drahealth.NewDRAResourceHealthClient(dial(t, "unix://"+r.endpoint(t))).NodeWatchResources(t.Context(), &drahealth.NodeWatchResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return healthWatch{stream}
}

// endpoint is the socket that the kubelet is told.
func (r *rig) endpoint(t *testing.T) string {
	t.Helper()
	registration := registerapi.NewRegistrationClient(dial(t, "unix://"+r.options.registrationSocket(r.options.PodUID)))
	info, err := registration.GetInfo(t.Context(), &registerapi.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range []string{drahealth.DRAResourceHealthService, drahealthalpha.DRAResourceHealthService} {
		if !strings.Contains(strings.Join(info.GetSupportedVersions(), " "), service) {
			t.Errorf("%s is not among %v", service, info.GetSupportedVersions())
		}
	}
	return info.GetEndpoint()
}

// until waits for a report about a device.
func (w healthWatch) until(t *testing.T, name, health, says string) {
	t.Helper()
	timer := time.AfterFunc(eventually, func() { _ = w.stream.CloseSend() })
	defer timer.Stop()
	for end := time.Now().Add(eventually); time.Now().Before(end); {
		report, err := w.stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range report.GetDevices() {
			if d.GetDevice().GetPoolName() == testNode && d.GetDevice().GetDeviceName() == name && d.GetHealth().String() == health && strings.Contains(d.GetMessage(), says) {
				if d.GetHealthCheckTimeoutSeconds() != 30 || says == "" && d.GetMessage() != "" {
					t.Errorf("%+v", d)
				}
				return
			}
		}
	}
	t.Fatalf("device %s does not become %s with %q", name, health, says)
}

// TestHealthIsRepeated: the kubelet forgets what it is not told again; and what is old is not
// repeated as if it were true.
func TestHealthIsRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		states := judgeAll([]claim.LiveClaim{{Devices: []claim.LiveDevice{liveSlice}}}, nil, nil, time.Now())
		s := newDeviceStates(10 * time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		reports := make(chan kubeletplugin.DeviceHealthReport)
		ended := make(chan error)
		go func() { ended <- s.watch(ctx, reports) }()
		if first := <-reports; len(first.Devices) > 0 {
			t.Errorf("before the first survey: %+v", first)
		}
		s.set(states, nil, time.Now())
		start := time.Now()
		var got []string
		for range 9 {
			report := <-reports
			if len(report.Devices) != 1 {
				t.Fatalf("%+v", report)
			}
			got = append(got, fmt.Sprintf("%s %s %s", time.Since(start), report.Devices[0].Health, report.Devices[0].Message))
		}
		want := []string{"0s Healthy "}
		for _, at := range []string{"10s", "20s", "30s", "40s", "50s", "1m0s"} {
			want = append(want, at+" Healthy ")
		}
		old := " Unknown The driver has not been able to look at the GPUs of the node since " + start.UTC().Format(time.RFC3339) + "."
		want = append(want, "1m10s"+old, "1m20s"+old)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		s.set(states, nil, time.Now())
		if report := <-reports; report.Devices[0].Health != kubeletplugin.HealthStatusHealthy {
			t.Errorf("after another survey: %+v", report)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestWorstShareCounts: the kubelet knows devices by name.
func TestWorstShareCounts(t *testing.T) {
	t.Parallel()
	s := newDeviceStates(time.Second)
	now := time.Now()
	s.surveyedAt = now
	for _, health := range []kubeletplugin.HealthStatus{"Healthy", "Unhealthy", "Unknown", "Healthy"} {
		s.states = append(s.states, claimState{devices: []deviceState{{liveShare, verdict{health: health, message: strings.Repeat("long ", 500)}}}})
	}
	report, _ := s.health(now)
	if len(report.Devices) != 1 || report.Devices[0].Health != kubeletplugin.HealthStatusUnhealthy || len(report.Devices[0].Message) > maxHealthMessage {
		t.Errorf("%+v", report)
	}
}

// TestFewWrites: each report that differs from the one before is a write of the pod's status by its kubelet.
func TestFewWrites(t *testing.T) {
	t.Parallel()
	live := []claim.LiveClaim{uses(claim.Ref{UID: "u"}, firstName, firstGPU, nil)}
	hot := []device.Condition{{PCIAddress: firstGPU, Reason: device.Throttled, Effect: policy.EffectNone, Message: "hot"}}
	for name, test := range map[string]struct {
		look func(s *deviceStates, i int, now time.Time)
		most int
	}{
		"the driver cannot look at the GPUs": {func(*deviceStates, int, time.Time) {}, 2},
		"what leaves it healthy comes and goes": {func(s *deviceStates, i int, now time.Time) {
			s.surveyedAt, s.states = now, judgeAll(live, [][]device.Condition{nil, hot}[i%2], s.states, now)
		}, 7},
	} {
		s := newDeviceStates(10 * time.Second)
		began := time.Now()
		s.surveyedAt, s.states = began, judgeAll(live, nil, nil, began)
		writes, last := 0, kubeletplugin.DeviceHealth{}
		for i := range int(time.Hour / healthInterval) {
			now := began.Add(time.Duration(i) * healthInterval)
			test.look(s, i, now)
			report, _ := s.health(now)
			if one := report.Devices[0]; one.Health != last.Health || one.Message != last.Message {
				writes, last = writes+1, one
			}
		}
		if writes > test.most {
			t.Errorf("%s: %d writes in an hour, want %d at most", name, writes, test.most)
		}
	}
}

// TestConcerns: which conditions of a GPU are those of a device that a claim has.
func TestConcerns(t *testing.T) {
	t.Parallel()
	on := func(start, size int) *gpu.Placement { return &gpu.Placement{Start: start, Size: size} }
	part := func(start int) claim.LiveDevice {
		return claim.LiveDevice{PCIAddress: firstGPU, Partition: &claim.LivePartition{Placement: *on(start, 1)}}
	}
	whole := claim.LiveDevice{PCIAddress: firstGPU}
	observer, session, elsewhere, shared := whole, whole, whole, part(2)
	observer.Admin, session.Session, elsewhere.PCIAddress, shared.Session = true, &claim.LiveSession{}, secondGPU, &claim.LiveSession{}
	devices := map[string]claim.LiveDevice{
		"whole": whole, "observer": observer, "session": session, "elsewhere": elsewhere, "part 2": part(2), "part 4": part(4), "part 2, shared": shared,
	}
	for name, test := range map[string]struct {
		condition device.Condition
		want      string
	}{
		"GPU":       {device.Condition{Reason: device.Unresponsive}, "observer, part 2, part 2, shared, part 4, session, whole"},
		"slices":    {device.Condition{Reason: device.MPSUnhealthy, Where: on(0, 4)}, "part 2, part 2, shared, session, whole"},
		"partition": {device.Condition{Reason: device.XID, Where: on(2, 1), Exact: true}, "part 2, part 2, shared"},
		"MPS":       {device.Condition{Reason: device.MPSUnavailable, Kind: device.MPS}, "part 2, shared, session"},
		"fabric":    {device.Condition{Reason: device.FabricUnhealthy, Undivided: true}, "observer, session, whole"},
	} {
		test.condition.PCIAddress = firstGPU
		var got []string
		for _, d := range slices.Sorted(maps.Keys(devices)) {
			if one := devices[d]; concerns(test.condition, &one) {
				got = append(got, d)
			}
		}
		if diff := cmp.Diff(test.want, strings.Join(got, ", ")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
