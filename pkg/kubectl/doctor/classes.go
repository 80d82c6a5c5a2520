// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// chartClass is a class that the chart makes for a type of device.
type chartClass struct{ name, deviceType string }

var chartClasses = []chartClass{
	{"gpu.nvidia.com", "gpu"}, {"mig.nvidia.com", "mig"}, {"mps.partage.dev", "mps"}, {"timeslice.partage.dev", "timeslice"}, {"observer.partage.dev", "observer"},
}

// example returns one device of a type, or nil.
func (f *Facts) example(deviceType string) *fleet.Device {
	for d := range f.Devices() {
		if d.Type == deviceType {
			return d
		}
	}
	return nil
}

func classesExist(f *Facts) (found findings) {
	for _, c := range chartClasses {
		if f.Class(c.name) == nil && f.example(c.deviceType) != nil {
			found.add(Warning, "It does not exist, and there are devices of the type "+c.deviceType,
				"Run "+helmUpgrade+", which makes it unless the chart's deviceClasses.create is false: then make a class of your own", Ref{Kind: "deviceclass", Name: c.name})
		}
	}
	return found
}

func classesSelect(f *Facts) (found findings) {
	for _, c := range chartClasses {
		class, device := f.Class(c.name), f.example(c.deviceType)
		if class == nil || device == nil {
			continue
		}
		at := refTo("deviceclass", class)
		matches, err := selects(class, f.Driver, device.Published)
		switch {
		case err != nil:
			found.add(Error, fmt.Sprintf("Its selector cannot be evaluated for devices of the type %s: %s", c.deviceType, said(err.Error())),
				"Delete the class, and run "+helmUpgrade+", which creates it again", at)
		case !matches:
			found.add(Error, fmt.Sprintf("It selects no devices of the type %s of the driver %s: it is of another driver, or was changed", c.deviceType, f.Driver),
				"Delete the class, and run "+helmUpgrade+", which creates it again; or give the other driver's class another name", at)
		}
	}
	return found
}

// selects reports whether a class selects a device.
func selects(class *resourceapi.DeviceClass, driver string, d *resourceapi.Device) (bool, error) {
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	input := cel.Device{Driver: driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity}
	for _, s := range class.Spec.Selectors {
		if s.CEL == nil {
			return false, errors.New("the selector is of a kind that is not known")
		}
		compiled := compiler.CompileCELExpression(s.CEL.Expression, cel.Options{DisableCostEstimation: true})
		if compiled.Error != nil {
			return false, compiled.Error
		}
		// One device of memory: nothing to cancel.
		matches, _, err := compiled.DeviceMatches(context.Background(), input)
		if err != nil || !matches {
			return false, err
		}
	}
	return true, nil
}

func extendedResources(f *Facts) (found findings) {
	classes := f.ByExtendedResource()
	for _, name := range slices.Sorted(maps.Keys(classes)) {
		for _, c := range classes[name] {
			if len(classes[name]) > 1 {
				found.add(Error, fmt.Sprintf("It has the extended resource %s as other classes have: pods that ask for it get devices of one of them", name),
					"Let one class keep the name: deviceClasses.gpu.extendedResourceName=\"\" in the chart, or change the other class", refTo("deviceclass", c))
			}
		}
	}
	return found
}

func claimedClasses(f *Facts) (found findings) {
	check := func(at Ref, spec *resourceapi.ResourceClaimSpec) {
		for _, a := range fleet.AsksOf(&spec.Devices) {
			name := *a.Class
			if f.Class(name) != nil {
				continue
			}
			remedy := "Correct the name, or make the class; kubectl get deviceclasses shows those that there are"
			if slices.ContainsFunc(chartClasses, func(c chartClass) bool { return c.name == name }) {
				remedy = "Install the driver, whose chart makes the class, or delete what asks for it"
			}
			severity, pods := f.waiting(at)
			found.add(severity, fmt.Sprintf("It asks for the class %s, which does not exist: %s", name, pods), remedy, at)
		}
	}
	for _, t := range f.Templates {
		check(refTo("resourceclaimtemplate", t), &t.Spec.Spec)
	}
	for _, c := range f.Claims {
		if c.Status.Allocation == nil {
			check(refTo("resourceclaim", c), &c.Spec)
		}
	}
	return found
}

// waiting says whether pods wait for a claim, or for those of a template: what nobody uses yet keeps nobody waiting.
func (f *Facts) waiting(of Ref) (s Severity, text string) {
	isOf := func(name *string, kind string) bool { return name != nil && *name == of.Name && kind == of.Kind }
	for _, p := range f.Pods {
		if p.Namespace != of.Namespace || p.Spec.NodeName != "" || fleet.Ended(p) {
			continue
		}
		if slices.ContainsFunc(p.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool {
			return isOf(c.ResourceClaimName, "resourceclaim") || isOf(c.ResourceClaimTemplateName, "resourceclaimtemplate")
		}) || slices.ContainsFunc(p.Status.ResourceClaimStatuses, func(c corev1.PodResourceClaimStatus) bool {
			return isOf(c.ResourceClaimName, "resourceclaim")
		}) {
			return Error, "its pods wait"
		}
	}
	if f.Lacks(pods, of.Namespace) {
		return Warning, "a pod that uses it will wait. Whether one does is unknown, as far as pods may not be read"
	}
	return Warning, "a pod that uses it will wait"
}
