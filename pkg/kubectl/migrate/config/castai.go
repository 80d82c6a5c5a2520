// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	// minSharedClients and maxSharedClients are the bounds that Cast AI documents.
	minSharedClients = 1
	maxSharedClients = 48
	maxGPUNames      = 200
	whyNodes         = "it is about the nodes that the autoscaler makes, which Partage leaves alone"
)

// gpuSharing is how a node template shares its GPUs.
type gpuSharing struct {
	// kind is Whole where GPUs are not shared.
	kind    policy.Kind
	clients int
	perGPU  []gpuClients
}

// gpuClients is how many share GPUs of one name.
type gpuClients struct {
	name    string
	clients int
	path    string
}

// CastAI translates node templates of Cast AI: the JSON of its API, the same in YAML, or what terraform show -json prints.
func CastAI(data []byte, o Options) (*Result, error) {
	if len(o.Matches) > 0 {
		return nil, fmt.Errorf("--match: Forbidden: a node template says itself which GPUs it is for")
	}
	root, err := parseCastAI(data)
	if err != nil {
		return nil, err
	}
	templates, isTerraform := nodeTemplates(root, "", ""), document.Get(root, "format_version") != nil
	if isTerraform {
		templates = terraformTemplates(cmp.Or(document.At(root, "planned_values", "root_module"), document.At(root, "values", "root_module")))
	}
	var names []string
	for _, t := range templates {
		names = append(names, t.Name)
	}
	if err := o.checkNames(names); err != nil {
		return nil, err
	}
	chosen, err := o.chooseTemplate(names)
	if err != nil {
		return nil, err
	}
	result := newResult(o.Driver)
	for i, t := range templates {
		if i != chosen {
			result.Findings.Lost(strings.TrimSuffix(t.Path, "."), "", "a policy goes by GPU, not by node: translate one node template at a time, with --config")
			continue
		}
		if isTerraform && isUnknown(root, strings.TrimSuffix(t.Path, ".")) {
			return nil, fmt.Errorf("%sgpu: Forbidden: a part of it is known only after terraform apply: give what terraform show -json prints of the state then", t.Path)
		}
		if err := result.nodeTemplate(t, isTerraform); err != nil {
			return nil, fmt.Errorf("invalid node template of Cast AI: %w", err)
		}
	}
	return result, nil
}

func (o *Options) chooseTemplate(names []string) (int, error) {
	switch {
	case len(names) == 0:
		return 0, fmt.Errorf("gpu: Required value: there is no node template with a section gpu")
	case len(o.Configs) > 1:
		return 0, fmt.Errorf("--config: Too many: %d: translate one node template at a time", len(o.Configs))
	case len(o.Configs) == 1:
		return slices.Index(names, o.Configs[0]), nil
	case len(names) > 1:
		return 0, fmt.Errorf("there are several node templates: %s. Say which one to translate with --config NAME", quote.Names(names))
	}
	return 0, nil
}

// parseCastAI takes what begins with a brace for JSON.
func parseCastAI(data []byte) (*yaml.Node, error) {
	trimmed := bytes.TrimSpace(data)
	if len(trimmed) == 0 {
		return nil, fmt.Errorf("is empty")
	}
	if trimmed[0] == '{' || trimmed[0] == '[' {
		return strict.ParseJSON(trimmed)
	}
	root, err := strict.Parse(data)
	if err == nil && root.Kind == yaml.MappingNode {
		return root, nil
	}
	return nil, fmt.Errorf("is neither JSON nor YAML; of Terraform, give what terraform show -json prints: %w", cmp.Or(err, errors.New("must be an object")))
}

// terraformTemplates returns the node templates of a module and those that it calls, of a state or a plan. Blocks are lists there.
func terraformTemplates(module *yaml.Node) (found []document.Config) {
	for _, r := range document.List(module, "resources") {
		if values := document.Get(r, "values"); document.Text(r, "type") == "castai_node_template" && isGPUSection(onlyOf(document.Get(values, "gpu"))) {
			name := document.Text(r, "name")
			if own := document.Get(values, "name"); own != nil && !isUnset(own) {
				name = own.Value
			}
			found = append(found, document.Config{Name: name, Path: document.Text(r, "address") + ".", Root: values})
		}
	}
	for _, m := range document.List(module, "child_modules") {
		found = append(found, terraformTemplates(m)...)
	}
	return found
}

// isUnknown reports whether a plan leaves open how GPUs are shared: what is open is missing among the values, as if nobody had set it.
func isUnknown(root *yaml.Node, address string) bool {
	for _, r := range document.List(root, "resource_changes") {
		if document.Text(r, "address") == address && hasTrue(document.At(r, "change", "after_unknown", "gpu")) {
			return true
		}
	}
	return false
}

func hasTrue(n *yaml.Node) bool {
	return n != nil && (n.Kind == yaml.ScalarNode && n.Value == "true" || slices.ContainsFunc(n.Content, hasTrue))
}

