// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package pods translates pods and what makes pods, from extended resources and labels of
// nodes to claims.
package pods

import (
	"bytes"
	"cmp"
	"fmt"
	"iter"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/config"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Options say what names of extended resources mean in the cluster.
type Options struct {
	// Driver is the name of the driver.
	Driver string
	// GPU is what a pod that asks for nvidia.com/gpu gets: Whole, MPS, TimeSlice, or a
	// partition of GPUProfile.
	GPU        policy.Kind
	GPUProfile string
	// Shared is what nvidia.com/gpu.shared is: TimeSlice or MPS.
	Shared policy.Kind
}

// Result is the translated stream.
type Result struct {
	// Text has all documents, in their order, each claim template before what uses it.
	Text     []byte
	Findings finding.List
	// Changed is how many objects were changed.
	Changed int
}

// Translate translates a stream of objects. What it does not know is passed on as it is.
func Translate(data []byte, o Options) (*Result, error) {
	documents, err := document.Split(data)
	if err != nil {
		return nil, err
	}
	t := &translation{options: o, names: map[string]bool{}}
	roots := make([]*yaml.Node, len(documents))
	for i, d := range documents {
		if roots[i], err = d.Parse(); err != nil {
			return nil, err
		}
		t.reserveNames(roots[i])
	}
	var out [][]byte
	for i, d := range documents {
		parts := [][]byte{d.Text}
		if roots[i] != nil {
			if parts, err = t.document(roots[i], d); err != nil {
				return nil, fmt.Errorf("document in line %d: %w", d.Line, err)
			}
		}
		for _, part := range parts {
			out = append(out, slices.Concat(bytes.TrimSuffix(part, []byte("\n")), []byte("\n")))
		}
	}
	return &Result{Text: manifest.Join(out), Findings: t.found, Changed: t.changed}, nil
}

// translation is the translation of one stream.
type translation struct {
	options Options
	found   finding.List
	changed int
	// names are those of the claim templates, with their namespaces.
	names map[string]bool
}

// reserveNames keeps the names of the claim templates that the stream has already.
func (t *translation) reserveNames(root *yaml.Node) {
	if root == nil {
		return
	}
	for _, n := range append([]*yaml.Node{root.Content[0]}, document.List(root.Content[0], "items")...) {
		if document.Text(n, "kind") == "ResourceClaimTemplate" {
			t.names[document.Text(n, "metadata", "namespace")+"/"+document.Text(n, "metadata", "name")] = true
		}
	}
}

// document returns the documents that one becomes: that of a list has the claim templates of all items in front.
func (t *translation) document(root *yaml.Node, d document.Document) (documents [][]byte, err error) {
	objects, prefix := root.Content, ""
	if list := root.Content[0]; document.Text(list, "kind") == "List" && document.Text(list, "apiVersion") == "v1" {
		prefix = "items"
		if objects, err = document.Items(list); err != nil {
			return nil, err
		}
	}
	for i, object := range objects {
		template, err := t.object(object)
		switch {
		case err != nil && prefix != "":
			return nil, fmt.Errorf("%s[%d]: %w", prefix, i, err)
		case err != nil:
			return nil, err
		case template != nil:
			t.changed++
			documents = append(documents, template)
		}
	}
	if len(documents) == 0 {
		return [][]byte{d.Text}, nil
	}
	is, known := isCompact(root)
	text, err := encode(root, is || !known)
	return append(documents, text), err
}

// podSpecs says where objects of a kind have a pod's spec, by group and kind.
var podSpecs = map[string][]string{
	"/Pod":                   {"spec"},
	"/PodTemplate":           {"template", "spec"},
	"/ReplicationController": {"spec", "template", "spec"},
	"apps/Deployment":        {"spec", "template", "spec"},
	"apps/ReplicaSet":        {"spec", "template", "spec"},
	"apps/StatefulSet":       {"spec", "template", "spec"},
	"apps/DaemonSet":         {"spec", "template", "spec"},
	"batch/Job":              {"spec", "template", "spec"},
	"batch/CronJob":          {"spec", "jobTemplate", "spec", "template", "spec"},
}

// object translates one object in place, and returns the claim template that it uses, or nil if it is not changed.
func (t *translation) object(n *yaml.Node) ([]byte, error) {
	if document.Get(n, "kind") == nil {
		// Nothing can be done with it in a cluster.
		if err := config.Expect("pods", document.Config{Root: n}); err != nil {
			return nil, err
		}
	}
	version, err := schema.ParseGroupVersion(document.Text(n, "apiVersion"))
	path, known := podSpecs[version.Group+"/"+document.Text(n, "kind")]
	w := &workload{translation: t, object: n, title: title(n), path: strings.Join(path, ".")}
	if err != nil || !known {
		w.passOn()
		w.flagConfiguration()
		return nil, nil
	}
	spec := document.At(n, path...)
	if spec == nil || spec.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s: %s: Required value: must be the spec of a pod", w.title, w.path)
	}
	for _, one := range nodes(n) {
		if one.Kind == yaml.AliasNode || one.Anchor != "" {
			w.found.Add(finding.Lost, w.title, "", fmt.Sprintf("it has an anchor (&) or alias (*) in line %d, so that a change here would change something elsewhere, too: write out what it stands for", one.Line))
			return nil, nil
		}
	}
	// Programs differ in which value they take of a field that is given twice.
	if err := n.Decode(new(any)); err != nil {
		return nil, fmt.Errorf("%s: %w", w.title, err)
	}
	w.spec = spec
	template, err := w.translate()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", w.title, err)
	}
	return template, nil
}

