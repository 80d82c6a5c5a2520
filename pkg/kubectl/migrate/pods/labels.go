// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// labels translates labels that GPU feature discovery gives to nodes.
type labels struct {
	options    Options
	containers []*container
}

// outcome is what becomes of a requirement.
type outcome struct {
	// translated says that the requirement is taken out of the pod.
	translated bool
	// expression is in CEL, "" where the claim itself says as much.
	expression string
	// kind and profile are what nvidia.com/gpu is.
	kind    policy.Kind
	profile string
	// lost and note are told to the user.
	lost, note string
}

const (
	whyImplied = "dropped: the claim is for a GPU that has it"
	whyLayout  = "dropped: there are no layouts, and partitions are made when claims ask for them"
)

// migLabel matches labels about the partitions of a profile.
var migLabel = regexp.MustCompile(`^mig-[0-9]{1,2}g\.[0-9]{1,4}gb[a-z.-]*\.(count|product)$`)

// versions are labels with a part of a version, as an expression.
var versions = map[string]string{
	"gpu.compute.major":            "cudaComputeCapability.major()",
	"gpu.compute.minor":            "cudaComputeCapability.minor()",
	"cuda.driver.major":            "driverVersion.major()",
	"cuda.driver.minor":            "driverVersion.minor()",
	"cuda.driver.rev":              "driverVersion.patch()",
	"cuda.driver-version.major":    "driverVersion.major()",
	"cuda.driver-version.minor":    "driverVersion.minor()",
	"cuda.driver-version.revision": "driverVersion.patch()",
	"cuda.runtime.major":           "cudaDriverVersion.major()",
	"cuda.runtime.minor":           "cudaDriverVersion.minor()",
	"cuda.runtime-version.major":   "cudaDriverVersion.major()",
	"cuda.runtime-version.minor":   "cudaDriverVersion.minor()",
}

// fullVersions are labels with a whole version, by attribute.
var fullVersions = map[string]string{
	"cuda.driver-version.full": "driverVersion", "cuda.runtime-version.full": "cudaDriverVersion",
}

// knows reports whether a label is one of GPUs.
func (l *labels) knows(key string) bool { return strings.HasPrefix(key, domain) }

// translate translates a requirement. Those that are not about GPUs stay.
func (l *labels) translate(r requirement) (outcome, error) {
	name, ours := strings.CutPrefix(r.key, domain)
	if !ours {
		return outcome{}, nil
	}
	if err := r.check(); err != nil {
		return outcome{}, err
	}
	switch {
	case r.operator == doesNotExist:
		return outcome{lost: "kept: a claim cannot ask for a node without a label"}, nil
	case name == "device-plugin.config":
		return outcome{lost: "kept: it is the choice of the device plugin's configuration, and has no meaning without it"}, nil
	case r.operator == exists:
		return outcome{translated: true, note: whyImplied}, nil
	}
	if expression := versions[name]; expression != "" {
		return numbers(manifest.Attribute(l.options.Driver, expression), r)
	}
	if attribute := fullVersions[name]; attribute != "" {
		return fullVersion(manifest.Attribute(l.options.Driver, attribute), r)
	}
	return l.model(name, r)
}

// model translates a requirement for what the GPUs of a node are.
func (l *labels) model(name string, r requirement) (outcome, error) {
	switch name {
	case "gpu.product":
		return l.product(r)
	case "gpu.family":
		return texts(manifest.Attribute(l.options.Driver, "architecture")+".lowerAscii().replace(' ', '-')", r, r.values), nil
	case "gpu.memory":
		return l.memory(r)
	case "gpu.count":
		return l.count(r)
	case "gpu.sharing-strategy":
		return sharingStrategy(r), nil
	case "mig.config", "mig.config.state", "mig.strategy":
		return outcome{translated: true, note: whyLayout}, nil
	}
	switch {
	case migLabel.MatchString(name) && strings.HasSuffix(name, ".product"):
		return l.product(r)
	case migLabel.MatchString(name):
		return outcome{translated: true, note: whyLayout}, nil
	case isImplied(name) && r.operator == in && slices.Equal(r.values, []string{"true"}):
		return outcome{translated: true, note: whyImplied}, nil
	}
	return outcome{lost: "kept: no attribute of a device says this, so that it depends on GPU feature discovery, or on who sets the label"}, nil
}

