// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	claimName = "gpu"
	// maxRequests and maxDevices are limits of the API for one claim.
	maxRequests = 32
	maxDevices  = 32
)

// workload is an object with the spec of a pod.
type workload struct {
	*translation
	object *yaml.Node
	spec   *yaml.Node
	// title names the object, path is where the spec is.
	title, path string
}

// at names a field of the pod's spec.
func (w *workload) at(field string) string { return w.title + ": " + w.path + "." + field }

// request is what the claim asks for, for one container or several that take turns.
type request struct {
	demand
	manifest.Request
}

// translate changes the spec, and returns the claim template. It returns nil where nothing asks for GPUs.
func (w *workload) translate() ([]byte, error) {
	containers, err := w.containers()
	if err != nil {
		return nil, err
	}
	w.flagEnvironment(containers)
	if !slices.ContainsFunc(containers, func(c *container) bool { return len(c.demands) > 0 }) {
		return nil, nil
	}
	w.tellOthers()
	selection, err := w.selection(containers)
	if err != nil {
		return nil, err
	}
	requests, err := w.requests(containers, selection)
	if err != nil {
		return nil, err
	}
	return w.claim(containers, requests)
}

// requests makes the requests of the claim.
func (w *workload) requests(containers []*container, s *selection) ([]*request, error) {
	var all []*request
	total := 0
	add := func(c *container, d demand) *request {
		r := &request{demand: d, Request: w.requestOf(c, d, s)}
		all = append(all, r)
		total += r.Count
		return r
	}
	// Ordinary init containers end before the others start, and take what these will have.
	for _, c := range containers {
		for _, d := range c.demands {
			if !c.ends {
				c.requests = append(c.requests, add(c, d))
			}
		}
	}
	for _, c := range containers {
		for _, d := range c.demands {
			if c.ends {
				c.requests = append(c.requests, w.borrow(c, d, all, add))
			}
		}
	}
	w.checkMPS(containers)
	if total > maxDevices {
		return nil, fmt.Errorf("%s: Too many: %d devices: a claim has %d at most; divide the pod, or give it several claims by hand", w.path, total, maxDevices)
	}
	if len(all) > maxRequests {
		return nil, fmt.Errorf("%s: Too many: %d requests: a claim has %d at most", w.path, len(all), maxRequests)
	}
	nameRequests(all)
	return all, nil
}

// checkMPS tells of containers that cannot start with what they ask for.
func (w *workload) checkMPS(containers []*container) {
	for _, c := range containers {
		shares := slices.ContainsFunc(c.requests, func(r *request) bool { return r.Class == manifest.ClassOf(policy.MPS) })
		if shares && len(c.requests) > 1 {
			w.found.Add(finding.Lost, w.at(c.path+".resources"), "", "a container with an MPS share cannot have another device and is not started: give each container one")
		}
	}
}

// borrow returns the request of a container that starts later, if it is large enough.
func (w *workload) borrow(c *container, d demand, all []*request, add func(*container, demand) *request) *request {
	var best *request
	for _, r := range all {
		if r.resource == d.resource && r.count >= d.count && r.memoryMi >= d.memoryMi && r.percent >= d.percent && (best == nil || r.count < best.count) {
			best = r
		}
	}
	if best == nil {
		w.found.Add(finding.Changed, w.at(c.path+".resources"), d.resource, "no other container has as much, so that the pod holds what this init container asks for until it ends")
		return add(c, d)
	}
	if best.count > d.count {
		w.found.Add(finding.Changed, w.at(c.path+".resources"), d.resource, fmt.Sprintf("the init container sees all %d devices of the container that starts after it", best.count))
	}
	return best
}

// nameRequests gives each request a name of its own.
func nameRequests(all []*request) {
	if len(all) == 1 {
		all[0].Name = claimName
		return
	}
	const room = validation.DNS1123LabelMaxLength - len("-99")
	taken := map[string]bool{}
	for _, r := range all {
		r.Name = unique(strings.TrimRight(r.Name[:min(len(r.Name), room)], "-"), func(name string) bool { return taken[name] })
		taken[r.Name] = true
	}
}

// unique returns a name that is not taken: the given one, or one with a number.
func unique(base string, taken func(name string) bool) string {
	name := base
	for n := 2; taken(name); n++ {
		name = fmt.Sprintf("%s-%d", base, n)
	}
	return name
}