// onlyOf returns the element of a list that has one, and everything else as it is.
func onlyOf(n *yaml.Node) *yaml.Node {
	if n != nil && n.Kind == yaml.SequenceNode && len(n.Content) == 1 {
		return n.Content[0]
	}
	return n
}

// maxTemplateDepth is how deep node templates are looked for.
const maxTemplateDepth = 12

// nodeTemplates finds all objects that have a section gpu, with the name of the template.
func nodeTemplates(n *yaml.Node, name, path string) []document.Config {
	var found []document.Config
	if strings.Count(path, ".") > maxTemplateDepth {
		return nil
	}
	switch n.Kind {
	case yaml.SequenceNode:
		for i, item := range n.Content {
			found = append(found, nodeTemplates(item, name, fmt.Sprintf("%s[%d].", strings.TrimSuffix(path, "."), i))...)
		}
	case yaml.MappingNode:
		if isGPUSection(document.Get(n, "gpu")) {
			return []document.Config{{Name: cmp.Or(document.Text(n, "name"), name), Path: path, Root: n}}
		}
		if path == "" && isGPUSection(n) {
			gpu := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Content: []*yaml.Node{{Kind: yaml.ScalarNode, Tag: "!!str", Value: "gpu"}, n}}
			return []document.Config{{Root: gpu}}
		}
		for key, value := range document.Fields(n) {
			found = append(found, nodeTemplates(value, key.Value, path+quote.Name(key.Value)+".")...)
		}
	case yaml.DocumentNode, yaml.ScalarNode, yaml.AliasNode:
	}
	return found
}

// isGPUSection tells the section about sharing from the constraint of the same name.
func isGPUSection(n *yaml.Node) bool {
	return hasKey(n, "sharingstrategy", "enabletimesharing", "defaultsharedclientspergpu", "sharingconfiguration")
}

// hasKey reports whether an object has one of some fields, by their plain names.
func hasKey(n *yaml.Node, plain ...string) bool {
	for key := range document.Fields(n) {
		if slices.Contains(plain, plainKey(key.Value)) {
			return true
		}
	}
	return false
}

// plainKey makes one of the names that JSON and Terraform have for a field.
func plainKey(key string) string { return strings.ToLower(strings.ReplaceAll(key, "_", "")) }

// nodeTemplate translates one.
func (r *Result) nodeTemplate(t document.Config, isTerraform bool) error {
	reader := &castReader{reader: reader{found: &r.Findings, prefix: t.Path, plain: plainKey}, sharing: gpuSharing{clients: minSharedClients}}
	if isTerraform {
		reader.isUnset = isUnset
	}
	reader.object(t.Root, nil, map[string]strict.Read{"gpu": reader.gpu, "name": strict.Skip}, reader.loses(whyNodes))
	if err := reader.Err(); err != nil {
		return err
	}
	r.offerSharing(reader.sharing)
	return nil
}

// castReader reads a node template.
type castReader struct {
	reader
	sharing gpuSharing
}

// isUnset reports whether Terraform shows a field so that nobody has set: as null or, in blocks, the zero of its type.
func isUnset(n *yaml.Node) bool {
	return strict.IsNull(n) || n.Kind == yaml.SequenceNode && len(n.Content) == 0 || n.Kind == yaml.ScalarNode && slices.Contains([]string{"", "0", "false"}, n.Value)
}

// gpu reads how GPUs are shared.
func (r *castReader) gpu(n *yaml.Node, at *field.Path) {
	n = onlyOf(n)
	var strategy, timeSharing policy.Kind
	var timeSharingPath, timeSharingValue string
	seen := r.object(n, at, map[string]strict.Read{
		"sharingStrategy": func(n *yaml.Node, at *field.Path) { strategy = r.strategy(n, at) },
		"enableTimeSharing": func(n *yaml.Node, at *field.Path) {
			timeSharing, timeSharingPath, timeSharingValue = policy.Whole, r.path(at), n.Value
			if r.Bool(n, at) {
				timeSharing = policy.TimeSlice
			}
		},
		"defaultSharedClientsPerGpu": func(n *yaml.Node, at *field.Path) { r.sharing.clients = r.clients(n, at) },
		"sharingConfiguration":       r.perGPU,
		"userManagedGpuDrivers": func(n *yaml.Node, at *field.Path) {
			r.found.Lost(r.path(at), text(n), "Partage installs no drivers; whoever does goes on doing so. The device plugin that Cast AI installs must not run on the same nodes")
		},
	}, r.loses("this field of a node template is not known here"))
	if strategy != "" && timeSharing != "" && strategy != timeSharing {
		r.found.Unread(timeSharingPath, timeSharingValue, "it is deprecated, and sharingStrategy wins")
	}
	r.sharing.kind = cmp.Or(strategy, timeSharing, policy.Whole)
	clients := seen["defaultSharedClientsPerGpu"] || seen["sharingConfiguration"]
	switch {
	case n.Kind == yaml.MappingNode && clients && !seen["sharingStrategy"] && !seen["enableTimeSharing"]:
		r.Fault(field.Required(at.Child("sharingStrategy"), "says how clients share a GPU: GPU_SHARING_STRATEGY_MPS or GPU_SHARING_STRATEGY_TIME_SHARING"))
	case r.sharing.kind == policy.Whole && clients:
		r.found.Unread(r.path(at), text(n), "GPUs are not shared, so that numbers of clients mean nothing")
	case r.sharing.kind != policy.Whole && !seen["defaultSharedClientsPerGpu"]:
		r.found.Changed(r.path(at.Child("defaultSharedClientsPerGpu")), "", "is not given: each GPU that is not named has one client")
	}
}

