// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/migrate/finding"
	"github.com/partage-dev/partage/pkg/policy"
)

var whole = Options{Driver: "gpu.nvidia.com", GPU: policy.Whole, Shared: policy.TimeSlice}

func pod(spec string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: one}\nspec: {" + spec + "}\n"
}

func asking(resources string) string {
	return "containers: [{name: main, resources: {" + resources + "}}]"
}

func TestTranslateRefuses(t *testing.T) {
	gpu := asking("limits: {nvidia.com/gpu: 1}")
	term := func(expression string) string {
		return pod("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{" + expression + "}]}]}}}, " + gpu)
	}
	const at = "document in line 1: Pod one: spec."
	for name, test := range map[string]struct{ in, want string }{
		"not YAML":         {"a: [", "document in line 1: yaml: "},
		"a later one":      {"a: 1\n---\nb: [\n", "document in line 3: yaml: "},
		"a template":       {"{{ if .Values.gpu }}\na: 1\n", "document in line 1: yaml: "},
		"no spec":          {"apiVersion: v1\nkind: Pod\nmetadata: {name: one}\n", at[:len(at)-1] + ": Required value: must be the spec of a pod"},
		"items":            {"apiVersion: v1\nkind: List\nitems: {}\n", "items: Invalid value: must be a list"},
		"an item":          {"apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Pod}]\n", "items[0]: Pod: spec: Required value"},
		"containers":       {pod("containers: {}"), at + "containers: Invalid value: must be a list"},
		"a container":      {pod("containers: [main]"), at + "containers[0]: must be an object"},
		"name":             {pod("containers: [{name: Main, resources: {limits: {nvidia.com/gpu: 1}}}]"), at + `containers[0]: name: Invalid value: "Main"`},
		"half":             {pod(asking("limits: {nvidia.com/gpu: 0.5}")), at + `containers[0]: resources.limits[nvidia.com/gpu]: Invalid value: "0.5": must be a whole number`},
		"negative":         {pod(asking("limits: {nvidia.com/gpu: -1}")), `resources.limits[nvidia.com/gpu]: Invalid value: "-1"`},
		"vast":             {pod(asking("limits: {nvidia.com/gpu: 1e9}")), `Invalid value: "1e9"`},
		"many":             {pod(asking("limits: {nvidia.com/gpu: 33}")), `Invalid value: "33": a claim has 32 devices at most`},
		"many together":    {pod("containers: [{name: a, resources: {limits: {nvidia.com/gpu: 20}}}, {name: b, resources: {limits: {nvidia.com/gpu: 20}}}]"), at[:len(at)-1] + ": Too many: 40 devices: a claim has 32 at most"},
		"twice":            {pod(asking("limits: {nvidia.com/gpu: 1}, limits: {nvidia.com/gpu: 2}")), `mapping key "limits" already defined at line 4`},
		"name twice":       {"apiVersion: v1\nkind: Pod\nmetadata: {name: one, name: two}\nspec: {" + gpu + "}\n", `mapping key "name" already defined at line 3`},
		"differ":           {pod(asking("limits: {nvidia.com/gpu: 2}, requests: {nvidia.com/gpu: 1}")), "resources.requests[nvidia.com/gpu]: Invalid value: 1: must be the same as in limits, 2"},
		"no name":          {"apiVersion: v1\nkind: Pod\nmetadata: {}\nspec: {" + gpu + "}\n", "Pod: metadata.name: Required value"},
		"bad name":         {"apiVersion: v1\nkind: Pod\nmetadata: {name: One}\nspec: {" + gpu + "}\n", `Pod One: metadata.name: Invalid value: "One"`},
		"bad namespace":    {"apiVersion: v1\nkind: Pod\nmetadata: {name: one, namespace: A}\nspec: {" + gpu + "}\n", `metadata.namespace: Invalid value: "A"`},
		"claims":           {pod("resourceClaims: {}, " + gpu), "spec: resourceClaims: Invalid value: must be a list"},
		"operator":         {term("key: nvidia.com/gpu.memory, operator: Is, values: ['1']"), `matchExpressions[0]: operator: Unsupported value: "Is"`},
		"no key":           {term("operator: Exists"), "matchExpressions[0]: key: Required value"},
		"no values":        {term("key: nvidia.com/gpu.memory, operator: In"), "values: Invalid value: null: for 'in', 'notin' operators"},
		"several bounds":   {term("key: nvidia.com/gpu.memory, operator: Gt, values: ['1', '2']"), "exactly one value is required"},
		"no number":        {term("key: nvidia.com/gpu.memory, operator: Gt, values: [much]"), `values[0]: Invalid value: "much": for 'Gt', 'Lt' operators, the value must be an integer`},
		"no label":         {term(`key: nvidia.com/gpu.product, operator: In, values: ["' || true || '"]`), `Invalid value: "' || true || '": a valid label must be`},
		"values of Exists": {term("key: nvidia.com/gpu.product, operator: Exists, values: [a]"), "values set must be empty for exists"},
		"contradiction":    {pod("nodeSelector: {nvidia.com/gpu.sharing-strategy: mps, nvidia.com/gpu.product: NVIDIA-L4-SHARED}, " + gpu), "labels of nodes contradict each other: nvidia.com/gpu would be mps and timeslice"},
	} {
		if _, err := Translate([]byte(test.in), whole); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s:\ngot  %v\nwant %s", name, err, test.want)
		}
	}
}

