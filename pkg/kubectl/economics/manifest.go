// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/templates"
)

// templateOf returns the file for a workload. Its claim is replaced.
func templateOf(q Query, m Mechanism) string {
	switch q.Kind {
	case Training:
		return "training.yaml"
	case Notebook:
		return "notebook.yaml"
	case CI:
		return "ci.yaml"
	case MPI:
		return "mpi.yaml"
	case Inference:
	}
	if Small(q.Memory) && (m == MPS || m == PartitionMPS) {
		return "inference-small-models.yaml"
	}
	return "inference.yaml"
}

// requestOf returns what the claim of a candidate asks for.
func requestOf(q Query, s *Supply, c *candidate) manifest.Request {
	r := manifest.Request{Class: c.class, Count: int(c.count), Memory: quantity(c), SMPercent: c.smPercent}
	if names := selectedProfiles(s, c); len(names) > 0 {
		r.Selectors = []string{manifest.Selector(q.Driver, "profile", names...)}
	}
	return r
}

// selectedProfiles returns the profiles to select. A share of a whole GPU needs a selector only
// where partitions are shared as well.
func selectedProfiles(s *Supply, c *candidate) []string {
	info := mechanismInfo[c.mechanism]
	if info.deviceType != fleet.TypeMPS && info.deviceType != fleet.TypeTimeSlice || info.ofPartitions {
		return c.profiles
	}
	for _, m := range s.Models {
		for _, share := range m.Shares {
			if share.Type == info.deviceType && share.Profile != "" && !share.Policy {
				return c.profiles
			}
		}
	}
	return nil
}

// quantity writes the memory to ask for.
func quantity(c *candidate) string {
	switch asked := rounded(c); {
	case asked == 0:
		return ""
	case asked%gib == 0:
		return fmt.Sprintf("%dGi", asked/gib)
	default:
		return fmt.Sprintf("%dMi", asked/mib)
	}
}

// rounded returns the memory to ask for, rounded up to whole GiB, or to MiB where as many would
// not fit.
func rounded(c *candidate) int64 {
	up := func(unit int64) int64 { return (c.ask + unit - 1) / unit * unit }
	if slices.ContainsFunc(c.models, func(m *Model) bool { return up(gib) > mostIn(m, c) }) {
		return up(mib)
	}
	return up(gib)
}

// mostIn returns the largest memory that a claim for a candidate can ask for on a model so that
// as many fit as without rounding.
func mostIn(m *Model, c *candidate) int64 {
	info := mechanismInfo[c.mechanism]
	share := m.share(info.deviceType, info.ofPartitions, c.ask)
	if share == nil {
		return m.Memory
	}
	return min(share.Most, share.Memory/int64(max(1, share.claims(c.ask))))
}

// render makes the manifest of a template.
func render(q Query, s *Supply, c *candidate) (name, text string, err error) {
	name = templateOf(q, c.mechanism)
	data, err := templates.Read(name)
	if err != nil {
		return "", "", err
	}
	documents, err := document.Split(templates.Body(data))
	if err != nil {
		return "", "", fmt.Errorf("parse the template %s: %w", name, err)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "# Made by kubectl gpu advise of templates/%s: %s.\n", name, c.mechanism)
	for i, d := range documents {
		root, err := d.Parse()
		if err == nil {
			err = edit(root, q, requestOf(q, s, c).Exactly())
		}
		if err != nil {
			return "", "", fmt.Errorf("fill in the template %s: %w", name, err)
		}
		if i > 0 {
			out.WriteString("---\n")
		}
		text, err := manifest.Marshal(root)
		if err != nil {
			return "", "", fmt.Errorf("write the manifest of the template %s: %w", name, err)
		}
		out.Write(text)
	}
	return name, out.String(), nil
}

// edit puts what was advised into one document.
func edit(of *yaml.Node, q Query, request manifest.Exactly) error {
	if of == nil {
		return errors.New("a document is empty")
	}
	root := of.Content[0]
	if document.Text(root, "kind") == "ResourceClaimTemplate" {
		asked := document.At(root, "spec", "spec", "devices", "requests")
		if asked == nil || len(asked.Content) != 1 {
			return errors.New("the claim template has no single request")
		}
		value := document.Get(asked.Content[0], "exactly")
		if value == nil {
			return errors.New("the request of the claim template is not exact")
		}
		return value.Encode(request)
	}
	pod := document.At(root, "spec", "template", "spec", "containers")
	if pod == nil || len(pod.Content) != 1 {
		return errors.New("the workload has no single container")
	}
	if image := document.Get(pod.Content[0], "image"); q.Image != "" && image != nil {
		image.Value, image.LineComment = q.Image, ""
		document.Remove(pod.Content[0], "command") // the template's program is not in every image
	}
	if q.Count > 0 {
		return scale(root, q.Count)
	}
	return nil
}

// scale sets the number of replicas, or of pods of a job.
func scale(root *yaml.Node, count int) error {
	fields := []string{"replicas"}
	if document.Text(root, "kind") == "Job" {
		fields = []string{"completions", "parallelism"}
	}
	spec := document.Get(root, "spec")
	if spec == nil {
		return errors.New("the workload has no spec")
	}
	for i := len(fields) - 1; i >= 0; i-- {
		if value := document.Get(spec, fields[i]); value != nil {
			if err := value.Encode(count); err != nil {
				return err
			}
			continue
		}
		if count == 1 {
			continue
		}
		key, value := &yaml.Node{}, &yaml.Node{}
		if err := errors.Join(key.Encode(fields[i]), value.Encode(count)); err != nil {
			return err
		}
		spec.Content = append([]*yaml.Node{key, value}, spec.Content...)
	}
	return nil
}
