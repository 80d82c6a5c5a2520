// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	apilabels "k8s.io/apimachinery/pkg/labels"
	operators "k8s.io/apimachinery/pkg/selection"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Operators of a requirement.
const (
	in           = "In"
	notIn        = "NotIn"
	exists       = "Exists"
	doesNotExist = "DoesNotExist"
	greater      = "Gt"
	less         = "Lt"
)

// checked are the operators as the API's own check of labels has them.
var checked = map[string]operators.Operator{
	in: operators.In, notIn: operators.NotIn, exists: operators.Exists, doesNotExist: operators.DoesNotExist, greater: operators.GreaterThan, less: operators.LessThan,
}

// maxValues bounds an expression.
const maxValues = 64

// requirement is one condition for a node's label.
type requirement struct {
	key, operator string
	values        []string
}

func (r requirement) String() string {
	return strings.TrimSpace(r.key + " " + r.operator + " " + strings.Join(r.values, ", "))
}

// readRequirement reads an entry of matchExpressions.
func readRequirement(n *yaml.Node) (requirement, error) {
	r := requirement{key: document.Text(n, "key"), operator: document.Text(n, "operator")}
	if r.key == "" {
		return r, fmt.Errorf("key: Required value: must be the key of a label")
	}
	if checked[r.operator] == "" {
		return r, fmt.Errorf("operator: Unsupported value: %s", quote.Text(r.operator))
	}
	for _, value := range document.List(n, "values") {
		r.values = append(r.values, value.Value)
	}
	return r, nil
}

// check refuses what the API would refuse, for labels that are translated.
func (r requirement) check() error {
	if len(r.values) > maxValues {
		return fmt.Errorf("values: Too many: %d: must have at most %d items", len(r.values), maxValues)
	}
	_, err := apilabels.NewRequirement(r.key, checked[r.operator], r.values)
	return err
}

