// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// plan is what makes the stored slices those that are wanted.
type plan struct {
	// before and after are deleted before and after writing.
	before, after []*resourceapi.ResourceSlice
	// write has complete objects; those without a UID are new.
	write []*resourceapi.ResourceSlice
}

func (p plan) empty() bool { return len(p.before)+len(p.after)+len(p.write) == 0 }

// pool is the only pool of a node.
type pool struct{ driverName, nodeName string }

// plan compares what is stored with what is wanted. owner is the node's UID.
//
// A change of one GPU is an update of its slice, which leaves the pool complete. The
// pool gets another generation when it has another number of slices, or when
// counters change together with devices: until all its slices have the new
// generation the scheduler allocates nothing of it.
func (p pool) plan(stored []*resourceapi.ResourceSlice, wanted []resourceslice.Slice, owner types.UID) plan {
	objects := make([]*resourceapi.ResourceSlice, len(wanted))
	index := make(map[string]int, len(wanted))
	for i, content := range wanted {
		objects[i] = p.object(i, len(wanted), content, owner)
		index[objects[i].Name] = i
	}
	var result plan
	var leftover []*resourceapi.ResourceSlice
	present := make([]*resourceapi.ResourceSlice, len(wanted))
	var newest, newestPresent int64
	for _, slice := range stored {
		i, known := index[slice.Name]
		switch {
		case known && p.holds(slice):
			present[i] = slice
			newestPresent = max(newestPresent, slice.Spec.Pool.Generation)
		case known:
			// In the way of the one that is wanted.
			result.before = append(result.before, slice)
		default:
			leftover = append(leftover, slice)
		}
		if slice.Spec.Pool.Name == p.nodeName {
			newest = max(newest, slice.Spec.Pool.Generation)
		}
	}
	generation := max(newestPresent, 1)
	if needsGeneration(present, objects, newestPresent) || newestPresent == 0 && newest > 0 {
		generation = newest + 1
		// The scheduler ignores them as soon as the first slice is written.
		result.after = leftover
	} else {
		result.before = append(result.before, leftover...)
	}
	for i, object := range objects {
		object.Spec.Pool.Generation = generation
		if old := present[i]; old != nil {
			if same(old, object) {
				continue
			}
			object.UID, object.ResourceVersion = old.UID, old.ResourceVersion
			keepTaintTimes(object.Spec.Devices, old.Spec.Devices)
		}
		result.write = append(result.write, object)
	}
	return result
}

// needsGeneration reports whether the slices cannot be changed one by one.
func needsGeneration(present, wanted []*resourceapi.ResourceSlice, newest int64) bool {
	changed, counters := 0, false
	for i, object := range wanted {
		old := present[i]
		if old == nil {
			changed++
			continue
		}
		if old.Spec.Pool.Generation == newest && old.Spec.Pool.ResourceSliceCount != object.Spec.Pool.ResourceSliceCount {
			return true
		}
		if !apiequality.Semantic.DeepEqual(old.Spec.SharedCounters, object.Spec.SharedCounters) {
			counters = true
		}
		if !resourceslice.DevicesDeepEqual(old.Spec.Devices, object.Spec.Devices) {
			changed++
		}
	}
	return counters && changed > 0
}

// object is the slice with an index as it should be stored, but for its generation.
func (p pool) object(index, count int, content resourceslice.Slice, owner types.UID) *resourceapi.ResourceSlice {
	nodeName, controller := p.nodeName, true
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: p.sliceName(index),
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: corev1.SchemeGroupVersion.Identifier(), Kind: "Node", Name: p.nodeName, UID: owner, Controller: &controller,
			}},
		},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:         p.driverName,
			NodeName:       &nodeName,
			Pool:           resourceapi.ResourcePool{Name: p.nodeName, ResourceSliceCount: int64(count)},
			Devices:        slices.Clone(content.Devices),
			SharedCounters: content.SharedCounters,
		},
	}
}

// sliceName begins with the index, because the scheduler tries slices in the order
// of their names. It is the same for every instance, so that two of them cannot make
// one slice twice.
func (p pool) sliceName(index int) string {
	name := fmt.Sprintf("%05x-%s-%s", index, p.driverName, p.nodeName)
	if len(name) <= validation.DNS1123SubdomainMaxLength {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	prefix := strings.TrimRight(name[:validation.DNS1123SubdomainMaxLength-2*8-1], ".-")
	return prefix + "-" + hex.EncodeToString(sum[:8])
}

// holds reports whether a slice is in the pool, which no update can change.
func (p pool) holds(slice *resourceapi.ResourceSlice) bool {
	spec := &slice.Spec
	return spec.Driver == p.driverName && spec.Pool.Name == p.nodeName && spec.NodeName != nil && *spec.NodeName == p.nodeName
}

// same compares everything that is published.
func same(stored, wanted *resourceapi.ResourceSlice) bool {
	a, b := stored.Spec, wanted.Spec
	a.Devices, b.Devices = nil, nil
	return resourceslice.DevicesDeepEqual(stored.Spec.Devices, wanted.Spec.Devices) &&
		apiequality.Semantic.DeepEqual(a, b) &&
		apiequality.Semantic.DeepEqual(stored.OwnerReferences, wanted.OwnerReferences)
}

// keepTaintTimes gives taints that are stored already the times they have there.
// Without a time they would become new ones.
func keepTaintTimes(devices, stored []resourceapi.Device) {
	type key struct {
		device, key, value string
		effect             resourceapi.DeviceTaintEffect
	}
	times := map[key]*metav1.Time{}
	for _, d := range stored {
		for _, t := range d.Taints {
			times[key{d.Name, t.Key, t.Value, t.Effect}] = t.TimeAdded
		}
	}
	for i, d := range devices {
		taints := slices.Clone(d.Taints)
		for j, t := range taints {
			if t.TimeAdded == nil {
				taints[j].TimeAdded = times[key{d.Name, t.Key, t.Value, t.Effect}]
			}
		}
		devices[i].Taints = taints
	}
}
