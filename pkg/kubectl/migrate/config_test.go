// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const (
	a100 = "NVIDIA A100-SXM4-80GB"
	h100 = "NVIDIA H100 80GB HBM3"
	t4   = "Tesla T4"
	l4   = "NVIDIA L4"
)

// run runs the command as a user does.
func run(t testing.TB, stdin string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	streams, in, out, errOut := genericiooptions.NewTestIOStreams()
	in.WriteString(stdin)
	c := NewCommand(options.New(streams))
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetArgs(args)
	c.SetOut(out)
	c.SetErr(errOut)
	err = c.ExecuteContext(t.Context())
	return out.String(), errOut.String(), err
}

func mustRun(t testing.TB, args ...string) string {
	t.Helper()
	out, _, err := run(t, "", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// golden compares with a file in testdata/golden.
func golden(t *testing.T, name, got string) {
	t.Helper()
	fleettest.Golden(t, *update, "golden/"+name, got)
}

// configTest is a configuration, and what claims get with its translation.
type configTest struct {
	name string
	args []string
	// boards are the GPUs of the node.
	boards []string
	// resources are what pods get by each extended resource, claim by claim until nothing is
	// left, on an empty node: device and number.
	resources map[string]map[string]int
}

var configTests = []configTest{
	{
		"device-plugin-timeslicing",
		[]string{"device-plugin", "testdata/device-plugin/timeslicing.yaml"},
		[]string{"t4", "t4"},
		map[string]map[string]int{"nvidia.com/gpu": {"timeslice " + t4: 8}},
	},
	{
		"device-plugin-timeslicing-renamed",
		[]string{"device-plugin", "testdata/device-plugin/timeslicing-renamed.yaml"},
		[]string{"a100-80"},
		map[string]map[string]int{"nvidia.com/gpu.shared": {"timeslice " + a100: 10}},
	},
	{
		"device-plugin-mps",
		[]string{"device-plugin", "testdata/device-plugin/mps.yaml"},
		[]string{"h100-80-sxm"},
		map[string]map[string]int{"nvidia.com/gpu": {"mps " + h100: 10}},
	},
	{
		"device-plugin-everything",
		[]string{"device-plugin", "testdata/device-plugin/everything.yaml"},
		[]string{"h100-80-sxm"},
		map[string]map[string]int{"nvidia.com/gpu.shared": {"mps " + h100: 48}},
	},
	{
		"device-plugin-mixed",
		[]string{"device-plugin", "testdata/device-plugin/mixed.yaml"},
		[]string{"t4", "h100-80-sxm"},
		map[string]map[string]int{"nvidia.com/gpu": {"gpu " + t4: 1, "gpu " + h100: 1}},
	},
	{
		"device-plugin-mixed-shared",
		[]string{"device-plugin", "testdata/device-plugin/mixed-shared.yaml"},
		[]string{"t4", "h100-80-sxm"},
		map[string]map[string]int{
			"nvidia.com/gpu":            {"timeslice " + t4: 2, "timeslice " + h100: 2},
			"nvidia.com/mig-1g.10gb":    {"timeslice 1g.10gb " + h100: 28},
			"nvidia.com/mig-1g.10gb.me": {"timeslice 1g.10gb+me " + h100: 3},
		},
	},
	{
		// Shares of GPUs and of partitions have one class, so that nvidia.com/gpu.shared needs its own.
		"device-plugin-mixed-renamed",
		[]string{"device-plugin", "testdata/device-plugin/mixed-renamed.yaml"},
		[]string{"t4", "h100-80-sxm"},
		map[string]map[string]int{
			"nvidia.com/gpu.shared":         {"timeslice " + t4: 8, "timeslice " + h100: 8},
			"nvidia.com/mig-1g.10gb.shared": {"timeslice 1g.10gb " + h100: 14},
		},
	},
	{
		"device-plugin-single",
		[]string{"device-plugin", "testdata/device-plugin/single.yaml", "--single-profile=1g.10gb"},
		[]string{"a100-80-mig", "t4"},
		map[string]map[string]int{"nvidia.com/gpu": {"mig 1g.10gb " + a100: 7, "gpu " + t4: 1}},
	},
	{
		"device-plugin-single-unknown",
		[]string{"device-plugin", "testdata/device-plugin/single.yaml"},
		[]string{"h100-80-sxm"},
		map[string]map[string]int{"nvidia.com/gpu": {"gpu " + h100: 1}},
	},
	{
		"device-plugin-single-shared",
		[]string{"device-plugin", "testdata/device-plugin/single-shared.yaml", "--single-profile=1g.10gb"},
		[]string{"a100-80-mig", "t4"},
		map[string]map[string]int{"nvidia.com/gpu.shared": {"timeslice 1g.10gb " + a100: 28, "timeslice " + t4: 4}},
	},
	{
		"device-plugin-configmap",
		[]string{"device-plugin", "testdata/device-plugin/configmap.yaml", "--config=any", "--match=a100=productName=NVIDIA A100*", "--match=tesla-t4=productName=Tesla T4"},
		[]string{"a100-80-mig", "t4", "l4"},
		map[string]map[string]int{
			"nvidia.com/gpu":         {"gpu " + l4: 1, "timeslice " + t4: 4},
			"nvidia.com/mig-1g.10gb": {"timeslice 1g.10gb " + a100: 28},
		},
	},
	{
		"mig-parted-all-1g.10gb",
		[]string{"mig-parted", "testdata/mig-parted/all-1g.10gb.yaml"},
		[]string{"a100-80-mig"},
		map[string]map[string]int{"nvidia.com/mig-1g.10gb": {"mig 1g.10gb " + a100: 7}},
	},
	{
		"mig-parted-mixed",
		[]string{"mig-parted", "testdata/mig-parted/mixed.yaml"},
		[]string{"a100-80-mig", "h100-80-sxm"},
		map[string]map[string]int{
			"nvidia.com/gpu":            {"gpu " + h100: 1},
			"nvidia.com/mig-1g.10gb":    {"mig 1g.10gb " + a100: 7},
			"nvidia.com/mig-1g.10gb.me": {"mig 1g.10gb+me " + h100: 1},
			"nvidia.com/mig-2g.20gb":    {"mig 2g.20gb " + a100: 3},
			"nvidia.com/mig-3g.40gb":    {"mig 3g.40gb " + a100: 2, "mig 3g.40gb " + h100: 2},
		},
	},
	{
		"mig-parted-mixed-one",
		[]string{"mig-parted", "testdata/mig-parted/mixed.yaml", "--config=mixed"},
		[]string{"a100-80-mig"},
		map[string]map[string]int{
			"nvidia.com/gpu": {}, "nvidia.com/mig-1g.10gb": {"mig 1g.10gb " + a100: 7}, "nvidia.com/mig-1g.10gb.me": {},
			"nvidia.com/mig-2g.20gb": {"mig 2g.20gb " + a100: 3}, "nvidia.com/mig-3g.40gb": {"mig 3g.40gb " + a100: 2},
		},
	},
	{
		"mig-parted-custom",
		[]string{"mig-parted", "testdata/mig-parted/custom.yaml", "--config=halves,overridden"},
		[]string{"h100-80-sxm"},
		map[string]map[string]int{"nvidia.com/gpu": {"gpu " + h100: 1}, "nvidia.com/mig-1g.10gb": {"mig 1g.10gb " + h100: 7}},
	},
	{
		"castai-json",
		[]string{"castai", "testdata/castai/mps.json"},
		[]string{"t4", "a100-80", "h100-80-sxm"},
		map[string]map[string]int{"nvidia.com/gpu": {"mps " + t4: 4, "mps " + a100: 8, "mps " + h100: 4}},
	},
	{
		"castai-time-sharing",
		[]string{"castai", "testdata/castai/module.json"},
		[]string{"l4", "a100-40", "a100-80", "t4"},
		map[string]map[string]int{"nvidia.com/gpu": {
			"timeslice " + l4: 5, "timeslice NVIDIA A100-SXM4-40GB": 11, "timeslice " + a100: 16, "timeslice " + t4: 9,
		}},
	},
	{
		"castai-state",
		[]string{"castai", "testdata/castai/state.json", "--config=one"},
		[]string{"t4", "l4"},
		map[string]map[string]int{"nvidia.com/gpu": {"timeslice " + t4: 2, "timeslice " + l4: 1}},
	},
	{
		"castai-not-shared",
		[]string{"castai", "testdata/castai/state.json", "--config=two"},
		[]string{"t4"},
		map[string]map[string]int{"nvidia.com/gpu": {"gpu " + t4: 1}},
	},
}

// TestConfig translates each configuration, and has the scheduler's allocator do with the
// result what pods did before: everything is decoded strictly, published by the driver's
// own code, and allocated until nothing is left.
func TestConfig(t *testing.T) {
	ran := 0
	for _, test := range configTests {
		t.Run(test.name, func(t *testing.T) {
			ran++
			var all strings.Builder
			told := ""
			printed := map[string]string{}
			for _, p := range parts {
				part := p.name
				printed[part] = mustRun(t, append(slices.Clone(test.args), "--print="+part)...)
				head, rest, _ := strings.Cut(printed[part], "\n\n")
				title, findings, _ := strings.Cut(head, "\n")
				switch {
				case part == "values":
					all.WriteString("---\n" + printed[part])
					told = findings
				case findings != told:
					t.Errorf("%s tells something else than values:\n%s", part, findings)
				default:
					all.WriteString("---\n" + title + "\n" + rest)
				}
			}
			golden(t, test.name+".yaml", all.String())
			if want := strings.Contains(printed["classes"], "kind: DeviceClass"); strings.Contains(told, "--print classes, too") != want {
				t.Errorf("the values need other classes: %t. It is told:\n%s", want, told)
			}
			classes := checkValues(t, printed["values"])
			checkResources(t, test, printed, classes)
		})
	}
	if ran != len(configTests) && flag.Lookup("test.run").Value.String() == "" {
		t.Errorf("%d cases ran, want %d", ran, len(configTests))
	}
}

// chartValues are those that classes depend on.
type chartValues struct {
	DeviceClasses struct {
		GPU, MPS, TimeSlice struct{ ExtendedResourceName string }
		MIGProfiles         map[string]struct{ Profile, ExtendedResourceName string }
	}
}

// checkValues checks the values by the chart's own schema, beside the chart's defaults, and
// returns the names of the classes that they make, by extended resource.
func checkValues(t *testing.T, text string) map[string]string {
	t.Helper()
	values := map[string]any{}
	for _, source := range []string{"../../../deployments/helm/partage/values.yaml", ""} {
		data := []byte(text)
		if source != "" {
			var err error
			if data, err = os.ReadFile(source); err != nil {
				t.Fatal(err)
			}
		}
		var own map[string]any
		if err := yaml.UnmarshalStrict(data, &own); err != nil {
			t.Fatal(err)
		}
		merge(values, own)
	}
	merge(values, map[string]any{"image": map[string]any{"repository": "registry.example.com/partage"}})
	schema, err := jsonschema.NewCompiler().Compile("../../../deployments/helm/partage/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := schema.Validate(values); err != nil {
		t.Errorf("the chart refuses the values: %v\n%s", err, text)
	}
	var v chartValues
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	classes := map[string]string{
		v.DeviceClasses.GPU.ExtendedResourceName: "gpu.nvidia.com", v.DeviceClasses.MPS.ExtendedResourceName: "mps.partage.dev",
		v.DeviceClasses.TimeSlice.ExtendedResourceName: "timeslice.partage.dev",
	}
	for name, class := range v.DeviceClasses.MIGProfiles {
		classes[class.ExtendedResourceName] = name
	}
	delete(classes, "")
	return classes
}

// merge merges values as helm does.
func merge(into, from map[string]any) {
	for key, value := range from {
		if below, ok := value.(map[string]any); ok {
			if before, ok := into[key].(map[string]any); ok {
				merge(before, below)
				continue
			}
		}
		into[key] = value
	}
}

// checkResources has claims allocated until nothing is left, as the scheduler makes them for
// pods that ask for an extended resource.
func checkResources(t *testing.T, test configTest, printed, classes map[string]string) {
	t.Helper()
	others := map[string]*resourceapi.DeviceClass{}
	for _, text := range documents(t, []byte(printed["classes"])) {
		class := decodeAs[resourceapi.DeviceClass](t, text, "DeviceClass")
		if class == nil {
			t.Fatalf("want a DeviceClass:\n%s", text)
		}
		name := *class.Spec.ExtendedResourceName
		if classes[name] != "" {
			t.Errorf("%s is served by two classes, %s and %s", name, classes[name], class.Name)
		}
		classes[name], others[class.Name] = class.Name, class
	}
	got := map[string]map[string]int{}
	for resource, class := range classes {
		c := newCluster(t, []byte(printed["policy"]), test.boards...)
		maps.Copy(c.classes, others)
		if profile, ok := strings.CutPrefix(class, "mig-"); ok && others[class] == nil {
			c.classes[class] = profileClass(t, printed["values"], class, profile)
		}
		got[resource] = map[string]int{}
		for {
			devices := c.allocate(t, request(class, 1))
			if len(devices) == 0 {
				break
			}
			got[resource][devices[0]]++
		}
	}
	if diff := cmp.Diff(test.resources, got); diff != "" {
		t.Errorf("pods get (-want +got):\n%s", diff)
	}
}

// profileClass is a class that the chart makes for a profile.
func profileClass(t *testing.T, values, name, profile string) *resourceapi.DeviceClass {
	t.Helper()
	var v chartValues
	if err := yaml.Unmarshal([]byte(values), &v); err != nil {
		t.Fatal(err)
	}
	wanted := v.DeviceClasses.MIGProfiles[name].Profile
	if strings.ReplaceAll(wanted, "+", ".")+".nvidia.com" != profile {
		t.Errorf("class %s is for profile %s", name, wanted)
	}
	class := &resourceapi.DeviceClass{}
	class.Name = name
	class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig' && device.attributes['gpu.nvidia.com'].profile == '%s'", wanted),
	}}}
	return class
}