// TestResources: names of extended resources are those of the device plugin.
func TestResources(t *testing.T) {
	for name, want := range map[string]string{
		"nvidia.com/gpu": "gpu", "nvidia.com/gpu.shared": "timeslice", "nvidia.com/mig-1g.10gb": "mig 1g.10gb", "nvidia.com/mig-1g.10gb.me": "mig 1g.10gb+me",
		"nvidia.com/mig-1g.24gb.me.all": "mig 1g.24gb+me.all", "nvidia.com/mig-2g.48gb-me": "mig 2g.48gb-me", "nvidia.com/mig-3g.40gb.shared": "timeslice 3g.40gb",
		"nvidia.com/mig-1g.10gb.me.shared": "timeslice 1g.10gb+me", "nvidia.com/gpumem": "", "nvidia.com/gpu.count": "", "nvidia.com/mig-1c.2g.20gb": "", "amd.com/gpu": "",
	} {
		got := ""
		if isGPUResource(name) {
			got = describe(demand{resource: name, count: 1}.device(whole))
		}
		if got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}

// TestClasses: labels of nodes say what nvidia.com/gpu and nvidia.com/gpu.shared are there.
func TestClasses(t *testing.T) {
	for _, test := range []struct{ resource, selector, want string }{
		{"nvidia.com/gpu", "", "gpu.nvidia.com"},
		{"nvidia.com/gpu", "nvidia.com/gpu.sharing-strategy: mps", "mps.partage.dev"},
		{"nvidia.com/gpu", "nvidia.com/gpu.sharing-strategy: time-slicing", "timeslice.partage.dev"},
		{"nvidia.com/gpu", "nvidia.com/gpu.product: NVIDIA-L4-SHARED", "timeslice.partage.dev"},
		{"nvidia.com/gpu", "nvidia.com/gpu.product: NVIDIA-A30-MIG-1g.6gb", "mig.nvidia.com"},
		{"nvidia.com/gpu", "nvidia.com/gpu.product: NVIDIA-A30-MIG-1g.6gb-SHARED", "timeslice.partage.dev"},
		{"nvidia.com/gpu.shared", "", "timeslice.partage.dev"},
		{"nvidia.com/gpu.shared", "nvidia.com/gpu.sharing-strategy: mps", "mps.partage.dev"},
		{"nvidia.com/mig-1g.6gb", "nvidia.com/gpu.product: NVIDIA-A30", "mig.nvidia.com"},
	} {
		r, err := Translate([]byte(pod("nodeSelector: {"+test.selector+"}, "+asking("limits: {"+test.resource+": 1}"))), whole)
		if err != nil || !bytes.Contains(r.Text, []byte("deviceClassName: "+test.want+"\n")) {
			t.Errorf("%s, %s: want class %s: %v\n%s", test.resource, test.selector, test.want, err, r.Text)
		}
	}
}

// TestImplied: a label is dropped only where a node that the claim gets a device of is sure to have it.
func TestImplied(t *testing.T) {
	for _, test := range []struct {
		resource, requirement string
		stays                 bool
	}{
		{"gpu", "key: nvidia.com/gpu.product, operator: Exists", false},
		{"gpu", "key: nvidia.com/gpu.compute.major, operator: Exists", false},
		{"gpu", "key: nvidia.com/gpu.present, operator: In, values: ['true']", false},
		{"gpu", "key: nvidia.com/gpu.present, operator: Exists", false},
		{"gpu", "key: nvidia.com/mig-1g.10gb.product, operator: Exists", false},
		{"mig-1g.10gb", "key: nvidia.com/mig.capable, operator: In, values: ['true']", false},
		{"gpu", "key: nvidia.com/mig.capable, operator: In, values: ['true']", true},
		{"gpu", "key: nvidia.com/mps.capable, operator: In, values: ['true']", true},
		{"gpu", "key: nvidia.com/gpu.clique, operator: Exists", true},
		{"gpu", "key: nvidia.com/of-our-own, operator: Exists", true},
	} {
		r, err := Translate([]byte(pod("affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{"+
			test.requirement+"}]}]}}}, "+asking("limits: {nvidia.com/"+test.resource+": 1}"))), whole)
		if err != nil || bytes.Contains(r.Text, []byte("matchExpressions")) != test.stays {
			t.Errorf("%s, %s: want it to stay %t: %v\n%s", test.resource, test.requirement, test.stays, err, r.Text)
		}
	}
}

// TestMPS: a container has one MPS share, and nothing beside it.
func TestMPS(t *testing.T) {
	o := whole
	o.GPU = policy.MPS
	r, err := Translate([]byte(pod(asking("limits: {nvidia.com/gpu: 2, nvidia.com/mig-1g.10gb: 1}"))), o)
	if err != nil {
		t.Fatal(err)
	}
	told := r.Findings.Comment("title")
	for _, want := range []string{"nvidia.com/gpu: 2: a container can have one MPS share only", "a container with an MPS share cannot have another device"} {
		if !strings.Contains(told, want) {
			t.Errorf("want %q in\n%s", want, told)
		}
	}
	if bytes.Contains(r.Text, []byte("count:")) {
		t.Errorf("want one share:\n%s", r.Text)
	}
}

// TestUntouched: what is not changed is passed on byte by byte.
func TestUntouched(t *testing.T) {
	in := "apiVersion:   v1\nkind: Service\n\n# odd\nmetadata: { name:  a }\n---\n" + pod("containers: [{name:   main}]")
	r, err := Translate([]byte(in), whole)
	if err != nil || string(r.Text) != in || r.Changed != 0 || len(r.Findings) != 0 {
		t.Errorf("%v, %v, got\n%s", err, r.Findings, r.Text)
	}
}

// TestAliases: what two places share stays in both as it is, whichever of them is an object that would be changed.
func TestAliases(t *testing.T) {
	list := func(a, b string) string {
		return "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {" + a + "}}\n- {apiVersion: v1, kind: Pod, metadata: {name: b}, spec: {" + b + "}}\n"
	}
	gpu := asking("limits: {nvidia.com/gpu: 1}")
	for name, in := range map[string]string{
		"in one object":        pod("nodeSelector: &a {zone: z}, x: *a, " + gpu),
		"what is removed":      list("nodeSelector: &a {nvidia.com/gpu.product: NVIDIA-L4}, "+gpu, "nodeSelector: *a, containers: [{name: main}]"),
		"what is changed":      list("containers: [{name: main, resources: &a {limits: {nvidia.com/gpu: 1}}}]", "containers: [{name: main, resources: *a}]"),
		"a key":                list(asking("limits: {&a nvidia.com/gpu: 1}"), asking("limits: {*a : 1}")),
		"deep in it":           pod(gpu + ", x: " + strings.Repeat("[", 50) + "&a {zone: z}, *a" + strings.Repeat("]", 50)),
		"an object":            "apiVersion: v1\nkind: List\nitems:\n- &a {apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {" + gpu + "}}\n- *a\n",
		"a container of a job": "x: &a {limits: {nvidia.com/gpu: 1}}\napiVersion: batch/v1\nkind: Job\nmetadata: {name: j}\nspec: {template: {spec: {containers: [{name: main, resources: *a}]}}}\n",
	} {
		r, err := Translate([]byte(in), whole)
		if err != nil || string(r.Text) != in || r.Findings.Ignored() == 0 {
			t.Errorf("%s: %v, %v, got\n%s", name, err, r.Findings, r.Text)
		}
	}
}

// FuzzTranslate: nothing panics; a result can be read, has claim templates that the API would
// decode, and has nothing left to translate.
func FuzzTranslate(f *testing.F) {
	files, err := filepath.Glob("../testdata/pods/*")
	if err != nil || len(files) == 0 {
		f.Fatalf("no examples: %v", err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
		documents, err := document.Split(data)
		if err != nil {
			f.Fatal(err)
		}
		for _, d := range documents {
			f.Add(bytes.Clone(d.Text))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<14 {
			t.Skip("too long")
		}
		r, err := Translate(data, whole)
		if err != nil {
			return
		}
		if r.Changed == 0 {
			return
		}
		again, err := Translate(r.Text, whole)
		if err != nil {
			t.Fatalf("the result cannot be read: %v\n%s", err, r.Text)
		}
		if again.Changed != 0 {
			t.Errorf("there is something left:\n%s\n-- becomes --\n%s", r.Text, again.Text)
		}
		documents, err := document.Split(r.Text)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range documents {
			root, err := d.Parse()
			if err != nil {
				t.Fatal(err)
			}
			if root == nil || document.Text(root.Content[0], "kind") != "ResourceClaimTemplate" || bytes.Contains(data, []byte("ResourceClaimTemplate")) {
				continue
			}
			if err := yaml.UnmarshalStrict(d.Text, &resourceapi.ResourceClaimTemplate{}); err != nil {
				t.Errorf("%v\n%s", err, d.Text)
			}
		}
	})
}

// TestTranslateTellsOfNodeName: such a pod goes past the scheduler, and waits for its claim forever.
func TestTranslateTellsOfNodeName(t *testing.T) {
	const want = "not translated: Pod one: spec.nodeName = n1: "
	for spec, told := range map[string]bool{
		"nodeName: n1, " + asking("limits: {nvidia.com/gpu: 1}"): true,
		"nodeName: n1, " + asking("limits: {cpu: 1}"):            false,
		asking("limits: {nvidia.com/gpu: 1}"):                    false,
	} {
		got, err := Translate([]byte(pod(spec)), whole)
		if err != nil {
			t.Fatal(err)
		}
		if comment := got.Findings.Comment(""); strings.Contains(comment, want) != told {
			t.Errorf("%s: told %t, want %t:\n%s", spec, !told, told, comment)
		}
	}
}

// TestTranslateAvoidsNamesInUse: a claim template of the stream is not replaced by a new one.
func TestTranslateAvoidsNamesInUse(t *testing.T) {
	own := "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: one-gpu}\nspec: {}\n"
	for name, in := range map[string]string{
		"before":    own + "---\n" + pod(asking("limits: {nvidia.com/gpu: 1}")),
		"behind":    pod(asking("limits: {nvidia.com/gpu: 1}")) + "---\n" + own,
		"in a list": pod(asking("limits: {nvidia.com/gpu: 1}")) + "---\napiVersion: v1\nkind: List\nitems: [{kind: ResourceClaimTemplate, metadata: {name: one-gpu}}]\n",
	} {
		got, err := Translate([]byte(in), whole)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(got.Text, []byte("resourceClaimTemplateName: one-gpu-2")) {
			t.Errorf("%s: the name one-gpu is used twice:\n%s", name, got.Text)
		}
	}
}

// TestHAMi: what HAMi limits by amounts is an MPS share of that size; the request was kept, and the pod never scheduled.
func TestHAMi(t *testing.T) {
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: main\n    resources: {limits: {%s}}\n"
	for _, test := range []struct {
		limits string
		want   []string
	}{
		{"nvidia.com/gpu: 1, nvidia.com/gpumem: 3000, nvidia.com/gpucores: 30", []string{"deviceClassName: mps.partage.dev", "memory: 3000Mi", "smPercent: 30"}},
		{"nvidia.com/gpumem: 3k", []string{"deviceClassName: mps.partage.dev", "memory: 3000Mi"}},
		{"nvidia.com/gpu: 1, nvidia.com/gpumem: 0", []string{"deviceClassName: gpu.nvidia.com"}},
	} {
		r, err := Translate(fmt.Appendf(nil, pod, test.limits), whole)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range test.want {
			if !strings.Contains(string(r.Text), want) {
				t.Errorf("%s: %q is missing:\n%s", test.limits, want, r.Text)
			}
		}
		if _, spec, _ := strings.Cut(string(r.Text), "kind: Pod"); strings.Contains(spec, "gpumem") || strings.Contains(spec, "gpucores") {
			t.Errorf("%s is still asked for:\n%s", test.limits, r.Text)
		}
	}
	for _, wrong := range []string{"much", "1e999999999", "-1", "99999999999"} {
		if _, err := Translate(fmt.Appendf(nil, pod, "nvidia.com/gpumem: "+wrong), Options{Driver: "gpu.nvidia.com", GPU: policy.Whole}); err == nil || !strings.Contains(err.Error(), "must be a whole number") {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}

// TestHAMiKept: what of HAMi cannot be translated keeps the pod from being scheduled, and it is said what to write instead.
func TestHAMiKept(t *testing.T) {
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: main\n    resources: {limits: {nvidia.com/gpu: 1, %s}}\n"
	for limit, want := range map[string]string{
		"nvidia.com/gpumem-percentage: 50": "the pod as printed is never scheduled. Write nvidia.com/gpumem, in Mi",
		"nvidia.com/priority: 1":           "the pod as printed is never scheduled. Remove it",
		"nvidia.com/rdma: 1":               "needs the device plugin that serves it now",
	} {
		r, err := Translate(fmt.Appendf(nil, pod, limit), whole)
		if err != nil {
			t.Fatal(err)
		}
		if told := strings.Join(r.Findings.Lines(), "\n"); !strings.Contains(told, want) || !strings.Contains(string(r.Text), strings.Split(limit, ":")[0]) {
			t.Errorf("%s: want %s:\n%s", limit, want, told)
		}
	}
}

// TestHAMiScheduler: a pod for a scheduler that is gone is never scheduled, and annotations choose no GPU any more.
func TestHAMiScheduler(t *testing.T) {
	const (
		annotations = "annotations: {nvidia.com/use-gputype: A100, hami.io/gpu-scheduler-policy: spread, team: a}"
		spec        = "{schedulerName: %s, containers: [{name: main, resources: {limits: {%s}}}]}"
		pod         = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, " + annotations + "}\nspec: " + spec + "\n"
		deployment  = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: p}\nspec: {template: {metadata: {" + annotations + "}, spec: " + spec + "}}\n"
	)
	for _, test := range []struct{ text, scheduler, limits, want string }{
		{
			pod, "hami-scheduler", "nvidia.com/gpu: 1",
			"Pod p: spec.schedulerName Pod p: metadata.annotations[nvidia.com/use-gputype] Pod p: metadata.annotations[hami.io/gpu-scheduler-policy]",
		},
		{
			deployment, "hami-scheduler", "nvidia.com/gpu: 1", "Deployment p: spec.template.spec.schedulerName " +
				"Deployment p: spec.template.metadata.annotations[nvidia.com/use-gputype] Deployment p: spec.template.metadata.annotations[hami.io/gpu-scheduler-policy]",
		},
		{pod, "default-scheduler", "nvidia.com/gpu: 1", "Pod p: metadata.annotations[nvidia.com/use-gputype] Pod p: metadata.annotations[hami.io/gpu-scheduler-policy]"},
		{pod, "hami-scheduler", "cpu: 1", ""},
	} {
		r, err := Translate(fmt.Appendf(nil, test.text, test.scheduler, test.limits), whole)
		if err != nil {
			t.Fatal(err)
		}
		var lost []string
		for _, f := range r.Findings {
			if f.Kind == finding.Lost {
				lost = append(lost, f.Path)
			}
		}
		if got := strings.Join(lost, " "); got != test.want {
			t.Errorf("%s: got  %s\nwant %s", test.text, got, test.want)
		}
	}
}

// TestHAMiDefaults: what a pod did not ask for was not limited, and of a share it is.
func TestHAMiDefaults(t *testing.T) {
	for limits, want := range map[string]bool{"gpumem: 3000": true, "gpucores: 30": true, "gpumem: 3000, nvidia.com/gpucores: 30": false} {
		r, err := Translate([]byte(pod(asking("limits: {nvidia.com/"+limits+"}"))), whole)
		if err != nil || strings.Contains(strings.Join(r.Findings.Lines(), "\n"), "by default") != want {
			t.Errorf("%s: %v, %q", limits, err, r.Findings.Lines())
		}
	}
}

// TestHAMiTooMuch: more than all multiprocessors is no share, and its pod would wait for ever.
func TestHAMiTooMuch(t *testing.T) {
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n  - name: main\n    resources: {limits: {nvidia.com/gpucores: 150}}\n"
	if _, err := Translate([]byte(pod), Options{Driver: "gpu.nvidia.com", GPU: policy.Whole}); err == nil || !strings.Contains(err.Error(), "100 at most") {
		t.Error(err)
	}
}

// TestConfiguration: what is no pod is said to be for another command, and was passed on without a word.
func TestConfiguration(t *testing.T) {
	for data, want := range map[string]int{"version: v1\n  sharing:": 1, "mig-configs:": 1, "a: b": 0} {
		text := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  any: |\n    " + strings.ReplaceAll(data, "\n", "\n  ") + "\n"
		if r, err := Translate([]byte(text), Options{Driver: "gpu.nvidia.com"}); err != nil || len(r.Findings) != want || r.Changed != 0 {
			t.Errorf("%q: %v, %+v", data, err, r)
		}
	}
}
