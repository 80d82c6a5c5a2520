// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	operators "k8s.io/apimachinery/pkg/selection"

	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/config"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// requirement is one condition for a node's label.
type requirement corev1.NodeSelectorRequirement

// compared are the operators in CEL, for one value, and as the API's own check of labels has them.
var compared = map[corev1.NodeSelectorOperator]struct {
	cel     string
	checked operators.Operator
}{
	corev1.NodeSelectorOpIn: {" == ", operators.In}, corev1.NodeSelectorOpNotIn: {" != ", operators.NotIn},
	corev1.NodeSelectorOpExists: {"", operators.Exists}, corev1.NodeSelectorOpDoesNotExist: {"", operators.DoesNotExist},
	corev1.NodeSelectorOpGt: {" > ", operators.GreaterThan}, corev1.NodeSelectorOpLt: {" < ", operators.LessThan},
}

// maxValues bounds an expression.
const maxValues = 64

// compare writes the condition for an attribute in CEL. The values are written in CEL, too.
func (r requirement) compare(attribute string, values []string) outcome {
	switch {
	case len(values) == 1:
		return outcome{expression: attribute + compared[r.Operator].cel + values[0]}
	case r.Operator == corev1.NodeSelectorOpNotIn:
		return outcome{expression: "!(" + attribute + " in [" + strings.Join(values, ", ") + "])"}
	}
	return outcome{expression: attribute + " in [" + strings.Join(values, ", ") + "]"}
}

