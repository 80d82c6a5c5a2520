// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/dynamic-resource-allocation/cel"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/policy"
)

var update = flag.Bool("update", false, "write README.md")

// count is how many files there are. A new one is listed in README.md, by -update, and run by
// TestTemplates in test/e2e.
const count = 16

func all(t *testing.T) map[string][]byte {
	t.Helper()
	names, err := Names()
	if err != nil || len(names) != count {
		t.Fatalf("there are %d templates, want %d: %v, %v", len(names), count, names, err)
	}
	contents := map[string][]byte{}
	for _, name := range names {
		if contents[name], err = Read(name); err != nil {
			t.Fatal(err)
		}
	}
	return contents
}

// TestIndex compares README.md with the headers of the files.
func TestIndex(t *testing.T) {
	const begin, end = "<!-- begin: go test ./templates -update -->\n", "<!-- end -->\n"
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	before, rest, hasBegin := strings.Cut(string(page), begin)
	_, after, hasEnd := strings.Cut(rest, end)
	if !hasBegin || !hasEnd {
		t.Fatalf("README.md lacks %q or %q", begin, end)
	}
	var index strings.Builder
	index.WriteString("| file | what it is |\n|---|---|\n")
	contents := all(t)
	for _, name := range order(t, contents) {
		fmt.Fprintf(&index, "| [%[1]s](%[1]s) | %[2]s |\n", name, purpose(contents[name]))
	}
	want := before + begin + index.String() + end + after
	if *update {
		if err := os.WriteFile("README.md", []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(page) != want {
		t.Error("README.md is not up to date: run go test ./templates -update")
	}
}

// order is that of a reader: claims of pods, then workloads, then what administrators apply.
func order(t *testing.T, contents map[string][]byte) []string {
	t.Helper()
	names := []string{
		"whole-gpu.yaml", "partition-by-memory.yaml", "partition-by-profile.yaml", "mps-share.yaml", "time-slice-share.yaml",
		"without-a-claim.yaml", "several-pods-one-claim.yaml",
		"inference.yaml", "inference-small-models.yaml", "training.yaml", "mpi.yaml", "notebook.yaml", "ci.yaml",
		"device-classes.yaml", "quota.yaml", "policy-per-model.values.yaml",
	}
	for name := range contents {
		if !slices.Contains(names, name) {
			t.Errorf("%s has no place in the index", name)
		}
	}
	return names
}

const header = `# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
#
`

// TestHeaders: each file says what it is, in words that are a sentence, and when to use it.
func TestHeaders(t *testing.T) {
	for name, data := range all(t) {
		if !bytes.HasPrefix(data, []byte(header)) {
			t.Errorf("%s does not begin with the licence", name)
		}
		if p := purpose(data); len(p) < 20 || len(p) > 110 || !strings.HasSuffix(p, ".") {
			t.Errorf("%s: what it is for is %q", name, p)
		}
		if body := Body(data); bytes.HasPrefix(body, []byte("#")) || len(body) == 0 || bytes.Contains(body, []byte("SPDX")) {
			t.Errorf("%s: the body begins with %.40q", name, body)
		}
		header := strings.TrimSuffix(string(data), string(Body(data)))
		if strings.Count(header, "\n#\n") < 2 {
			t.Errorf("%s: nothing says when to use it:\n%s", name, header)
		}
	}
}

// objects decodes a file strictly: unknown and repeated fields are errors.
func objects(t *testing.T, name string, data []byte) []runtime.Object {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	var decoded []runtime.Object
	for document := range strings.SplitSeq(string(data), "\n---\n") {
		o, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		decoded = append(decoded, o)
	}
	return decoded
}

// podOf returns what an object makes pods of.
func podOf(o runtime.Object) (corev1.PodSpec, bool) {
	switch o := o.(type) {
	case *corev1.Pod:
		return o.Spec, true
	case *appsv1.Deployment:
		return o.Spec.Template.Spec, true
	case *appsv1.StatefulSet:
		return o.Spec.Template.Spec, true
	case *batchv1.Job:
		return o.Spec.Template.Spec, true
	}
	return corev1.PodSpec{}, false
}

// TestObjects: each manifest decodes strictly, its names are valid and unlike those of other
// files, and what refers to something finds it in the same file.
func TestObjects(t *testing.T) {
	seen := map[string]string{}
	kinds := map[string]int{}
	for name, data := range all(t) {
		if IsValues(name) {
			continue
		}
		claims, templates := map[string][]resourceapi.DeviceRequest{}, map[string][]resourceapi.DeviceRequest{}
		var pods []corev1.PodSpec
		for _, o := range objects(t, name, data) {
			kind := o.GetObjectKind().GroupVersionKind().Kind
			kinds[kind]++
			meta, is := o.(metav1.Object)
			if !is {
				t.Fatalf("%s: a %T has no metadata", name, o)
			}
			for _, wrong := range validation.IsDNS1123Subdomain(meta.GetName()) {
				t.Errorf("%s: %s %q: %s", name, kind, meta.GetName(), wrong)
			}
			if meta.GetNamespace() != "" {
				t.Errorf("%s: %s is in namespace %s: it must go where the user is", name, meta.GetName(), meta.GetNamespace())
			}
			key := kind + "/" + meta.GetName()
			if other := seen[key]; other != "" {
				t.Errorf("%s and %s both have %s", name, other, key)
			}
			seen[key] = name
			switch o := o.(type) {
			case *resourceapi.ResourceClaim:
				claims[o.Name] = o.Spec.Devices.Requests
			case *resourceapi.ResourceClaimTemplate:
				templates[o.Name] = o.Spec.Spec.Devices.Requests
			case *resourceapi.DeviceClass:
				compiles(t, name, o.Spec.Selectors)
			}
			if spec, has := podOf(o); has {
				pods = append(pods, spec)
			}
		}
		checkReferences(t, name, pods, claims, templates)
	}
	for _, kind := range []string{"Pod", "Deployment", "Job", "StatefulSet", "ResourceClaim", "ResourceClaimTemplate", "DeviceClass", "ResourceQuota"} {
		if kinds[kind] == 0 {
			t.Errorf("no template has a %s", kind)
		}
	}
}

// checkReferences: pods, claims and requests find each other, and every claim is used.
func checkReferences(t *testing.T, name string, pods []corev1.PodSpec, claims, templates map[string][]resourceapi.DeviceRequest) {
	t.Helper()
	used := map[string]bool{}
	for _, pod := range pods {
		declared := map[string]bool{}
		for _, c := range pod.ResourceClaims {
			declared[c.Name] = true
			switch {
			case c.ResourceClaimName != nil && claims[*c.ResourceClaimName] != nil:
				used[*c.ResourceClaimName] = true
			case c.ResourceClaimTemplateName != nil && templates[*c.ResourceClaimTemplateName] != nil:
				used[*c.ResourceClaimTemplateName] = true
			default:
				t.Errorf("%s: claim %s of a pod refers to nothing in this file", name, c.Name)
			}
		}
		for _, container := range pod.Containers {
			if len(container.Resources.Claims) == 0 && len(container.Resources.Limits) == 0 {
				t.Errorf("%s: container %s has no GPU", name, container.Name)
			}
			for _, c := range container.Resources.Claims {
				if !declared[c.Name] {
					t.Errorf("%s: container %s uses claim %s, which its pod does not have", name, container.Name, c.Name)
				}
			}
		}
	}
	for _, group := range []map[string][]resourceapi.DeviceRequest{claims, templates} {
		for claim, requests := range group {
			if !used[claim] {
				t.Errorf("%s: nothing uses %s", name, claim)
			}
			for _, r := range requests {
				compiles(t, name, r.Exactly.Selectors)
			}
		}
	}
}

// compiles: the scheduler's own compiler takes the selectors.
func compiles(t *testing.T, name string, selectors []resourceapi.DeviceSelector) {
	t.Helper()
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	for _, s := range selectors {
		if result := compiler.CompileCELExpression(s.CEL.Expression, cel.Options{}); result.Error != nil {
			t.Errorf("%s: %s: %v", name, s.CEL.Expression, result.Error)
		}
	}
}

// TestValues: the sharing policy in values for helm is one that the driver takes.
func TestValues(t *testing.T) {
	found := 0
	for name, data := range all(t) {
		if !IsValues(name) {
			continue
		}
		found++
		var values struct {
			SharingPolicy map[string]any `json:"sharingPolicy"`
		}
		if err := yaml.UnmarshalStrict(data, &values); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		values.SharingPolicy["apiVersion"], values.SharingPolicy["kind"] = policy.Version, policy.PolicyKind
		document, err := yaml.Marshal(values.SharingPolicy)
		if err != nil {
			t.Fatal(err)
		}
		decoded, err := policy.Decode(document)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(decoded.Rules) < 3 {
			t.Errorf("%s has %d rules, want one for each of several models", name, len(decoded.Rules))
		}
	}
	if found != 1 {
		t.Errorf("%d files with values, want 1", found)
	}
}

// TestTexts looks for what others say of GPU sharing that does not hold for Partage.
func TestTexts(t *testing.T) {
	pages, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	texts := all(t)
	for _, page := range pages {
		if texts[page], err = os.ReadFile(page); err != nil {
			t.Fatal(err)
		}
	}
	for name, data := range texts {
		for _, banned := range []string{"cannot be mixed", "needs a GPU reset", "maintenance window", "one mechanism per node pool"} {
			if bytes.Contains(data, []byte(banned)) {
				t.Errorf("%s says %q", name, banned)
			}
		}
	}
}

// purpose returns what a file is for: the first paragraph of its header after the licence.
func purpose(data []byte) string {
	var words []string
	for line := range strings.Lines(string(data)) {
		text, isComment := strings.CutPrefix(strings.TrimSpace(line), comment)
		text = strings.TrimSpace(text)
		switch {
		case strings.HasPrefix(text, "SPDX-"):
		case !isComment || text == "" && len(words) > 0:
			return strings.Join(words, " ")
		case text != "":
			words = append(words, text)
		}
	}
	return strings.Join(words, " ")
}