// isImplied reports whether a label is true on every node from which the claim can get a device.
func isImplied(name string) bool {
	return name == "gpu.present" || name == "mig.capable" || name == "mps.capable" || strings.HasPrefix(name, "gpu.deploy.")
}

// texts compares a text with values in lower case.
func texts(attribute string, r requirement, values []string) outcome {
	quoted := make([]string, 0, len(values))
	for _, value := range values {
		quoted = append(quoted, "'"+strings.ToLower(value)+"'")
	}
	return outcome{translated: true, expression: oneOf(attribute, r.operator, quoted)}
}

// oneOf compares with values that are written in CEL.
func oneOf(attribute, operator string, values []string) string {
	negate := ""
	if operator == notIn {
		negate = "!"
	}
	if len(values) == 1 {
		return attribute + map[string]string{"": " == ", "!": " != "}[negate] + values[0]
	}
	text := attribute + " in [" + strings.Join(values, ", ") + "]"
	if negate != "" {
		text = "!(" + text + ")"
	}
	return text
}

// anyOf joins expressions of which one must hold, or none. Others may be joined to the result.
func anyOf(expressions []string, operator string) string {
	text := expressions[0]
	if len(expressions) > 1 {
		text = "(" + strings.Join(expressions, ") || (") + ")"
	}
	switch {
	case operator == notIn:
		return "!(" + text + ")"
	case len(expressions) > 1:
		return "(" + text + ")"
	}
	return text
}

// number reads a value that is a whole number, as Kubernetes compares labels.
func number(value string) (int64, error) {
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("values: Invalid value: %s: must be a whole number", quote.Text(value))
	}
	return n, nil
}

// numbers compares a number.
func numbers(attribute string, r requirement) (outcome, error) {
	var values []string
	for _, value := range r.values {
		n, err := number(value)
		if err != nil {
			return outcome{}, err
		}
		values = append(values, strconv.FormatInt(n, 10))
	}
	o := outcome{translated: true}
	switch r.operator {
	case greater:
		o.expression = attribute + " > " + values[0]
	case less:
		o.expression = attribute + " < " + values[0]
	default:
		o.expression = oneOf(attribute, r.operator, values)
	}
	return o, nil
}

// fullVersion compares a version, of which the driver leaves out leading zeros.
func fullVersion(attribute string, r requirement) (outcome, error) {
	if r.operator != in && r.operator != notIn {
		return outcome{lost: "kept: a version is no number"}, nil
	}
	var any []string
	for _, value := range r.values {
		parts := strings.Split(value, ".")
		if len(parts) > 3 {
			return outcome{}, fmt.Errorf("values: Invalid value: %s: must be a version", quote.Text(value))
		}
		var plain [3]string
		for i := range plain {
			plain[i] = "0"
			if i < len(parts) {
				n, err := number(parts[i])
				if err != nil {
					return outcome{}, err
				}
				plain[i] = strconv.FormatInt(n, 10)
			}
		}
		any = append(any, fmt.Sprintf("%s.compareTo(semver('%s')) == 0", attribute, strings.Join(plain[:], ".")))
	}
	return outcome{translated: true, expression: anyOf(any, r.operator)}, nil
}

// product compares the name of a product, which GPU feature discovery writes with a dash for
// each blank, and at whose end it says what nvidia.com/gpu is.
func (l *labels) product(r requirement) (outcome, error) {
	if r.operator == greater || r.operator == less {
		return outcome{lost: "kept: a product is no number"}, nil
	}
	var names []string
	profiles, shared := map[string]bool{}, map[bool]bool{}
	for _, value := range r.values {
		name, isShared := strings.CutSuffix(value, "-SHARED")
		name, profile, _ := strings.Cut(name, "-MIG-")
		profiles[profile], shared[isShared] = true, true
		names = append(names, name)
		if !startsWithBrand(name) {
			names = append(names, "NVIDIA-"+name)
		}
	}
	if len(profiles) > 1 || len(shared) > 1 || r.operator == notIn && (!profiles[""] || shared[true]) {
		return outcome{lost: "kept: these products differ in what nvidia.com/gpu is on their nodes"}, nil
	}
	o := texts(manifest.Attribute(l.options.Driver, "productName")+".lowerAscii().replace(' ', '-')", r, names)
	for profile := range profiles {
		if profile == "" {
			continue
		}
		if !profileName.MatchString(profile) {
			return outcome{lost: "kept: the end of the product's name is no MIG profile such as 1g.10gb"}, nil
		}
		o.kind, o.profile = policy.Partition, profile
	}
	if shared[true] {
		o.kind = l.sharedKind()
	}
	return o, nil
}