// numbers reads values that are whole numbers, as Kubernetes compares labels.
func (r requirement) numbers() (numbers []int64, err error) {
	for _, value := range r.values {
		n, err := number(value)
		if err != nil {
			return nil, err
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}

func number(value string) (int64, error) {
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("values: Invalid value: %s: must be a whole number", quote.Text(value))
	}
	return n, nil
}

// compare writes the condition for an attribute in CEL. The values are written in CEL, too.
func (r requirement) compare(attribute string, values []string) string {
	if len(values) == 1 {
		return attribute + map[string]string{in: " == ", notIn: " != ", greater: " > ", less: " < "}[r.operator] + values[0]
	}
	text := attribute + " in [" + strings.Join(values, ", ") + "]"
	if r.operator == notIn {
		text = "!(" + text + ")"
	}
	return text
}

// anyOf joins expressions: one of them must hold or, for NotIn, none. Others may be joined to the result.
func (r requirement) anyOf(expressions []string) string {
	text := expressions[0]
	if len(expressions) > 1 {
		text = "(" + strings.Join(expressions, ") || (") + ")"
	}
	switch {
	case r.operator == notIn:
		return "!(" + text + ")"
	case len(expressions) > 1:
		return "(" + text + ")"
	}
	return text
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
	whyImplied = "the claim is for a GPU that has it"
	whyLayout  = "there are no layouts, and partitions are made when claims ask for them"
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

// onEveryNode are the labels that GPU feature discovery gives to each node with a GPU, whatever else there is.
var onEveryNode = sets.New("gpu.count", "gpu.family", "gpu.machine", "gpu.memory", "gpu.mode", "gpu.product", "gpu.replicas", "gpu.sharing-strategy",
	"mig.capable", "mps.capable")

// isGPULabel reports whether a label is one that GPU feature discovery gives to nodes.
func isGPULabel(key string) bool { return strings.HasPrefix(key, domain) }

// translate translates a requirement. Those that are not about GPUs stay.
func (s *selection) translate(r requirement) (outcome, error) {
	name, ours := strings.CutPrefix(r.key, domain)
	if !ours {
		return outcome{}, nil
	}
	if err := r.check(); err != nil {
		return outcome{}, err
	}
	switch {
	case r.operator == doesNotExist:
		return kept("a claim cannot ask for a node without a label")
	case name == "device-plugin.config":
		return kept("it is the choice of the device plugin's configuration, and has no meaning without it")
	case r.operator == exists && (versions[name] != "" || fullVersions[name] != "" || onEveryNode.Has(name)):
		return dropped(whyImplied)
	case versions[name] != "":
		return numbers(s.attribute(versions[name]), r)
	case fullVersions[name] != "":
		return fullVersion(s.attribute(fullVersions[name]), r)
	}
	return s.model(name, r)
}

// model translates a requirement for what the GPUs of a node are.
func (s *selection) model(name string, r requirement) (outcome, error) {
	switch name {
	case "gpu.product":
		return s.product(r)
	case "gpu.family":
		return texts(s.attribute("architecture"), r, r.values), nil
	case "gpu.memory":
		return s.memory(r)
	case "gpu.count":
		return s.count(r)
	case "gpu.sharing-strategy":
		return sharingStrategy(r)
	case "mig.config", "mig.config.state", "mig.strategy":
		return dropped(whyLayout)
	}
	switch {
	case migLabel.MatchString(name) && strings.HasSuffix(name, ".product") && r.operator != exists:
		return s.product(r)
	case migLabel.MatchString(name):
		return dropped(whyLayout)
	case s.isImplied(name) && (r.operator == exists || r.operator == in && slices.Equal(r.values, []string{"true"})):
		return dropped(whyImplied)
	}
	return kept("no attribute of a device says this, so that it depends on GPU feature discovery, or on who sets the label")
}

func kept(why string) (outcome, error) { return outcome{lost: "kept: " + why}, nil }

func dropped(why string) (outcome, error) {
	return outcome{translated: true, note: "dropped: " + why}, nil
}

func (s *selection) attribute(name string) string { return manifest.Attribute(s.options.Driver, name) }

// isImplied reports whether a label is true on every node from which the claim can get a device.
func (s *selection) isImplied(name string) bool {
	shares, partitions := s.kinds()
	return name == "mig.capable" && partitions || name == "mps.capable" && shares || strings.HasPrefix(name, "gpu.deploy.") || name == "gpu.present"
}

// texts compares a text with values in lower case, in which labels have a dash for each blank.
func texts(attribute string, r requirement, values []string) outcome {
	quoted := make([]string, 0, len(values))
	for _, value := range values {
		quoted = append(quoted, "'"+strings.ToLower(value)+"'")
	}
	return outcome{translated: true, expression: r.compare(attribute+".lowerAscii().replace(' ', '-')", quoted)}
}

// numbers compares a number.
func numbers(attribute string, r requirement) (outcome, error) {
	numbers, err := r.numbers()
	var values []string
	for _, n := range numbers {
		values = append(values, strconv.FormatInt(n, 10))
	}
	return outcome{translated: true, expression: r.compare(attribute, values)}, err
}

// fullVersion compares a version, of which the driver leaves out leading zeros.
func fullVersion(attribute string, r requirement) (outcome, error) {
	if r.operator != in && r.operator != notIn {
		return kept("a version is no number")
	}
	var any []string
	for _, value := range r.values {
		parts := strings.Split(value+".0.0", ".")
		if strings.Count(value, ".") > 2 {
			return outcome{}, fmt.Errorf("values: Invalid value: %s: must be a version", quote.Text(value))
		}
		numbers, err := requirement{values: parts[:3]}.numbers()
		if err != nil {
			return outcome{}, err
		}
		any = append(any, fmt.Sprintf("%s.compareTo(semver('%d.%d.%d')) == 0", attribute, numbers[0], numbers[1], numbers[2]))
	}
	return outcome{translated: true, expression: r.anyOf(any)}, nil
}

// product compares the name of a product, which GPU feature discovery writes with a dash for
// each blank, and at whose end it says what nvidia.com/gpu is.
func (s *selection) product(r requirement) (outcome, error) {
	if r.operator == greater || r.operator == less {
		return kept("a product is no number")
	}
	var names []string
	profiles, shared := map[string]bool{}, map[bool]bool{}
	for _, value := range r.values {
		name, isShared := strings.CutSuffix(value, "-SHARED")
		name, profile, _ := strings.Cut(name, "-MIG-")
		profiles[profile], shared[isShared] = true, true
		names = append(names, name)
		if !brand.MatchString(name) {
			names = append(names, "NVIDIA-"+name)
		}
	}
	if len(profiles) > 1 || len(shared) > 1 || r.operator == notIn && (!profiles[""] || shared[true]) {
		return kept("these products differ in what nvidia.com/gpu is on their nodes")
	}
	o := texts(s.attribute("productName"), r, names)
	for profile := range profiles {
		switch {
		case profile == "":
		case !profileName.MatchString(profile):
			return kept("the end of the product's name is no MIG profile such as 1g.10gb")
		default:
			o.kind, o.profile = policy.Partition, profile
		}
	}
	if shared[true] {
		o.kind = s.sharedKind()
	}
	return o, nil
}

// sharedKind is what nvidia.com/gpu is on a node that shares its GPUs.
func (s *selection) sharedKind() policy.Kind {
	if s.options.GPU == policy.MPS || s.options.GPU == policy.TimeSlice {
		return s.options.GPU
	}
	return s.options.Shared
}

// profileName matches a MIG profile in a label, where variants cannot be told apart.
var profileName = regexp.MustCompile(`^[0-9]{1,2}g\.[0-9]{1,4}gb$`)

// brand matches a product's name as the driver reports it: drivers before 470 left out NVIDIA.
var brand = regexp.MustCompile(`(?i)^(nvidia|tesla|quadro|geforce|grid)-`)

// memory compares the memory of a GPU in MiB.
func (s *selection) memory(r requirement) (outcome, error) {
	values, err := r.numbers()
	if err != nil {
		return outcome{}, err
	}
	is := func(n int64, symbol string) string {
		return fmt.Sprintf("device.capacity['%s'].memory.compareTo(quantity('%dMi')) %s 0", s.options.Driver, n, symbol)
	}
	o := outcome{translated: true}
	shares, partitions := s.kinds()
	switch {
	case partitions:
		return kept("it is the memory of the GPU, and a partition has its own: ask for a profile")
	case r.operator == greater:
		o.expression = is(values[0], ">")
	case r.operator == less:
		o.expression = is(values[0], "<")
	case shares:
		return kept("a shared GPU offers somewhat less memory than it has; give the product, or a bound")
	default:
		var any []string
		for _, n := range values {
			// The label is rounded down to whole MiB.
			any = append(any, is(n, ">=")+" && "+is(n+1, "<"))
		}
		o.expression = r.anyOf(any)
	}
	if shares {
		o.note = "it is compared with what the shared GPU offers, which is somewhat less than it has"
	}
	return o, nil
}

// kinds reports whether containers ask for shares, and whether for partitions.
func (s *selection) kinds() (shares, partitions bool) {
	for _, c := range s.containers {
		for _, d := range c.demands {
			kind, profile := d.device(s.options)
			shares = shares || kind == policy.MPS || kind == policy.TimeSlice
			partitions = partitions || kind == policy.Partition || profile != ""
		}
	}
	return shares, partitions
}

// count compares the number of GPUs of a node, of which a claim says only how many it wants.
func (s *selection) count(r requirement) (outcome, error) {
	wanted := int64(0)
	for _, c := range s.containers {
		for _, d := range c.demands {
			if kind, _ := d.device(s.options); kind == policy.Whole && !c.ends {
				wanted += int64(d.count)
			}
		}
	}
	values, err := r.numbers()
	if err != nil {
		return outcome{}, err
	}
	if r.operator == greater && values[0] < wanted || r.operator == in && len(values) == 1 && values[0] <= wanted {
		return dropped("the claim asks for as many GPUs of one node")
	}
	return kept("no attribute of a device says how many others its node has")
}

// sharingStrategy reads what nvidia.com/gpu is.
func sharingStrategy(r requirement) (outcome, error) {
	kinds := map[string]policy.Kind{"none": policy.Whole, "mps": policy.MPS, "time-slicing": policy.TimeSlice}
	if r.operator == in && len(r.values) == 1 && kinds[r.values[0]] != "" {
		return outcome{translated: true, kind: kinds[r.values[0]]}, nil
	}
	return kept("a claim asks for one kind of device: choose a class")
}
