// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// node is the name of the node in the files of slices.
const node = "node"

// machine is the node that nodes of a kind are copies of.
type machine struct {
	slices []*resourceapi.ResourceSlice
	// inUse are claims that have devices of it.
	inUse []*resourceapi.ResourceClaim
}

// loadMachine reads what a machine publishes, as test/scale/slices wrote it.
func loadMachine(dir, name string) (*machine, error) {
	data, err := os.ReadFile(filepath.Join(dir, name+".json"))
	if err != nil {
		return nil, fmt.Errorf("read the slices of %s: %w", name, err)
	}
	m := &machine{}
	if err := json.Unmarshal(data, &m.slices); err != nil {
		return nil, fmt.Errorf("read the slices of %s: %w", name, err)
	}
	return m, nil
}

// use allocates devices, as the scheduler does.
func (m *machine) use(ctx context.Context, requests []request, classes classes) error {
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	// What Kubernetes has on by default.
	features := structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
		FractionalCapacityRange: true, PartitionableDevices: true, PrioritizedList: true,
	}
	expressions := cel.NewCache(len(requests), cel.Features{EnableConsumableCapacity: true})
	for n, r := range requests {
		claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", node, n)}, Spec: r.spec()}
		allocator, err := structured.NewAllocator(ctx, features, state, classes, m.slices, expressions)
		if err != nil {
			return fmt.Errorf("allocate %d of %s: %w", r.count, r.class, err)
		}
		made, err := allocator.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claim})
		if err != nil {
			return fmt.Errorf("allocate %d of %s: %w", r.count, r.class, err)
		}
		if made == nil {
			return fmt.Errorf("there is no room for %d of %s %s", r.count, r.class, r.profile)
		}
		claim.Status.Allocation = &made[0]
		m.inUse = append(m.inUse, claim)
		for _, result := range made[0].Devices.Results {
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
		}
	}
	return nil
}

// slicesOn are the slices that a node of this kind publishes.
func (m *machine) slicesOn(name string) []*resourceapi.ResourceSlice {
	made := make([]*resourceapi.ResourceSlice, 0, len(m.slices))
	for n, published := range m.slices {
		s := published.DeepCopy()
		s.ObjectMeta = metav1.ObjectMeta{Name: fmt.Sprintf("%s-%03d", name, n)}
		s.Spec.NodeName, s.Spec.Pool.Name = &name, name
		made = append(made, s)
	}
	return made
}

// inUseOn are the claims that have devices of a node of this kind.
func (m *machine) inUseOn(name string) []*resourceapi.ResourceClaim {
	made := make([]*resourceapi.ResourceClaim, 0, len(m.inUse))
	for n, template := range m.inUse {
		claim := template.DeepCopy()
		claim.ObjectMeta = metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", name, n), Namespace: inUseNamespace}
		allocation := claim.Status.Allocation
		for i := range allocation.Devices.Results {
			allocation.Devices.Results[i].Pool = name
		}
		allocation.NodeSelector.NodeSelectorTerms[0].MatchFields[0].Values = []string{name}
		made = append(made, claim)
	}
	return made
}

// classes are DeviceClasses by name.
type classes map[string]*resourceapi.DeviceClass

// loadClasses reads the classes of the chart from what helm makes of it, and adds that of the toy.
func loadClasses(file string) (classes, error) {
	all := classes{"toy": {ObjectMeta: metav1.ObjectMeta{Name: "toy"}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: "device.driver == 'gpu.nvidia.com'"}}},
	}}}
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read device classes: %w", err)
	}
	defer f.Close()
	documents := yaml.NewYAMLOrJSONDecoder(f, 1<<16)
	for {
		var class resourceapi.DeviceClass
		err := documents.Decode(&class)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read device classes from %s: %w", file, err)
		}
		if class.Kind == "DeviceClass" {
			all[class.Name] = &class
		}
	}
}

// List is part of structured.DeviceClassLister.
func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	list := make([]*resourceapi.DeviceClass, 0, len(c))
	for _, class := range c {
		list = append(list, class)
	}
	return list, nil
}

// Get is part of structured.DeviceClassLister.
func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	class, ok := c[name]
	if !ok {
		return nil, fmt.Errorf("there is no device class %s", name)
	}
	return class, nil
}