// TestSeveralShares: what the findings say of a request for several shares is so.
func TestSeveralShares(t *testing.T) {
	file := mustRun(t, "device-plugin", "testdata/device-plugin/timeslicing.yaml", "--print=policy")
	for gpus, want := range map[int][]string{1: nil, 2: {"timeslice " + t4, "timeslice " + t4}} {
		c := newCluster(t, []byte(file), slices.Repeat([]string{"t4"}, gpus)...)
		if diff := cmp.Diff(want, c.allocate(t, request("timeslice.partage.dev", 2))); diff != "" {
			t.Errorf("two shares of %d GPUs (-want +got):\n%s", gpus, diff)
		}
		if got := c.allocated.Len() + c.shares.Len(); got != len(want) {
			t.Errorf("%d devices are held, want %d", got, len(want))
		}
	}
}

// TestStrict fails for what is not translated, and still prints the rest.
func TestStrict(t *testing.T) {
	for file, wantErr := range map[string]bool{"mps.yaml": false, "timeslicing.yaml": false, "timeslicing-renamed.yaml": true, "everything.yaml": true} {
		out, stderr, err := run(t, "", "device-plugin", "testdata/device-plugin/"+file, "--strict")
		if (err != nil) != wantErr {
			t.Errorf("%s: %v", file, err)
		}
		if !strings.Contains(out, "sharingPolicy:") {
			t.Errorf("%s: nothing is printed", file)
		}
		for line := range strings.Lines(stderr) {
			if !strings.Contains(out, "# "+line) {
				t.Errorf("%s: on stderr only: %s", file, line)
			}
		}
	}
}

