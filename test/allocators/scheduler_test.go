// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocators

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"sigs.k8s.io/yaml"
)

const (
	driver = "gpu.nvidia.com"
	node   = "node-1"
	pool   = "node-1"
	golden = "../../pkg/device/testdata/slices/"
)

// kubernetes is the version whose allocator is tested, such as "1.36.1". The compiler
// writes it into the path of the source.
func kubernetes(t *testing.T) string {
	t.Helper()
	file, _ := runtime.FuncForPC(reflect.ValueOf(structured.NewAllocator).Pointer()).FileLine(0)
	found := regexp.MustCompile(`/dynamic-resource-allocation@v0\.([0-9.]+)/`).FindStringSubmatch(file)
	if found == nil {
		t.Fatalf("the allocator's source %s has no version", file)
	}
	return "1." + found[1]
}

// goldenSlices are what the driver publishes for each GPU model, by model.
func goldenSlices(t *testing.T) map[string][]resourceapi.ResourceSlice {
	t.Helper()
	files, err := filepath.Glob(golden + "*.yaml")
	if err != nil || len(files) < 10 {
		t.Fatalf("found %d golden files, %v", len(files), err)
	}
	all := map[string][]resourceapi.ResourceSlice{}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		if strings.HasSuffix(name, "-status") {
			continue // taints are not what this is about
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, document := range bytes.Split(data, []byte("\n---\n")) {
			var slice resourceapi.ResourceSlice
			if err := yaml.Unmarshal(document, &slice); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			all[name] = append(all[name], slice)
		}
	}
	return all
}

// scheduler is an allocator and what it allocated.
type scheduler struct {
	slices    []resourceapi.ResourceSlice
	exclusive sets.Set[structured.DeviceID]
	shares    sets.Set[structured.SharedDeviceID]
	consumed  structured.ConsumedCapacityCollection
}

// newScheduler returns a scheduler that knows only the named devices.
func newScheduler(published []resourceapi.ResourceSlice, names ...string) *scheduler {
	s := &scheduler{
		exclusive: sets.New[structured.DeviceID](),
		shares:    sets.New[structured.SharedDeviceID](), consumed: structured.NewConsumedCapacityCollection(),
	}
	for _, slice := range published {
		slice.Spec.Devices = slices.DeleteFunc(slices.Clone(slice.Spec.Devices), func(d resourceapi.Device) bool {
			return !slices.Contains(names, d.Name)
		})
		s.slices = append(s.slices, slice)
	}
	return s
}

// hold marks a device as allocated. Of a share everything is taken, so that another
// attempt cannot get more of it.
func (s *scheduler) hold(d resourceapi.Device) {
	id := structured.MakeDeviceID(driver, pool, d.Name)
	if !shared(d) {
		s.exclusive.Insert(id)
		return
	}
	s.shares.Insert(structured.MakeSharedDeviceID(id, ptr(uuid.NewUUID())))
	all := map[resourceapi.QualifiedName]resource.Quantity{}
	for name, c := range d.Capacity {
		all[name] = c.Value
	}
	s.consumed.Insert(structured.NewDeviceConsumedCapacity(id, all))
}

// allocate makes one attempt for claims of one request each and returns the devices, none
// where not all claims can be satisfied. A panic, which ends a scheduler, is an error.
func (s *scheduler) allocate(requests ...resourceapi.DeviceRequest) (devices []string, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			err = errPanic{reason}
		}
	}()
	var claims []*resourceapi.ResourceClaim
	for n, r := range requests {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("claim-", n)}}
		claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{r}
		claims = append(claims, claim)
	}
	var published []*resourceapi.ResourceSlice
	for n := range s.slices {
		published = append(published, &s.slices[n])
	}
	ctx := context.Background()
	state := structured.AllocatedState{AllocatedDevices: s.exclusive, AllocatedSharedDeviceIDs: s.shares, AggregatedCapacity: s.consumed}
	a, err := structured.NewAllocator(ctx, features(), state, classes{}, published, celCache)
	if err != nil {
		return nil, err
	}
	results, err := a.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, claims)
	for _, result := range results {
		for _, r := range result.Devices.Results {
			devices = append(devices, r.Device)
		}
	}
	return devices, err
}

type errPanic struct{ reason any }

func (e errPanic) Error() string { return fmt.Sprint("panic: ", e.reason) }

// features are those that Kubernetes 1.37 has on by default, by the names that they have
// in any version.
func features() structured.Features {
	var f structured.Features
	fields := reflect.ValueOf(&f).Elem()
	for _, name := range []string{
		"AdminAccess", "ConsumableCapacity", "DeviceBinding", "DeviceBindingAndStatus", "DeviceStatus", "DeviceTaints",
		"PartitionableDevices", "PrioritizedList",
	} {
		if f := fields.FieldByName(name); f.IsValid() {
			f.SetBool(true)
		}
	}
	return f
}

var celCache = cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})

// classes are named after the types of devices; "any" is for all.
type classes struct{}

func (classes) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (classes) Get(name string) (*resourceapi.DeviceClass, error) {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if name != "any" {
		class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
			Expression: `device.attributes["` + driver + `"].type == "` + name + `"`,
		}}}
	}
	return class, nil
}

func request(class string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
	}}
}

func shared(d resourceapi.Device) bool {
	return d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations
}

func kind(d resourceapi.Device) string { return *d.Attributes["type"].StringValue }

// compatible reports whether the counters allow that two devices are allocated at the same
// time.
func compatible(a, b resourceapi.Device, published []resourceapi.ResourceSlice) bool {
	total := map[string]int64{}
	for _, slice := range published {
		for _, set := range slice.Spec.SharedCounters {
			for name, c := range set.Counters {
				total[set.Name+"/"+name] = c.Value.Value()
			}
		}
	}
	for _, d := range []resourceapi.Device{a, b} {
		for _, use := range d.ConsumesCounters {
			for name, c := range use.Counters {
				total[use.CounterSet+"/"+name] -= c.Value.Value()
			}
		}
	}
	for _, left := range total {
		if left < 0 {
			return false
		}
	}
	return true
}

func ptr[T any](value T) *T { return &value }