// requestOf makes the request for what a container asks for.
func (w *workload) requestOf(c *container, d demand, s *selection) manifest.Request {
	kind, profile := d.device(w.options)
	if d.resource == resourceGPU && d.memoryMi+d.percent == 0 {
		kind, profile = cmp.Or(s.kind, kind), cmp.Or(s.profile, profile)
		if s.profile != "" && s.kind == "" && kind == policy.Whole {
			kind = policy.Partition
		}
	}
	if d.resource == resourceShared && (s.kind == policy.MPS || s.kind == policy.TimeSlice) {
		kind = s.kind
	}
	r := manifest.Request{Name: c.name, Class: manifest.ClassOf(kind), Count: d.count, SMPercent: d.percent}
	if d.memoryMi > 0 {
		r.Memory = fmt.Sprintf("%dMi", d.memoryMi)
	}
	if profile != "" {
		r.Selectors = append(r.Selectors, manifest.Selector(w.options.Driver, "profile", profile))
	}
	r.Selectors = append(r.Selectors, s.expressions...)
	field := w.at(c.path + ".resources.limits")
	switch {
	case kind == policy.MPS && d.count > 1:
		w.found.Add(finding.Lost, field, fmt.Sprintf("%s: %d", d.resource, d.count), "a container can have one MPS share only: the claim asks for one; ask for more memory and smPercent with capacity.requests")
		r.Count = 1
	case kind == policy.TimeSlice && d.count > 1:
		w.found.Add(finding.Changed, field, fmt.Sprintf("%s: %d", d.resource, d.count), "the shares are of different GPUs; before, they could be of one, and gave no more than one share")
	}
	return r
}

// claim returns the claim template, and has the pod and its containers use it.
func (w *workload) claim(containers []*container, requests []*request) ([]byte, error) {
	name, err := w.templateName()
	if err != nil {
		return nil, err
	}
	claims, err := listAt(w.spec, "resourceClaims")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", w.path, err)
	}
	own := unique(claimName, func(name string) bool {
		return slices.ContainsFunc(claims.Content, func(c *yaml.Node) bool { return document.Text(c, "name") == name })
	})
	claims.Content = append(claims.Content, object("name", own, "resourceClaimTemplateName", name))
	for _, c := range containers {
		if err := c.use(own, len(requests) > 1); err != nil {
			return nil, fmt.Errorf("%s.%s: %w", w.path, c.path, err)
		}
	}
	var wanted []manifest.Request
	for _, r := range requests {
		wanted = append(wanted, r.Request)
	}
	return manifest.ClaimTemplate(document.Text(w.object, "metadata", "namespace"), name, wanted)
}

// templateName returns a name for the claim template that no other one has.
func (w *workload) templateName() (string, error) {
	base := cmp.Or(document.Text(w.object, "metadata", "name"), strings.TrimRight(document.Text(w.object, "metadata", "generateName"), "-."))
	if base == "" {
		return "", errors.New("metadata.name: Required value: the claim template is named after it")
	}
	namespace := document.Text(w.object, "metadata", "namespace")
	for field, text := range map[string]string{"name": base, "namespace": namespace} {
		if wrong := validation.IsDNS1123Subdomain(text); text != "" && len(wrong) > 0 {
			return "", fmt.Errorf("metadata.%s: Invalid value: %s: %s", field, quote.Text(text), wrong[0])
		}
	}
	const room = validation.DNS1123SubdomainMaxLength - len("-gpu-99999")
	name := unique(strings.TrimRight(base[:min(len(base), room)], "-.")+"-gpu", func(name string) bool { return w.names[namespace+"/"+name] })
	w.names[namespace+"/"+name] = true
	return name, nil
}

// tellOthers tells what becomes of other fields that are about GPUs, and removes the runtime class that the device plugin needs.
func (w *workload) tellOthers() {
	if document.Text(w.spec, "runtimeClassName") == "nvidia" {
		document.Remove(w.spec, "runtimeClassName")
		w.found.Add(finding.Changed, w.at("runtimeClassName"), "nvidia", "dropped: the container runtime adds the devices by CDI, and NVIDIA's runtime would add all GPUs of images that have NVIDIA_VISIBLE_DEVICES=all")
	}
	if name := document.Text(w.spec, "nodeName"); name != "" {
		w.found.Add(finding.Lost, w.at("nodeName"), name, "kept: the scheduler allocates devices, and does not see a pod with nodeName, so that it never starts. Remove it, or select the node by the label kubernetes.io/hostname")
	}
	if name := document.Text(w.spec, "schedulerName"); name != "" && name != corev1.DefaultSchedulerName {
		w.found.Add(finding.Lost, w.at("schedulerName"), name,
			"kept: the pod waits until this scheduler allocates claims, which HAMi's does not. Remove it, so that the default one does")
	}
	metadata := strings.TrimSuffix(w.path, "spec") + "metadata.annotations"
	for key, value := range document.Fields(document.At(w.object, strings.Split(metadata, ".")...)) {
		if strings.HasPrefix(key.Value, domain) || strings.HasPrefix(key.Value, hamiDomain) {
			w.found.Add(finding.Lost, fmt.Sprintf("%s: %s[%s]", w.title, metadata, quote.Name(key.Value)), value.Value,
				"kept: Partage does not read it; selectors of the claim choose among GPUs")
		}
	}
}