// TestWrongFile: a file that another command translates, or none, is refused with the name of what it is.
func TestWrongFile(t *testing.T) {
	const (
		hami    = "looks like values or a configuration of HAMi, which no command translates"
		values  = "looks like values of a chart, which no command translates"
		unknown = "looks like nothing that kubectl gpu migrate translates"
		plugin  = "looks like a configuration of NVIDIA's device plugin: give it to kubectl gpu migrate device-plugin"
		parted  = "looks like a configuration of mig-parted: give it to kubectl gpu migrate mig-parted"
		castAI  = "looks like a node template of Cast AI: give it to kubectl gpu migrate castai"
		object  = "kubectl gpu migrate pods translates pods and what makes them"
	)
	ran := 0
	for file, want := range map[string]map[string]string{
		"other/hami-values.yaml":       {"device-plugin": hami, "mig-parted": hami, "castai": hami, "pods": hami},
		"other/hami-configmap.yaml":    {"device-plugin": "ConfigMap hami-scheduler-device: data[device-config.yaml]: " + hami, "mig-parted": hami, "castai": hami, "pods": ""},
		"other/chart-values.yaml":      {"device-plugin": values, "mig-parted": values, "castai": values, "pods": values},
		"other/configmap.yaml":         {"device-plugin": "ConfigMap web: data[server.yaml]: " + unknown, "mig-parted": unknown, "castai": unknown, "pods": ""},
		"other/unknown.yaml":           {"device-plugin": unknown, "mig-parted": unknown, "castai": unknown, "pods": unknown},
		"device-plugin/mps.yaml":       {"device-plugin": "", "mig-parted": plugin, "castai": plugin, "pods": plugin},
		"mig-parted/mixed.yaml":        {"device-plugin": parted, "mig-parted": "", "castai": parted, "pods": ""},
		"mig-parted/custom.yaml":       {"device-plugin": parted, "mig-parted": "", "castai": parted, "pods": parted},
		"castai/mps.json":              {"device-plugin": castAI, "mig-parted": castAI, "castai": "", "pods": castAI},
		"castai/module.json":           {"device-plugin": castAI, "mig-parted": castAI, "castai": "", "pods": castAI},
		"pods/list.json":               {"device-plugin": object, "mig-parted": object, "castai": object, "pods": ""},
		"pods/deployment.yaml":         {"device-plugin": object, "mig-parted": object, "castai": object, "pods": ""},
		"device-plugin/configmap.yaml": {"mig-parted": plugin, "castai": plugin, "pods": ""},
	} {
		for command, want := range want {
			ran++
			out, _, err := run(t, "", command, "testdata/"+file)
			if (err == nil) != (want == "") || err != nil && (out != "" || !strings.Contains(err.Error(), want)) {
				t.Errorf("migrate %s %s:\ngot  %v\nwant %s", command, file, err, want)
			}
		}
	}
	if ran < 51 {
		t.Errorf("%d cases ran", ran)
	}
}