// strategy reads the name of a strategy, with or without the prefix of the API.
func (r *castReader) strategy(n *yaml.Node, at *field.Path) policy.Kind {
	written, ok := r.String(n, at)
	if !ok {
		return ""
	}
	plain := plainKey(strings.ReplaceAll(strings.TrimPrefix(strings.ToUpper(written), "GPU_SHARING_STRATEGY_"), "-", "_"))
	switch plain {
	case "mps":
		return policy.MPS
	case "timesharing", "timeslicing", "timeslice":
		return policy.TimeSlice
	case "none", "unspecified", "":
		return policy.Whole
	}
	r.Fault(field.NotSupported(at, quote.Short(written), []string{"mps", "time-sharing", "none"}))
	return ""
}

func (r *castReader) clients(n *yaml.Node, at *field.Path) int {
	return r.IntBetween(n, at, minSharedClients, maxSharedClients, "")
}

// perGPU reads an object by name of GPU, or the list or the blocks that Terraform has.
func (r *castReader) perGPU(n *yaml.Node, at *field.Path) {
	one := func(name string, n *yaml.Node, at *field.Path) {
		entry := gpuClients{name: name, path: r.path(at)}
		seen := r.object(n, at, map[string]strict.Read{
			"gpuName":             func(n *yaml.Node, at *field.Path) { entry.name, _ = r.String(n, at) },
			"sharedClientsPerGpu": func(n *yaml.Node, at *field.Path) { entry.clients = r.clients(n, at) },
		}, r.loses("this field of a GPU is not known here"))
		if n.Kind != yaml.MappingNode {
			return
		}
		if entry.name == "" {
			r.Fault(field.Required(at.Child("gpuName"), "says which GPUs"))
		}
		if !seen["sharedClientsPerGpu"] {
			r.Fault(field.Required(at.Child("sharedClientsPerGpu"), "says how many share one"))
		}
		r.sharing.perGPU = append(r.sharing.perGPU, entry)
	}
	switch {
	case n.Kind == yaml.SequenceNode:
		r.List(n, at, maxGPUNames, func(n *yaml.Node, at *field.Path) { one("", n, at) })
	case n.Kind == yaml.MappingNode && hasKey(n, "gpuname"):
		one("", n, at)
	case n.Kind == yaml.MappingNode && len(n.Content)/2 > maxGPUNames:
		r.Fault(field.TooMany(at, len(n.Content)/2, maxGPUNames))
	default:
		r.Map(n, at, one)
	}
}

// offerSharing makes the policy: a rule for each name of a GPU.
func (r *Result) offerSharing(s gpuSharing) {
	r.serve(resourceGPU, target{kind: s.kind})
	if s.kind == policy.Whole {
		r.Policy.Default = &Offer{Kinds: []policy.Kind{policy.Whole}}
		return
	}
	offer := func(clients int) Offer {
		o := Offer{Kinds: []policy.Kind{}}
		o.shared(s.kind, clients)
		return o
	}
	general := offer(s.clients)
	r.Policy.Default = &general
	names := map[string]string{}
	for _, g := range s.perGPU {
		pattern, short, known := productName(g.name)
		switch first, twice := names[pattern]; {
		case !known:
			r.Findings.Lost(g.path, g.name, fmt.Sprintf("no product is known by this name: add a rule with the productName that nvidia-smi -L prints. Known are %s", strings.Join(knownNames(), ", ")))
			continue
		case twice:
			r.Findings.Unread(g.path, g.name, fmt.Sprintf("is the same GPU as %s, which comes first", quote.Text(first)))
			continue
		}
		names[pattern] = g.name
		r.Policy.Rules = append(r.Policy.Rules, Rule{Name: short, Match: Match{ProductName: pattern}, Offer: offer(g.clients)})
	}
	// The special before the general: a longer pattern is never the more general one.
	slices.SortStableFunc(r.Policy.Rules, func(a, b Rule) int {
		return cmp.Or(cmp.Compare(len(b.Match.ProductName), len(a.Match.ProductName)), cmp.Compare(a.Name, b.Name))
	})
	r.Findings.Changed("gpu", "", "pods that ask for nvidia.com/gpu get a share, as before; translate them with migrate pods --gpu "+string(s.kind))
}
