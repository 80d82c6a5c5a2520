// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/templates"
)

// templateOf are the files for workloads, by their kind. The claims are replaced.
var templateOf = map[string]string{
	Training: "training.yaml", Notebook: "notebook.yaml", CI: "ci.yaml", MPI: "mpi.yaml", Inference: "inference.yaml",
}

// requestOf returns what the claim of a candidate asks for. A share of a whole GPU needs a selector only
// where partitions are shared as well.
func requestOf(driver string, offers []*offer, c *candidate) manifest.Request {
	r := manifest.Request{Class: c.DeviceClass, Count: int(c.Count), Memory: c.memory, SMPercent: c.SMPercent}
	profiles := c.Profiles
	ofPartitions := func(s fleet.ShareRoom) bool { return s.Type == c.device && s.Profile != "" }
	if !c.partitions && slices.ContainsFunc(offers, func(o *offer) bool { return slices.ContainsFunc(o.Shares, ofPartitions) }) {
		profiles = []string{""}
	}
	if len(profiles) > 0 {
		r.Selectors = []string{manifest.Selector(driver, "profile", profiles...)}
	}
	return r
}

// render makes the manifest of a template.
func render(q Query, driver string, offers []*offer, c *candidate) (name, text string, err error) {
	name = templateOf[q.Kind]
	if q.Kind == Inference && Small(q.Memory) && (c.mechanism == MPS || c.mechanism == PartitionMPS) {
		name = "inference-small-models.yaml"
	}
	data, err := templates.Read(name)
	if err != nil {
		return "", "", err
	}
	documents, err := document.Split(templates.Body(data))
	var texts [][]byte
	for _, d := range documents {
		text, wrong := edit(d, q, requestOf(driver, offers, c).Exactly())
		texts, err = append(texts, text), errors.Join(err, wrong)
	}
	if err != nil {
		return "", "", fmt.Errorf("fill in the template %s: %w", name, err)
	}
	return name, fmt.Sprintf("# Made by kubectl gpu advise of templates/%s: %s.\n%s", name, c.mechanism, manifest.Join(texts)), nil
}

// edit puts what was advised into one document: into the request of a claim template, or into a workload and its container.
func edit(d document.Document, q Query, request any) ([]byte, error) {
	of, err := d.Parse()
	if err != nil {
		return nil, err
	}
	root := of.Content[0]
	requests, containers := document.At(root, "spec", "spec", "devices", "requests"), document.At(root, "spec", "template", "spec", "containers")
	only := cmp.Or(requests, containers)
	switch {
	case only == nil || len(only.Content) != 1:
		return nil, fmt.Errorf("the %s has not one request or container", document.Text(root, "kind"))
	case requests != nil:
		err = document.Get(only.Content[0], "exactly").Encode(request)
	default:
		if image := document.Get(only.Content[0], "image"); q.Image != "" && image != nil {
			image.Value, image.LineComment = q.Image, ""
			document.Remove(only.Content[0], "command") // the template's program is not in every image
		}
		scale(document.Get(root, "spec"), document.Text(root, "kind"), q.Count)
	}
	if err != nil {
		return nil, err
	}
	return manifest.Marshal(of)
}

// scale sets the number of replicas, or of pods of a job.
func scale(spec *yaml.Node, kind string, count int) {
	fields := []string{"replicas"}
	if kind == "Job" {
		fields = []string{"parallelism", "completions"}
	}
	for _, field := range fields {
		if value := document.Get(spec, field); value != nil {
			value.Value = strconv.Itoa(count)
		} else if count > 1 {
			value := []*yaml.Node{{Kind: yaml.ScalarNode, Value: field}, {Kind: yaml.ScalarNode, Value: strconv.Itoa(count)}}
			spec.Content = append(value, spec.Content...)
		}
	}
}
