// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"errors"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

type counter struct{ n atomic.Int64 }

func (c *counter) add() int64 { return c.n.Add(1) }

// starts and claimNumbers number what must differ between tests.
var starts, claimNumbers counter

// AllocateNamed is Allocate for devices, given by name, that are not shared.
func (n *Cluster) AllocateNamed(devices []string, configs ...Config) *drapb.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, device := range devices {
		results = append(results, resourceapi.DeviceRequestAllocationResult{Device: device})
	}
	return n.Store(results, configs)
}

// Allocate stores a claim for these devices as the scheduler leaves it: one request
// for each, named r0, r1 and so on, with a configuration for all of them.
func (n *Node) Allocate(t testing.TB, devices []Device, configs ...Config) *drapb.Claim {
	t.Helper()
	return n.AllocateDevices(n.DeviceNames(t, devices), devices, configs...)
}

// AllocateDevices is Allocate for any goroutine; the caller knows the names.
func (n *Cluster) AllocateDevices(names []string, devices []Device, configs ...Config) *drapb.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for i, name := range names {
		r := resourceapi.DeviceRequestAllocationResult{Device: name}
		if devices[i].Kind != "" {
			r.ShareID = ptr.To(uuid.NewUUID())
			r.ConsumedCapacity = devices[i].consumed()
		}
		results = append(results, r)
	}
	return n.Store(results, configs)
}

// Store stores a claim with these allocation results, by default of this driver and
// its pool.
func (n *Cluster) Store(results []resourceapi.DeviceRequestAllocationResult, configs []Config) *drapb.Claim {
	allocation := &resourceapi.AllocationResult{}
	for i, r := range results {
		if r.Driver == "" {
			r.Driver, r.Pool = DriverName, NodeName
		}
		if r.Request == "" {
			r.Request = "r" + strconv.Itoa(i)
		}
		allocation.Devices.Results = append(allocation.Devices.Results, r)
	}
	for _, c := range configs {
		allocation.Devices.Config = append(allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: DriverName, Parameters: runtime.RawExtension{Raw: []byte(c)},
			}},
		})
	}
	claim := n.API.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + strconv.Itoa(int(claimNumbers.add()))},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	})
	return &drapb.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}
}

// Prepare makes one call for all claims and returns the answers in the order of
// the claims.
func (p *Driver) Prepare(t testing.TB, claims ...*drapb.Claim) []*drapb.NodePrepareResourceResponse {
	t.Helper()
	response := must.Get(p.Kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims}))(t)
	answers := make([]*drapb.NodePrepareResourceResponse, len(claims))
	for i, c := range claims {
		answer, ok := response.GetClaims()[c.GetUid()]
		if !ok {
			t.Fatalf("no answer for claim %s", c.GetName())
		}
		answers[i] = answer
	}
	return answers
}

// MustPrepare fails the test unless the claim is prepared, and returns the CDI
// ids of its devices in the order of its requests. It tries again where the driver
// took a call for one that hangs, which a busy machine may have made slow.
func (p *Driver) MustPrepare(t testing.TB, claim *drapb.Claim) []string {
	t.Helper()
	answer := p.Prepare(t, claim)[0]
	for end := time.Now().Add(Patience); IsHung(AsError(answer.GetError())) && time.Now().Before(end); {
		answer = p.Prepare(t, claim)[0]
	}
	if answer.GetError() != "" {
		t.Fatalf("prepare: %s", answer.GetError())
	}
	return CDIIDs(answer)
}

// CDIIDs are the CDI ids of a claim's devices in the order of its requests.
func CDIIDs(answer *drapb.NodePrepareResourceResponse) []string {
	devices := slices.Clone(answer.GetDevices())
	slices.SortFunc(devices, func(a, b *drapb.Device) int { return strings.Compare(a.RequestNames[0], b.RequestNames[0]) })
	var ids []string
	for _, d := range devices {
		ids = append(ids, d.GetCdiDeviceIds()...)
	}
	return ids
}

// Unprepare makes one call for all claims and returns the first error.
func (p *Driver) Unprepare(t testing.TB, claims ...*drapb.Claim) error {
	t.Helper()
	response := must.Get(p.Kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: claims}))(t)
	for _, c := range claims {
		answer, ok := response.GetClaims()[c.GetUid()]
		if !ok {
			t.Fatalf("no answer for claim %s", c.GetName())
		}
		if answer.GetError() != "" {
			return errors.New(answer.GetError())
		}
	}
	return nil
}

// MustUnprepare fails the test unless all of the claims are unprepared.
func (p *Driver) MustUnprepare(t testing.TB, claims ...*drapb.Claim) {
	t.Helper()
	must.Do(t, p.Unprepare(t, claims...), "unprepare")
}

// Container returns the spec that a container runtime makes with CDI ids.
func (n *Files) Container(t testing.TB, ids ...string) *oci.Spec {
	t.Helper()
	return n.InjectCDI(t, &oci.Spec{}, ids...)
}

// InjectCDI adds what CDI ids stand for to the spec that a container runtime has made of a pod, and returns it.
func (n *Files) InjectCDI(t testing.TB, spec *oci.Spec, ids ...string) *oci.Spec {
	t.Helper()
	cache := must.Get(cdiapi.NewCache(cdiapi.WithSpecDirs(n.CDIDir), cdiapi.WithAutoRefresh(false)))(t)
	for path, errs := range cache.GetErrors() {
		for _, err := range errs {
			// Other claims may come and go meanwhile.
			expect.Is(t, err, fs.ErrNotExist, "CDI file", path)
		}
	}
	if unresolved, err := cache.InjectDevices(spec, ids...); err != nil {
		t.Fatalf("CDI ids %v, unknown %v: %v", ids, unresolved, err)
	}
	return spec
}

// DeviceNodes are the paths of a container's device nodes, sorted, without those
// that every container with a GPU has.
func DeviceNodes(spec *oci.Spec) []string {
	var paths []string
	for _, d := range spec.Linux.Devices {
		switch d.Path {
		case "/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools":
		default:
			paths = append(paths, d.Path)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}
