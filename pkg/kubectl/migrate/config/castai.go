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
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/strict"
)

const (
	// minSharedClients and maxSharedClients are the bounds that Cast AI documents.
	minSharedClients = 1
	maxSharedClients = 48
	maxGPUNames      = 200
)

// CastAI translates node templates of Cast AI: the JSON of its API, or what terraform show -json prints of a state.
func CastAI(data []byte, o Options) (*Result, error) {
	if len(o.Matches) > 0 {
		return nil, errors.New("--match: Forbidden: a node template says itself which GPUs it is for")
	}
	root, err := strict.ParseJSON(bytes.TrimSpace(data))
	if document.Get(root, "planned_values") != nil {
		return nil, errors.New("is a plan, which may leave open how GPUs are shared: give what terraform show -json prints after terraform apply")
	}
	templates := nodeTemplates(root, nil)
	if len(templates) == 0 {
		return nil, withoutTemplate(data, err)
	}
	chosen, err := o.general(templates, "")
	if err != nil {
		return nil, err
	}
	result := newResult(o.Driver)
	for _, t := range templates {
		if t.Name != chosen {
			result.Findings.Add(finding.Lost, strings.TrimSuffix(t.Path, "."), "", "a policy goes by GPU, not by node: translate one node template at a time, with --config")
			continue
		}
		r := &castReader{reader: reader{found: &result.Findings, prefix: t.Path, plain: plainKey, isUnset: isUnset}, clients: minSharedClients}
		r.object(t.Root, nil, map[string]strict.Read{"gpu": r.gpu, "name": strict.Skip},
			r.told(finding.Lost, "it is about the nodes that the autoscaler makes, which Partage leaves alone"))
		if err := r.Err(); err != nil {
			return nil, fmt.Errorf("invalid node template of Cast AI: %w", err)
		}
		r.offer(result)
	}
	return result, nil
}

// withoutTemplate says what a file is that has no node template. err is why it is no JSON.
func withoutTemplate(data []byte, err error) error {
	configs, other := document.Configs(data)
	if other == nil {
		other = Expect("castai", configs...)
	}
	if err != nil {
		return fmt.Errorf("is not the JSON of Cast AI's API or of terraform show -json: %w", cmp.Or(other, err))
	}
	return cmp.Or(other, errors.New("gpu: Required value: there is no node template with a section gpu"))
}

// nodeTemplates finds all objects that have a section gpu about sharing. The constraint of the same name has none of its fields.
func nodeTemplates(n *yaml.Node, at *field.Path) (found []document.Config) {
	for key := range document.Fields(onlyOf(document.Get(n, "gpu"))) {
		if slices.Contains([]string{"sharingstrategy", "enabletimesharing", "defaultsharedclientspergpu", "sharingconfiguration"}, plainKey(key.Value)) {
			prefix := ""
			if at != nil {
				prefix = at.String() + "."
			}
			return []document.Config{{Name: document.Text(n, "name"), Path: prefix, Root: n}}
		}
	}
	for key, value := range document.Fields(n) {
		found = append(found, nodeTemplates(value, at.Child(key.Value))...)
	}
	if n != nil && n.Kind == yaml.SequenceNode {
		for i, item := range n.Content {
			found = append(found, nodeTemplates(item, at.Index(i))...)
		}
	}
	return found
}

// onlyOf returns the element of a list that has one, as Terraform has a block, and everything else as it is.
func onlyOf(n *yaml.Node) *yaml.Node {
	if n != nil && n.Kind == yaml.SequenceNode && len(n.Content) == 1 {
		return n.Content[0]
	}
	return n
}

// plainKey makes one of the names that JSON and Terraform have for a field.
func plainKey(key string) string { return strings.ToLower(strings.ReplaceAll(key, "_", "")) }

// isUnset reports whether nobody has set a field, which Terraform shows as null or, in blocks, as the zero of its type.
func isUnset(n *yaml.Node) bool {
	return strict.IsNull(n) || strict.IsEmptyList(n) || n.Kind == yaml.ScalarNode && slices.Contains([]string{"", "0", "false"}, n.Value)
}

// castReader reads a node template.
type castReader struct {
	reader
	// kind is Whole if GPUs are not shared. clients is for GPUs that perGPU does not name.
	kind    policy.Kind
	clients int
	perGPU  []gpuClients
}

// gpuClients is how many share GPUs of one name.
type gpuClients struct {
	name    string
	clients int
	at      *field.Path
}

// strategies are ways to share by their names, without what the API has before them.
var strategies = map[string]policy.Kind{
	"mps": policy.MPS, "timesharing": policy.TimeSlice, "timeslicing": policy.TimeSlice, "none": policy.Whole, "unspecified": policy.Whole,
}