// TestDriver: selectors are for the driver that the user names.
func TestDriver(t *testing.T) {
	for driver, want := range map[string]string{
		"gpu.example.com": "device.attributes['gpu.example.com'].productName", "gpu'.x": `--driver: Invalid value: "gpu'.x"`,
	} {
		streams, _, out, _ := genericiooptions.NewTestIOStreams()
		o := options.New(streams)
		o.Driver = driver
		c := NewCommand(o)
		c.SilenceErrors, c.SilenceUsage = true, true
		c.SetArgs([]string{"pods", "testdata/pods/deployment.yaml"})
		got := fmt.Sprint(c.ExecuteContext(t.Context()), out)
		if !strings.Contains(got, want) {
			t.Errorf("%s: want %s:\n%s", driver, want, got)
		}
	}
}

func TestFlags(t *testing.T) {
	for _, test := range []struct{ args, stdin, want string }{
		{"device-plugin - --print=all", "", `invalid argument "all" for "--print" flag: it must be one of values, policy, classes`},
		{"device-plugin - --match=a", "", `--match: Invalid value: "a": want CONFIG=FIELD=VALUE`},
		{"device-plugin - --match=a=color=red", "", `--match: Unsupported value: "color"`},
		{"device-plugin - --match=a=uuid=x --match=a=uuid=y", "", `--match: Duplicate value: "a"`},
		{"device-plugin - --match=a=uuid=x", "version: v1", `--match: Not found: "a"`},
		{"device-plugin - --config=a", "version: v1", `--config: Not found: "a"`},
		{"device-plugin - --single-profile=big", "version: v1", `--single-profile: Invalid value: "big"`},
		{"device-plugin -", "", "-: is empty"},
		{"device-plugin no-such-file", "", "no such file"},
		{"device-plugin testdata/device-plugin/configmap.yaml", "", "there are several configurations: any, a100, tesla-t4, old. Say which is for all GPUs with --config NAME; nodes choose one by the label nvidia.com/device-plugin.config"},
		{"device-plugin testdata/device-plugin/configmap.yaml --config=any,old", "", "--config: Too many: 2"},
		{"device-plugin testdata/device-plugin/configmap.yaml --config=any --match=a100=architecture=Amper", "", `rules[0].match.architecture: Unsupported value: "Amper"`},
		{"mig-parted testdata/mig-parted/mixed.yaml --config=large", "", `--config: Not found: "large": there are all-disabled, mixed`},
		{"castai testdata/castai/state.json", "", "there are several configurations: one, two"},
		{"castai testdata/castai/state.json --config=three", "", `--config: Not found: "three": there are one, two`},
		{"pods - --gpu=half", "", `--gpu: Unsupported value: "half"`},
		{"pods - --gpu-shared=gpu", "", `invalid argument "gpu" for "--gpu-shared" flag: it must be one of timeslice, mps`},
	} {
		_, _, err := run(t, test.stdin, strings.Fields(test.args)...)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s:\ngot  %v\nwant %s", test.args, err, test.want)
		}
	}
}