// numbers reads values that are whole numbers, as Kubernetes compares labels.
func numbers(values []string) (numbers []int64, err error) {
	for _, value := range values {
		n, err := strconv.ParseInt(value, 10, 32)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("values: Invalid value: %s: must be a whole number", quote.Text(value))
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

// outcome is what becomes of a requirement.
type outcome struct {
	// expression is in CEL, "" where the claim itself says as much.
	expression string
	// kind and profile are what nvidia.com/gpu is.
	kind    policy.Kind
	profile string
	// stays says that the pod keeps it, and why is told to the user.
	stays bool
	why   string
}

func kept(why string) (outcome, error) { return outcome{stays: true, why: "kept: " + why}, nil }

func dropped(why string) (outcome, error) { return outcome{why: "dropped: " + why}, nil }

const (
	whyImplied = "the claim is for a GPU that has it"
	whyLayout  = "there are no layouts, and partitions are made when claims ask for them"
)

// rule translates a label that GPU feature discovery gives to nodes: by an attribute in CEL, and what compares it, if something does.
type rule struct {
	attribute string
	compare   func(s *selection, attribute string, r requirement) (outcome, error)
	// always says that each node with a GPU has the label, whatever else there is.
	always bool
}

// rules are by the name of the label without its domain.
var rules = map[string]rule{
	"gpu.product":                  {"productName", (*selection).product, true},
	"gpu.family":                   {"architecture", (*selection).text, true},
	"gpu.memory":                   {"", (*selection).memory, true},
	"gpu.count":                    {"", (*selection).count, true},
	"gpu.sharing-strategy":         {"", (*selection).sharingStrategy, true},
	"gpu.compute.major":            {"cudaComputeCapability.major()", (*selection).number, true},
	"gpu.compute.minor":            {"cudaComputeCapability.minor()", (*selection).number, true},
	"cuda.driver.major":            {"driverVersion.major()", (*selection).number, true},
	"cuda.driver.minor":            {"driverVersion.minor()", (*selection).number, true},
	"cuda.driver.rev":              {"driverVersion.patch()", (*selection).number, true},
	"cuda.driver-version.major":    {"driverVersion.major()", (*selection).number, true},
	"cuda.driver-version.minor":    {"driverVersion.minor()", (*selection).number, true},
	"cuda.driver-version.revision": {"driverVersion.patch()", (*selection).number, true},
	"cuda.driver-version.full":     {"driverVersion", (*selection).version, true},
	"cuda.runtime.major":           {"cudaDriverVersion.major()", (*selection).number, true},
	"cuda.runtime.minor":           {"cudaDriverVersion.minor()", (*selection).number, true},
	"cuda.runtime-version.major":   {"cudaDriverVersion.major()", (*selection).number, true},
	"cuda.runtime-version.minor":   {"cudaDriverVersion.minor()", (*selection).number, true},
	"cuda.runtime-version.full":    {"cudaDriverVersion", (*selection).version, true},
	"mig.config":                   {compare: (*selection).layout},
	"mig.config.state":             {compare: (*selection).layout},
	"mig.strategy":                 {compare: (*selection).layout},
	"gpu.machine":                  {always: true},
	"gpu.mode":                     {always: true},
	"gpu.replicas":                 {always: true},
	"mig.capable":                  {always: true},
	"mps.capable":                  {always: true},
}

// migLabel matches labels about the partitions of a profile.
var migLabel = regexp.MustCompile(`^mig-[0-9]{1,2}g\.[0-9]{1,4}gb[a-z.-]*\.(count|product)$`)

// translate translates a requirement. Those that are not about GPUs stay.
func (s *selection) translate(r requirement) (outcome, error) { //nolint:cyclop // one case for each label
	name, ours := strings.CutPrefix(r.Key, domain)
	operator, known := compared[r.Operator]
	switch {
	case r.Key == "":
		return outcome{}, fmt.Errorf("key: Required value: must be the key of a label")
	case !known:
		return outcome{}, fmt.Errorf("operator: Unsupported value: %s", quote.Text(string(r.Operator)))
	case !ours:
		return outcome{stays: true}, nil
	case len(r.Values) > maxValues:
		return outcome{}, fmt.Errorf("values: Too many: %d: must have at most %d items", len(r.Values), maxValues)
	}
	if _, err := labels.NewRequirement(r.Key, operator.checked, r.Values); err != nil {
		return outcome{}, err
	}
	rule, exists := rules[name], r.Operator == corev1.NodeSelectorOpExists
	switch {
	case r.Operator == corev1.NodeSelectorOpDoesNotExist:
		return kept("a claim cannot ask for a node without a label")
	case name == "device-plugin.config":
		return kept("it is the choice of the device plugin's configuration, and has no meaning without it")
	case exists && rule.always:
		return dropped(whyImplied)
	case rule.compare != nil:
		return rule.compare(s, manifest.Attribute(s.options.Driver, rule.attribute), r)
	case migLabel.MatchString(name) && strings.HasSuffix(name, ".product") && !exists:
		return s.product(manifest.Attribute(s.options.Driver, "productName"), r)
	case migLabel.MatchString(name):
		return dropped(whyLayout)
	case s.isImplied(name) && (exists || r.Operator == corev1.NodeSelectorOpIn && slices.Equal(r.Values, []string{"true"})):
		return dropped(whyImplied)
	}
	return kept("no attribute of a device says this, so that it depends on GPU feature discovery, or on who sets the label")
}

// isImplied reports whether a label is true on every node from which the claim can get a device.
func (s *selection) isImplied(name string) bool {
	return name == "mig.capable" && s.partitions || name == "mps.capable" && s.shares || strings.HasPrefix(name, "gpu.deploy.") || name == "gpu.present"
}

func (*selection) layout(string, requirement) (outcome, error) { return dropped(whyLayout) }

// text compares a text in lower case, in which labels have a dash for each blank.
func (*selection) text(attribute string, r requirement) (outcome, error) {
	var quoted []string
	for _, value := range r.Values {
		quoted = append(quoted, "'"+strings.ToLower(value)+"'")
	}
	return r.compare(attribute+".lowerAscii().replace(' ', '-')", quoted), nil
}

func (*selection) number(attribute string, r requirement) (outcome, error) {
	numbers, err := numbers(r.Values)
	var values []string
	for _, n := range numbers {
		values = append(values, strconv.FormatInt(n, 10))
	}
	return r.compare(attribute, values), err
}

// version compares a version, of which the driver leaves out leading zeros.
func (*selection) version(attribute string, r requirement) (outcome, error) {
	if r.Operator != corev1.NodeSelectorOpIn && r.Operator != corev1.NodeSelectorOpNotIn {
		return kept("a version is no number")
	}
	var versions []string
	for _, value := range r.Values {
		if strings.Count(value, ".") > 2 {
			return outcome{}, fmt.Errorf("values: Invalid value: %s: must be a version", quote.Text(value))
		}
		n, err := numbers(strings.Split(value+".0.0", ".")[:3])
		if err != nil {
			return outcome{}, err
		}
		versions = append(versions, fmt.Sprintf("semver('%d.%d.%d')", n[0], n[1], n[2]))
	}
	return r.compare(attribute, versions), nil
}

// brand matches a product's name as the driver reports it: drivers before 470 left out NVIDIA.
var brand = regexp.MustCompile(`(?i)^(nvidia|tesla|quadro|geforce|grid)-`)

// isPlain reports whether a text is a profile without a variant: variants cannot be told apart in a label.
func isPlain(profile string) bool { return config.IsProfile(profile) && !policy.IsVariant(profile) }

// product compares the name of a product, which GPU feature discovery writes with a dash for
// each blank, and at whose end it says what nvidia.com/gpu is.
func (s *selection) product(attribute string, r requirement) (outcome, error) {
	if r.Operator == corev1.NodeSelectorOpGt || r.Operator == corev1.NodeSelectorOpLt {
		return kept("a product is no number")
	}
	type end struct {
		profile  string
		isShared bool
	}
	var names []string
	ends := map[end]bool{}
	of := end{}
	for _, value := range r.Values {
		var name string
		name, of.isShared = strings.CutSuffix(value, "-SHARED")
		name, of.profile, _ = strings.Cut(name, "-MIG-")
		ends[of] = true
		if names = append(names, name); !brand.MatchString(name) {
			names = append(names, "NVIDIA-"+name)
		}
	}
	switch {
	case len(ends) > 1 || r.Operator == corev1.NodeSelectorOpNotIn && of != end{}:
		return kept("these products differ in what nvidia.com/gpu is on their nodes")
	case of.profile != "" && !isPlain(of.profile):
		return kept("the end of the product's name is no MIG profile such as 1g.10gb")
	}
	r.Values = names
	o, err := s.text(attribute, r)
	switch {
	case of.isShared && (s.options.GPU == policy.MPS || s.options.GPU == policy.TimeSlice):
		o.kind = s.options.GPU
	case of.isShared:
		o.kind = s.options.Shared
	case of.profile != "":
		o.kind = policy.Partition
	}
	o.profile = of.profile
	return o, err
}

// memory compares the memory of a GPU in MiB, to which the label is rounded down.
func (s *selection) memory(_ string, r requirement) (outcome, error) {
	values, err := numbers(r.Values)
	if err != nil {
		return outcome{}, err
	}
	memory := fmt.Sprintf("device.capacity['%s'].memory", s.options.Driver)
	isBound := r.Operator == corev1.NodeSelectorOpGt || r.Operator == corev1.NodeSelectorOpLt
	switch {
	case s.partitions:
		return kept("it is the memory of the GPU, and a partition has its own: ask for a profile")
	case s.shares && !isBound:
		return kept("a shared GPU offers somewhat less memory than it has; give the product, or a bound")
	case !isBound:
		return s.number(memory+".asInteger() / 1048576", r)
	}
	o := outcome{expression: fmt.Sprintf("%s.compareTo(quantity('%dMi'))%s0", memory, values[0], compared[r.Operator].cel)}
	if s.shares {
		o.why = "it is compared with what the shared GPU offers, which is somewhat less than it has"
	}
	return o, nil
}

// count compares the number of GPUs of a node, of which a claim says only how many it wants.
func (s *selection) count(_ string, r requirement) (outcome, error) {
	values, err := numbers(r.Values)
	if err != nil {
		return outcome{}, err
	}
	if r.Operator == corev1.NodeSelectorOpGt && values[0] < s.whole || r.Operator == corev1.NodeSelectorOpIn && len(values) == 1 && values[0] <= s.whole {
		return dropped("the claim asks for as many GPUs of one node")
	}
	return kept("no attribute of a device says how many others its node has")
}

// sharingStrategy reads what nvidia.com/gpu is.
func (*selection) sharingStrategy(_ string, r requirement) (outcome, error) {
	kinds := map[string]policy.Kind{"none": policy.Whole, "mps": policy.MPS, "time-slicing": policy.TimeSlice}
	if r.Operator == corev1.NodeSelectorOpIn && len(r.Values) == 1 && kinds[r.Values[0]] != "" {
		return outcome{kind: kinds[r.Values[0]]}, nil
	}
	return kept("a claim asks for one kind of device: choose a class")
}