// gpu reads how GPUs are shared.
func (r *castReader) gpu(n *yaml.Node, at *field.Path) {
	n = onlyOf(n)
	seen := r.object(n, at, map[string]strict.Read{
		"sharingStrategy": func(n *yaml.Node, at *field.Path) {
			var known bool
			written, ok := r.String(n, at)
			if r.kind, known = strategies[strings.TrimPrefix(plainKey(strings.ReplaceAll(written, "-", "")), "gpusharingstrategy")]; ok && !known {
				r.Fault(field.NotSupported(at, quote.Short(written), []string{"mps", "time-sharing", "none"}))
			}
		},
		"enableTimeSharing":          func(n *yaml.Node, at *field.Path) { r.Bool(n, at) },
		"defaultSharedClientsPerGpu": func(n *yaml.Node, at *field.Path) { r.clients = r.clientsOf(n, at) },
		"sharingConfiguration":       r.names,
		"userManagedGpuDrivers": r.told(finding.Lost,
			"Partage installs no drivers; whoever does goes on doing so. The device plugin that Cast AI installs must not run on the same nodes"),
	}, r.told(finding.Lost, "this field of a node template is not known here"))
	// It is deprecated, and the strategy wins.
	if seen["enableTimeSharing"] && !seen["sharingStrategy"] {
		r.kind = policy.TimeSlice
	}
	r.kind = cmp.Or(r.kind, policy.Whole)
	switch clients := seen["defaultSharedClientsPerGpu"]; {
	case r.kind == policy.Whole && (clients || seen["sharingConfiguration"]) && !seen["sharingStrategy"]:
		r.Fault(field.Required(at.Child("sharingStrategy"), "says how clients share a GPU: GPU_SHARING_STRATEGY_MPS or GPU_SHARING_STRATEGY_TIME_SHARING"))
	case r.kind == policy.Whole && (clients || seen["sharingConfiguration"]):
		r.tell(finding.Unread, at, text(n), "GPUs are not shared, so that numbers of clients mean nothing")
	case r.kind != policy.Whole && !clients:
		r.tell(finding.Changed, at.Child("defaultSharedClientsPerGpu"), "", "is not given: each GPU that is not named has one client")
	}
}

func (r *castReader) clientsOf(n *yaml.Node, at *field.Path) int {
	return r.IntBetween(n, at, minSharedClients, maxSharedClients, "")
}

// names reads an object by name of GPU, or the blocks that Terraform has.
func (r *castReader) names(n *yaml.Node, at *field.Path) {
	one := func(name string, n *yaml.Node, at *field.Path) {
		entry := gpuClients{name: name, at: at}
		r.object(n, at, map[string]strict.Read{
			"gpuName":             func(n *yaml.Node, at *field.Path) { entry.name, _ = r.String(n, at) },
			"sharedClientsPerGpu": func(n *yaml.Node, at *field.Path) { entry.clients = r.clientsOf(n, at) },
		}, r.told(finding.Lost, "this field of a GPU is not known here"))
		if entry.name == "" || entry.clients == 0 {
			r.Fault(field.Required(at, "says which GPUs, and how many clients share one"))
		}
		r.perGPU = append(r.perGPU, entry)
	}
	if n.Kind == yaml.SequenceNode {
		r.List(n, at, maxGPUNames, func(n *yaml.Node, at *field.Path) { one("", n, at) })
		return
	}
	r.Map(n, at, one)
}

// offer makes the policy: a rule for each name of a GPU.
func (r *castReader) offer(result *Result) {
	result.serve(ResourceGPU, target{kind: r.kind})
	result.Policy.Default = &Offer{Kinds: []policy.Kind{policy.Whole}}
	if r.kind == policy.Whole {
		return
	}
	by := func(clients int) Offer { return Offer{Kinds: []policy.Kind{r.kind}, Sharing: sharing(r.kind, clients)} }
	result.Policy.Default = new(by(r.clients))
	names := map[string]string{}
	for _, g := range r.perGPU {
		pattern, short, known := productOf(g.name)
		switch first, twice := names[pattern]; {
		case !known:
			r.tell(finding.Lost, g.at, g.name, "no product is known by this name: add a rule with the productName that nvidia-smi -L prints")
		case twice:
			r.tell(finding.Unread, g.at, g.name, fmt.Sprintf("is the same GPU as %s, which comes first", quote.Text(first)))
		default:
			names[pattern] = g.name
			result.Policy.Rules = append(result.Policy.Rules, Rule{Name: short, Match: Match{productName: pattern}, Offer: by(g.clients)})
		}
	}
	// The special before the general: a longer pattern is never the more general one.
	slices.SortStableFunc(result.Policy.Rules, func(a, b Rule) int {
		return cmp.Or(cmp.Compare(len(b.Match[productName]), len(a.Match[productName])), cmp.Compare(a.Name, b.Name))
	})
	r.found.Add(finding.Changed, "gpu", "", "pods that ask for nvidia.com/gpu get a share, as before; translate them with migrate pods --gpu "+string(r.kind))
}

// productNames are the names of products, as patterns of a policy, by what clouds and
// autoscalers call them, without "nvidia" and "tesla".
var productNames = map[string]string{
	"k80": "Tesla K80", "p4": "Tesla P4", "p100": "Tesla P100*", "v100": "Tesla V100*", "t4": "Tesla T4", "t4g": "NVIDIA T4G",
	"a2": "NVIDIA A2", "a10": "NVIDIA A10", "a10g": "NVIDIA A10G", "a16": "NVIDIA A16", "a30": "NVIDIA A30", "a40": "NVIDIA A40",
	"a100": "NVIDIA A100*", "a100-40gb": "NVIDIA A100*40GB*", "a100-80gb": "NVIDIA A100*80GB*",
	"l4": "NVIDIA L4", "l40": "NVIDIA L40", "l40s": "NVIDIA L40S",
	"h100": "NVIDIA H100*", "h100-80gb": "NVIDIA H100*80GB*", "h100-mega-80gb": "NVIDIA H100*80GB*", "h200": "NVIDIA H200*", "h200-141gb": "NVIDIA H200*",
	"gh200": "NVIDIA GH200*", "b200": "NVIDIA B200*", "gb200": "NVIDIA GB200*",
	"rtx-pro-6000": "NVIDIA RTX PRO 6000*",
}

// productOf returns the pattern for a GPU's name, and what it was looked up as.
func productOf(name string) (pattern, short string, known bool) {
	short = strings.NewReplacer(" ", "-", "_", "-").Replace(strings.ToLower(strings.TrimSpace(name)))
	short = strings.TrimPrefix(strings.TrimPrefix(short, "nvidia-"), "tesla-")
	pattern, known = productNames[short]
	return pattern, short, known
}
