// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/must"
	"github.com/partage-dev/partage/test/scale/slices/reference"
)

// sizedPolicies are the policies of the table of sizes, in its order.
var sizedPolicies = []struct {
	name  string
	terms Terms
}{
	{"default", Terms{}},
	{"default + variants", everything},
	{"mig: 2 profiles", offering(func(o *policy.Offer) { o.Partition.Profiles = []string{"1g.10gb", "3g.40gb"} })},
	{"gpu, mps, timeslice", offering(func(o *policy.Offer) { o.Partition = nil })},
	{"gpu", Terms{Policy: &policy.Policy{Default: policy.Offer{Whole: true}}}},
}

// size is what the slices of one node cost.
type size struct {
	slices, devices int
	// stored is in bytes of protobuf, as etcd holds it, sent of JSON.
	stored, sent int
	// decoded is the memory of a process that caches the slices. It depends on the
	// version of Go and is not exact.
	decoded int
}

// TestSize holds the sizes of nodes with eight GPUs against testdata/sizes.txt, so that
// nothing that is published grows unseen. Run it with -v to see what they are in the
// memory of a process, too.
func TestSize(t *testing.T) {
	var golden, report strings.Builder
	exact, table := tabwriter.NewWriter(&golden, 0, 0, 2, ' ', 0), tabwriter.NewWriter(&report, 0, 0, 2, ' ', 0)
	fmt.Fprintln(exact, "8 GPUs\tpolicy\tslices\tdevices\tprotobuf\tJSON")
	fmt.Fprintln(table, "8 GPUs\tpolicy\tslices\tdevices\tprotobuf\tJSON\tdecoded")
	for _, b := range testBoards(t) {
		policies := sizedPolicies
		if _, partitions := possibleKinds(b.gpu()); !partitions {
			policies = policies[:1]
		} else if b.name != "h100-80-sxm" {
			policies = policies[:2]
		}
		for _, p := range policies {
			p.terms.ExtendedResources = true
			s := sizeOf(t, inventoryOf(t, replicate(b.node, 8), p.terms).ResourceSlices(sizeOptions))
			row := fmt.Sprintf("%s\t%s\t%d\t%d\t%d\t%d", b.name, p.name, s.slices, s.devices, s.stored, s.sent)
			fmt.Fprintln(exact, row)
			fmt.Fprintf(table, "%s\t%d\n", row, s.decoded)
		}
	}
	if exact.Flush() != nil || table.Flush() != nil {
		t.Fatal("the table is incomplete")
	}
	t.Logf("sizes in bytes:\n%s", report.String())
	compareGolden(t, "sizes.txt", golden.String())
}

// sizeOptions have names of the usual length.
var sizeOptions = Options{
	Driver: "gpu.nvidia.com", Pool: "gpu-worker-0123.example.com", NodeName: "gpu-worker-0123.example.com",
	PartitionableDevices: true, ConsumableCapacity: true,
}

func sizeOf(t *testing.T, objects []resourceapi.ResourceSlice) size {
	t.Helper()
	s := size{slices: len(objects)}
	var stored [][]byte
	for n := range objects {
		object := &objects[n]
		s.devices += len(object.Spec.Devices)
		object.ObjectMeta = storedMeta(t, object.Spec)
		data := must.Get(object.Marshal())(t)
		text := must.Get(json.Marshal(object))(t)
		stored = append(stored, data)
		s.stored += len(data)
		s.sent += len(text)
	}
	s.decoded = decodedSize(t, stored)
	return s
}

// storedMeta is what the API server and the slice controller add to a slice.
func storedMeta(t *testing.T, spec resourceapi.ResourceSliceSpec) metav1.ObjectMeta {
	t.Helper()
	const uid = "0f6b1d5c-2a52-4c1c-9a77-3b1d6a0e8f21"
	own := map[string]any{"f:driver": struct{}{}, "f:nodeName": struct{}{}, "f:pool": map[string]any{
		"f:generation": struct{}{}, "f:name": struct{}{}, "f:resourceSliceCount": struct{}{},
	}}
	if spec.Devices != nil {
		own["f:devices"] = struct{}{}
	} else {
		own["f:sharedCounters"] = struct{}{}
	}
	fields := must.Get(json.Marshal(map[string]any{"f:spec": own, "f:metadata": map[string]any{
		"f:generateName": struct{}{}, "f:ownerReferences": map[string]any{".": struct{}{}, `k:{"uid":"` + uid + `"}`: struct{}{}},
	}}))(t)
	now := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	generateName := *spec.NodeName + "-" + spec.Driver + "-"
	return metav1.ObjectMeta{
		Name: generateName + "x7k2p", GenerateName: generateName, UID: types.UID(uid), ResourceVersion: "123456789", Generation: 1,
		CreationTimestamp: now,
		OwnerReferences:   []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: *spec.NodeName, UID: types.UID(uid), Controller: new(true)}},
		ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: "gpu-kubelet-plugin", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "resource.k8s.io/v1", Time: &now,
			FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(string(fields)),
		}},
	}
}

// decodedSize is how much the heap grows by what is decoded.
func decodedSize(t *testing.T, stored [][]byte) int {
	t.Helper()
	const copies = 4
	decoded := make([]resourceapi.ResourceSlice, copies*len(stored))
	before := heap()
	for n := range decoded {
		must.Do(t, decoded[n].Unmarshal(stored[n%len(stored)]))
	}
	grown := heap() - before
	runtime.KeepAlive(decoded)
	return grown / copies
}

func heap() int {
	var stats runtime.MemStats
	runtime.GC()
	runtime.GC() // what pools hold survives the first
	runtime.ReadMemStats(&stats)
	return int(stats.HeapAlloc) // #nosec G115 -- no heap is that large
}

// mostJSON is how large the slices of a DGX H100 may be.
const mostJSON = 205_000

// TestSizeOfReferenceDriver compares with what NVIDIA's DRA driver (v0.5, feature gate
// DynamicMIG) publishes for the same node. What Partage publishes by default is
// smaller, although it has shares in addition.
func TestSizeOfReferenceDriver(t *testing.T) {
	node := replicate(loadNode(t, "h100-80-sxm"), 8)
	theirs := sizeOf(t, reference.Pool{Driver: sizeOptions.Driver, Node: sizeOptions.NodeName}.ResourceSlices(node))
	if want := 8 * (1 + 25); theirs.devices != want || theirs.slices != 9 {
		t.Fatalf("%d devices in %d slices, want %d in 9", theirs.devices, theirs.slices, want)
	}
	for _, p := range sizedPolicies {
		p.terms.ExtendedResources = true
		own := sizeOf(t, inventoryOf(t, node, p.terms).ResourceSlices(sizeOptions))
		percent := func(own, theirs int) string {
			return fmt.Sprintf("%d of %d (%d %%)", own, theirs, 100*own/theirs)
		}
		t.Logf("%s: protobuf %s, JSON %s, decoded %s", p.name,
			percent(own.stored, theirs.stored), percent(own.sent, theirs.sent), percent(own.decoded, theirs.decoded))
		// With variants there are as many partitions as the reference driver has, and shares
		// and observers besides.
		if p.name != "default + variants" && (own.stored >= theirs.stored || own.sent >= theirs.sent) {
			t.Errorf("%s: larger than the reference driver's", p.name)
		}
		// What a new attribute costs is bytes in every API server: something else has to go.
		if p.name == "default" && own.sent > mostJSON {
			t.Errorf("%d bytes of JSON", own.sent)
		}
	}
}
