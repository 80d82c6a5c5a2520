// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/admission"
	"sigs.k8s.io/yaml"
)

const (
	corpusFile    = "../../../pkg/api/testdata/corpus.yaml"
	mutationsFile = "../../../pkg/api/testdata/mutations.txt"
)

// config is a configuration of the corpus, and what is wrong with it.
type config struct {
	Name       string          `json:"name"`
	Parameters json.RawMessage `json:"parameters"`
	JSON       string          `json:"json"`
	Faults     []string        `json:"faults"`
}

func corpus(t *testing.T) []config {
	t.Helper()
	data, err := os.ReadFile(corpusFile)
	if err != nil {
		t.Fatal(err)
	}
	var all []config
	if err := yaml.UnmarshalStrict(data, &all); err != nil {
		t.Fatal(err)
	}
	for i := range all {
		if all[i].JSON != "" {
			all[i].Parameters = json.RawMessage(all[i].JSON)
		}
	}
	return all
}

// configured are a claim, a template and a class with a configuration, in every version of the
// API, and where in the object it is. The class of the claim's request is not known to
// the policy.
func configured(t *testing.T, parameters []byte) map[string]struct {
	document []byte
	path     string
} {
	t.Helper()
	all := map[string]struct {
		document []byte
		path     string
	}{}
	entry := fmt.Sprintf(`{"opaque": {"driver": "gpu.nvidia.com", "parameters": %s}}`, parameters)
	// Not the first one, so that the number in the message matters.
	other := `{"opaque": {"driver": "other.example.com", "parameters": {"kind": "Other"}}}`
	claim := fmt.Sprintf(`{"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "any.example.com"}}], "config": [%s, %s]}}`, other, entry)
	for kind, o := range map[string]struct{ spec, path string }{
		"ResourceClaim":         {claim, "spec.devices.config[1]"},
		"ResourceClaimTemplate": {`{"spec": ` + claim + `}`, "spec.spec.devices.config[1]"},
		"DeviceClass":           {fmt.Sprintf(`{"config": [%s, %s]}`, other, entry), "spec.config[1]"},
	} {
		document := []byte(fmt.Sprintf(`{"apiVersion": "resource.k8s.io/v1", "kind": %q, "metadata": {"name": "example"}, "spec": %s}`, kind, o.spec))
		for _, version := range []string{"v1", "v1beta1", "v1beta2"} {
			in := in(t, version, mustDecode(t, document))
			all[kind+" "+version] = struct {
				document []byte
				path     string
			}{in, o.path + ".opaque.parameters."}
		}
	}
	return all
}

// TestConfigs: the policy takes the configurations that pkg/api takes, and says the same of the
// others, with the place in the object.
func TestConfigs(t *testing.T) {
	server := newAPIServer(t, "defaults")
	good, bad := 0, 0
	for _, c := range corpus(t) {
		for form, object := range configured(t, c.Parameters) {
			warnings, refused := server.create(t, "default", object.document)
			if len(warnings) > 0 {
				t.Errorf("%s, %s: warnings %q", c.Name, form, warnings)
			}
			if len(c.Faults) == 0 {
				good++
				if refused != nil {
					t.Errorf("%s, %s: %v", c.Name, form, refused)
				}
				continue
			}
			bad++
			if refused == nil {
				t.Errorf("%s, %s: taken, want %q", c.Name, form, c.Faults)
				continue
			}
			for _, fault := range c.Faults {
				// Where the value is written in two ways, the case says only what would be right.
				if want := object.path + fault; !strings.HasPrefix(fault, "must ") {
					fault = want
				}
				if !strings.Contains(refused.Error(), fault) {
					t.Errorf("%s, %s:\ngot  %v\nwant %s", c.Name, form, refused, fault)
				}
			}
			if !strings.HasSuffix(refused.Error(), "docs/how-to/admission.md") {
				t.Errorf("%s, %s: the message does not name the page: %v", c.Name, form, refused)
			}
		}
	}
	if t.Logf("%d good, %d bad", good, bad); good < 9*20 || bad < 9*50 {
		t.Errorf("only %d good and %d bad cases", good, bad)
	}
}

// TestMutatedConfigs: the policy and pkg/api agree on configurations that nobody thought of.
func TestMutatedConfigs(t *testing.T) {
	server := newAPIServer(t, "defaults")
	data, err := os.ReadFile(mutationsFile)
	if err != nil {
		t.Fatal(err)
	}
	cases, good := 0, 0
	for line := range bytes.Lines(data) {
		verdict, parameters, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		cases++
		document := fmt.Sprintf(`{"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "c"},
			"spec": {"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": %s}}]}}`, parameters)
		_, refused := server.create(t, "", []byte(document))
		if string(verdict) == "good" {
			good++
		}
		if (refused == nil) != (string(verdict) == "good") {
			t.Errorf("pkg/api: %s, the policy: %v\n%s", verdict, refused, parameters)
		}
		if refused != nil && !strings.Contains(refused.Error(), "spec.config[0].opaque.parameters") {
			t.Errorf("the message names no field: %v\n%s", refused, parameters)
		}
	}
	if t.Logf("%d mutations, %d are right", cases, good); cases < 400 || good < 40 {
		t.Errorf("%d mutations, %d are right", cases, good)
	}
}

// TestWhatIsNotSeen: these configurations are refused on the node only, by pkg/api. The policy is
// given what the API server has made of the text.
func TestWhatIsNotSeen(t *testing.T) {
	server := newAPIServer(t, "defaults")
	const mps = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{%s}}}`
	for name, parameters := range map[string]string{
		"a field given twice":        fmt.Sprintf(mps, `"multiUser":true,"multiUser":false`),
		"a number with a plus":       fmt.Sprintf(mps, `"defaultPinnedDeviceMemoryLimit":1e+9`),
		"a number with ten decimals": fmt.Sprintf(mps, `"defaultPinnedDeviceMemoryLimit":1048576.0000000000`),
	} {
		document := fmt.Sprintf(`{"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "c"},
			"spec": {"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": %s}}]}}`, parameters)
		if _, refused := server.create(t, "", []byte(document)); refused != nil {
			t.Errorf("%s: %v; move it to the corpus", name, refused)
		}
	}
}

// TestChangedClasses: a device class that is older than the policy can be changed, but not be
// given another wrong configuration.
func TestChangedClasses(t *testing.T) {
	server := newAPIServer(t, "defaults")
	class := func(label, config string) []byte {
		return []byte(fmt.Sprintf(`{"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "c", "labels": {"l": %q}}, "spec": {%s}}`, label, config))
	}
	const wrong, right = `"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": "%s"}}}]`,
		`"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}}}]`
	for name, c := range map[string]struct {
		old, object string
		refused     bool
	}{
		"another label":       {old: fmt.Sprintf(wrong, "a"), object: fmt.Sprintf(wrong, "a")},
		"made right":          {old: fmt.Sprintf(wrong, "a"), object: right},
		"removed":             {old: fmt.Sprintf(wrong, "a")},
		"wrong in other ways": {old: fmt.Sprintf(wrong, "a"), object: fmt.Sprintf(wrong, "b"), refused: true},
		"made wrong":          {old: right, object: fmt.Sprintf(wrong, "a"), refused: true},
		"added":               {object: fmt.Sprintf(wrong, "a"), refused: true},
	} {
		_, err := server.ask(t, request{
			by: somebody, operation: admission.Update, object: mustDecode(t, class("new", c.object)), old: mustDecode(t, class("old", c.old)),
		})
		if (err != nil) != c.refused {
			t.Errorf("%s: %v", name, err)
		}
	}
}