// profileName matches a MIG profile in a label, where variants cannot be told apart.
var profileName = regexp.MustCompile(`^[0-9]{1,2}g\.[0-9]{1,4}gb$`)

// startsWithBrand reports whether a product's name is as the driver reports it: drivers before
// 470 left out NVIDIA.
func startsWithBrand(name string) bool {
	for _, brand := range []string{"nvidia-", "tesla-", "quadro-", "geforce-", "grid-"} {
		if strings.HasPrefix(strings.ToLower(name), brand) {
			return true
		}
	}
	return false
}

// sharedKind is what nvidia.com/gpu is on a node that shares its GPUs.
func (l *labels) sharedKind() policy.Kind {
	if l.options.GPU == policy.MPS || l.options.GPU == policy.TimeSlice {
		return l.options.GPU
	}
	return l.options.Shared
}

// memory compares the memory of a GPU in MiB.
func (l *labels) memory(r requirement) (outcome, error) {
	o, err := numbers("", r)
	if err != nil {
		return o, err
	}
	memory := fmt.Sprintf("device.capacity['%s'].memory.compareTo(quantity('%%dMi')) %%s 0", l.options.Driver)
	n, err := number(r.values[0])
	if err != nil {
		return o, err
	}
	shares, partitions := l.kinds()
	switch {
	case partitions:
		return outcome{lost: "kept: it is the memory of the GPU, and a partition has its own: ask for a profile"}, nil
	case r.operator == greater:
		o.expression = fmt.Sprintf(memory, n, ">")
	case r.operator == less:
		o.expression = fmt.Sprintf(memory, n, "<")
	case shares:
		return outcome{lost: "kept: a shared GPU offers somewhat less memory than it has; give the product, or a bound"}, nil
	default:
		var any []string
		for _, value := range r.values {
			n, err := number(value)
			if err != nil {
				return o, err
			}
			// The label is rounded down to whole MiB.
			any = append(any, fmt.Sprintf(memory, n, ">=")+" && "+fmt.Sprintf(memory, n+1, "<"))
		}
		o.expression = anyOf(any, r.operator)
	}
	if shares {
		o.note = "it is compared with what the shared GPU offers, which is somewhat less than it has"
	}
	return o, nil
}

// kinds reports whether containers ask for shares, and whether for partitions.
func (l *labels) kinds() (shares, partitions bool) {
	for _, c := range l.containers {
		for _, d := range c.demands {
			kind, profile := d.device(l.options)
			shares = shares || kind == policy.MPS || kind == policy.TimeSlice
			partitions = partitions || kind == policy.Partition || profile != ""
		}
	}
	return shares, partitions
}

// count compares the number of GPUs of a node, of which a claim says only how many it wants.
func (l *labels) count(r requirement) (outcome, error) {
	wanted := int64(0)
	for _, c := range l.containers {
		for _, d := range c.demands {
			if kind, _ := d.device(l.options); kind == policy.Whole && !c.ends {
				wanted += int64(d.count)
			}
		}
	}
	least := int64(0)
	for _, value := range r.values {
		n, err := number(value)
		if err != nil {
			return outcome{}, err
		}
		least = max(least, n)
	}
	if r.operator == greater {
		least++
	}
	if (r.operator == in && len(r.values) == 1 || r.operator == greater) && least <= wanted {
		return outcome{translated: true, note: "dropped: the claim asks for as many GPUs of one node"}, nil
	}
	return outcome{lost: "kept: no attribute of a device says how many others its node has"}, nil
}

// sharingStrategy reads what nvidia.com/gpu is.
func sharingStrategy(r requirement) outcome {
	kinds := map[string]policy.Kind{"none": policy.Whole, "mps": policy.MPS, "time-slicing": policy.TimeSlice}
	if r.operator == in && len(r.values) == 1 && kinds[r.values[0]] != "" {
		return outcome{translated: true, kind: kinds[r.values[0]]}
	}
	return outcome{lost: "kept: a claim asks for one kind of device: choose a class"}
}