// configurationKeys are in configurations of the device plugin, and of mig-parted.
var configurationKeys = regexp.MustCompile(`(?m)^\s*(sharing|migStrategy|mig-configs):`)

// flagConfiguration tells of a ConfigMap that another command translates.
func (w *workload) flagConfiguration() {
	if document.Text(w.object, "kind") != "ConfigMap" {
		return
	}
	for key, value := range document.Fields(document.Get(w.object, "data")) {
		if configurationKeys.MatchString(value.Value) {
			w.found.Add(finding.Lost, w.title+": data["+quote.Name(key.Value)+"]", "", "is a configuration, and no pod: translate it with migrate device-plugin or migrate mig-parted")
		}
	}
}

// title names an object in messages.
func title(n *yaml.Node) string {
	name := cmp.Or(document.Text(n, "metadata", "name"), document.Text(n, "metadata", "generateName"))
	return strings.TrimSpace(document.Text(n, "kind") + " " + name)
}

// nodes goes through an object and all that is in it, keys included, by path.
func nodes(n *yaml.Node) iter.Seq2[string, *yaml.Node] {
	var walk func(n *yaml.Node, path string, yield func(string, *yaml.Node) bool) bool
	walk = func(n *yaml.Node, path string, yield func(string, *yaml.Node) bool) bool {
		if !yield(path, n) {
			return false
		}
		if n.Kind == yaml.SequenceNode {
			for i, item := range n.Content {
				if !walk(item, fmt.Sprintf("%s[%d]", path, i), yield) {
					return false
				}
			}
		}
		for key, value := range document.Fields(n) {
			at := strings.TrimPrefix(path+"."+key.Value, ".")
			if !walk(key, at, yield) || !walk(value, at, yield) {
				return false
			}
		}
		return true
	}
	return func(yield func(string, *yaml.Node) bool) { walk(n, "", yield) }
}

// passOn tells what an object of an unknown kind asks for.
func (w *workload) passOn() {
	for path, n := range nodes(w.object) {
		for key, value := range document.Fields(n) {
			if resource := strings.TrimPrefix(key.Value, "requests."); value.Kind == yaml.ScalarNode && isGPUResource(resource) {
				at := strings.TrimPrefix(path+"."+key.Value, ".")
				w.found.Add(finding.Lost, w.title+": "+at, value.Value, whyUnknown(document.Text(w.object, "kind")))
			}
		}
	}
}

func whyUnknown(kind string) string {
	if kind == "ResourceQuota" {
		return "a quota on claims has the name CLASS.deviceclass.resource.k8s.io/devices, such as gpu.nvidia.com.deviceclass.resource.k8s.io/devices"
	}
	return "the kind is not known here and passed on as it is: have its pods use a ResourceClaimTemplate, or a device class that serves this resource"
}

// isCompact reports whether lists in objects are written without an indent of their own, as far as the first one says so.
func isCompact(n *yaml.Node) (is, known bool) {
	if n.Style&yaml.FlowStyle != 0 {
		return false, false
	}
	for key, value := range document.Fields(n) {
		if value.Kind == yaml.SequenceNode && value.Style&yaml.FlowStyle == 0 && len(value.Content) > 0 {
			return value.Column == key.Column, true
		}
	}
	for _, child := range n.Content {
		if is, known = isCompact(child); known {
			return is, known
		}
	}
	return false, false
}

// inBlocks has everything on lines of its own.
func inBlocks(n *yaml.Node) {
	n.Style = 0
	for _, child := range n.Content {
		inBlocks(child)
	}
}

// encode writes a document.
func encode(n *yaml.Node, compact bool) (text []byte, err error) {
	// The YAML library panics where it finds itself in a state that it believes to be
	// impossible.
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("write the object as YAML: %v", p)
		}
	}()
	if n.Kind == yaml.DocumentNode && n.Content[0].Style&yaml.FlowStyle != 0 {
		// What was JSON would be one long line.
		inBlocks(n)
	}
	return manifest.Encode(n, compact)
}
