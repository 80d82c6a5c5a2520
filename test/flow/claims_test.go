// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"cmp"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
)

type counter struct{ n atomic.Int64 }

func (c *counter) add() int64 { return c.n.Add(1) }

// starts, claimNumbers and ports make names that differ between tests.
var starts, claimNumbers, ports counter

func typesUID(uid string) types.UID { return types.UID(uid) }

// config is an opaque configuration for all requests of a claim.
type config string

// allocate stores a claim as the scheduler leaves it: one request for every
// device, named r0, r1 and so on.
func (n *node) allocate(devices []string, configs ...config) *drapb.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for _, device := range devices {
		results = append(results, resourceapi.DeviceRequestAllocationResult{Device: device})
	}
	return n.store(results, configs)
}

// claim is allocate for devices some of which may be shares.
func (n *node) claim(t testing.TB, devices []request, configs ...config) *drapb.Claim {
	t.Helper()
	return n.claimNamed(n.names(t, devices), devices, configs...)
}

// claimNamed is claim for who knows the devices' names.
func (n *node) claimNamed(names []string, devices []request, configs ...config) *drapb.Claim {
	var results []resourceapi.DeviceRequestAllocationResult
	for i, name := range names {
		r := resourceapi.DeviceRequestAllocationResult{Device: name}
		if devices[i].kind != "" {
			r.ShareID = ptr.To(uuid.NewUUID())
			r.ConsumedCapacity = devices[i].consumed()
		}
		results = append(results, r)
	}
	return n.store(results, configs)
}

// Limits of an MPS share that asks for none in particular. They fit on everything
// that is shared here.
const (
	someMemory  = 4 << 30
	somePercent = 25
)

// consumed is what the scheduler writes down of a share.
func (r request) consumed() map[resourceapi.QualifiedName]resource.Quantity {
	if r.kind == asMPS {
		r.memory, r.percent = cmp.Or(r.memory, someMemory), cmp.Or(r.percent, somePercent)
	}
	all := map[resourceapi.QualifiedName]resource.Quantity{"shares": *resource.NewQuantity(1, resource.DecimalSI)}
	if r.memory > 0 {
		all["memory"] = *resource.NewQuantity(r.memory, resource.BinarySI)
	}
	if r.percent > 0 {
		all["smPercent"] = *resource.NewQuantity(int64(r.percent), resource.DecimalSI)
	}
	return all
}

// store makes a claim with these allocation results. What they leave out is this
// driver and its pool.
func (n *node) store(results []resourceapi.DeviceRequestAllocationResult, configs []config) *drapb.Claim {
	allocation := &resourceapi.AllocationResult{}
	for i, r := range results {
		if r.Driver == "" {
			r.Driver, r.Pool = driverName, nodeName
		}
		if r.Request == "" {
			r.Request = "r" + itoa(i)
		}
		allocation.Devices.Results = append(allocation.Devices.Results, r)
	}
	for _, c := range configs {
		allocation.Devices.Config = append(allocation.Devices.Config, resourceapi.DeviceAllocationConfiguration{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: driverName, Parameters: runtime.RawExtension{Raw: []byte(c)},
			}},
		})
	}
	claim := n.api.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + itoa(int(claimNumbers.add()))},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	})
	return &drapb.Claim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}
}

// prepare makes one call for all claims and returns the answers in the order of
// the claims.
func (p *process) prepare(t testing.TB, claims ...*drapb.Claim) []*drapb.NodePrepareResourceResponse {
	t.Helper()
	response, err := p.kubelet.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		t.Fatal(err)
	}
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

// mustPrepare fails the test unless the claim is prepared, and returns the CDI
// ids of its devices in the order of its requests. It tries again where the driver
// took a call for one that hangs, which a busy machine may have made slow.
func (p *process) mustPrepare(t testing.TB, claim *drapb.Claim) []string {
	t.Helper()
	answer := p.prepare(t, claim)[0]
	for end := time.Now().Add(eventually); leftBehind(asError(answer.GetError())) && time.Now().Before(end); {
		answer = p.prepare(t, claim)[0]
	}
	if answer.GetError() != "" {
		t.Fatalf("prepare: %s", answer.GetError())
	}
	devices := slices.Clone(answer.GetDevices())
	slices.SortFunc(devices, func(a, b *drapb.Device) int { return strings.Compare(a.RequestNames[0], b.RequestNames[0]) })
	var ids []string
	for _, d := range devices {
		ids = append(ids, d.GetCdiDeviceIds()...)
	}
	return ids
}

// unprepare makes one call for all claims and returns the first error.
func (p *process) unprepare(t testing.TB, claims ...*drapb.Claim) error {
	t.Helper()
	response, err := p.kubelet.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil {
		t.Fatal(err)
	}
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

func (p *process) mustUnprepare(t testing.TB, claims ...*drapb.Claim) {
	t.Helper()
	if err := p.unprepare(t, claims...); err != nil {
		t.Fatalf("unprepare: %v", err)
	}
}

// container does what a container runtime does with CDI ids.
func (n *node) container(t testing.TB, ids ...string) *oci.Spec {
	t.Helper()
	cache, err := cdiapi.NewCache(cdiapi.WithSpecDirs(n.cdi), cdiapi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	for path, errs := range cache.GetErrors() {
		for _, err := range errs {
			// Other claims may come and go meanwhile.
			if !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("CDI file %s: %v", path, err)
			}
		}
	}
	spec := &oci.Spec{}
	if unresolved, err := cache.InjectDevices(spec, ids...); err != nil {
		t.Fatalf("CDI ids %v, unknown %v: %v", ids, unresolved, err)
	}
	return spec
}

// deviceNodes are the paths that a container gets, sorted, without those that
// every container with a GPU gets.
func deviceNodes(spec *oci.Spec) []string {
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
