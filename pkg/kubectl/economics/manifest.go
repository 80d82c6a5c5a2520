// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
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

// exactly is the part of a claim that asks for devices.
type exactly struct {
	DeviceClassName string     `yaml:"deviceClassName"`
	Count           int64      `yaml:"count,omitempty"`
	Selectors       []celEntry `yaml:"selectors,omitempty"`
	Capacity        *struct {
		Requests requests `yaml:"requests"`
	} `yaml:"capacity,omitempty"`
}

type celEntry struct {
	CEL struct {
		Expression string `yaml:"expression"`
	} `yaml:"cel"`
}

type requests struct {
	Memory    string `yaml:"memory,omitempty"`
	SMPercent int    `yaml:"smPercent,omitempty"`
}

// requestOf returns what the claim of a candidate asks for.
func requestOf(q Query, s *Supply, c *candidate) exactly {
	r := exactly{DeviceClassName: c.class}
	if c.count > 1 {
		r.Count = c.count
	}
	if names := selectedProfiles(s, c); len(names) > 0 {
		var e celEntry
		e.CEL.Expression = selector(q.Driver, "profile", names...)
		r.Selectors = append(r.Selectors, e)
	}
	if c.ask > 0 || c.smPercent > 0 {
		r.Capacity = &struct {
			Requests requests `yaml:"requests"`
		}{requests{quantity(c), c.smPercent}}
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
func render(q Query, s *Supply, c *candidate) (name, manifest string, err error) {
	name = templateOf(q, c.mechanism)
	data, err := templates.Read(name)
	if err != nil {
		return "", "", err
	}
	documents, err := parse(templates.Body(data))
	if err != nil {
		return "", "", fmt.Errorf("parse the template %s: %w", name, err)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "# Made by kubectl gpu advise of templates/%s: %s.\n", name, c.mechanism)
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	for _, document := range documents {
		if err := edit(document, q, requestOf(q, s, c)); err != nil {
			return "", "", fmt.Errorf("fill in the template %s: %w", name, err)
		}
		if err := encoder.Encode(document); err != nil {
			return "", "", fmt.Errorf("write the manifest of the template %s: %w", name, err)
		}
	}
	if err := encoder.Close(); err != nil {
		return "", "", fmt.Errorf("write the manifest of the template %s: %w", name, err)
	}
	return name, out.String(), nil
}

func parse(data []byte) ([]*yaml.Node, error) {
	var documents []*yaml.Node
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return nil, err
		}
		documents = append(documents, &document)
	}
}

// edit puts what was advised into one document.
func edit(document *yaml.Node, q Query, request exactly) error {
	if len(document.Content) == 0 {
		return errors.New("a document is empty")
	}
	root := document.Content[0]
	if kindOf(root) == "ResourceClaimTemplate" {
		asked := at(root, "spec", "spec", "devices", "requests")
		if asked == nil || len(asked.Content) != 1 {
			return errors.New("the claim template has no single request")
		}
		value := child(asked.Content[0], "exactly")
		if value == nil {
			return errors.New("the request of the claim template is not exact")
		}
		return value.Encode(request)
	}
	pod := at(root, "spec", "template", "spec", "containers")
	if pod == nil || len(pod.Content) != 1 {
		return errors.New("the workload has no single container")
	}
	if image := child(pod.Content[0], "image"); q.Image != "" && image != nil {
		image.Value, image.LineComment = q.Image, ""
	}
	if q.Count > 0 {
		return scale(root, q.Count)
	}
	return nil
}

// scale sets the number of replicas, or of pods of a job.
func scale(root *yaml.Node, count int) error {
	fields := []string{"replicas"}
	if kindOf(root) == "Job" {
		fields = []string{"completions", "parallelism"}
	}
	spec := child(root, "spec")
	if spec == nil {
		return errors.New("the workload has no spec")
	}
	for i := len(fields) - 1; i >= 0; i-- {
		if value := child(spec, fields[i]); value != nil {
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

func kindOf(root *yaml.Node) string {
	if kind := child(root, "kind"); kind != nil {
		return kind.Value
	}
	return ""
}

// at goes down a path of mappings, nil where it ends.
func at(node *yaml.Node, path ...string) *yaml.Node {
	for _, name := range path {
		if node = child(node, name); node == nil {
			return nil
		}
	}
	return node
}

// child returns the value of a key of a mapping, nil if there is none.
func child(node *yaml.Node, name string) *yaml.Node {
	if node == nil || node.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(node.Content); i += 2 {
		if node.Content[i].Value == name {
			return node.Content[i+1]
		}
	}
	return nil
}
