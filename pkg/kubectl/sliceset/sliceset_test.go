// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sliceset

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func run(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	streams, _, out, errs := genericiooptions.NewTestIOStreams()
	c := NewCommand(options.New(streams))
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetArgs(args)
	err = c.ExecuteContext(t.Context())
	return out.String(), errs.String(), err
}

func TestCommand(t *testing.T) {
	t.Parallel()
	file := t.TempDir() + "/policy.yaml"
	const text = `apiVersion: policy.partage.dev/v1alpha1
kind: SharingPolicy
rules:
- name: small
  match: {uuid: GPU-5b1a7e00-0000-4000-8000-000000000000}
  offer: {kinds: [gpu]}
default:
  kinds: [gpu, mps]
  mps: {clients: 2}
`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out, warnings, err := run(t, "--model", "L4", "--count", "1", "--policy", file, "--driver-version", "590.10", "--cuda-version", "13.1", "--node-name-template", "new-node")
	if err != nil {
		t.Fatal(err)
	}
	if want := "warning: the rule \"small\" of the policy is for the GPU GPU-5b1a7e00-0000-4000-8000-000000000000, which no template is of\n"; warnings != want {
		t.Errorf("%q, want %q", warnings, want)
	}
	if *update {
		if err := os.WriteFile("testdata/l4.yaml", []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/l4.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}

	asYAML, _, err := run(t, "--model", "h100", "--count", "3")
	if err != nil {
		t.Fatal(err)
	}
	asJSON, _, err := run(t, "--model", "h100", "--count", "3", "-o", "json")
	if err != nil {
		t.Fatal(err)
	}
	var list resourceapi.ResourceSliceList
	if err := json.Unmarshal([]byte(asJSON), &list); err != nil {
		t.Fatal(err)
	}
	documents := bytes.Split([]byte(asYAML), []byte("\n---\n"))
	if len(documents) != 4 || len(list.Items) != 4 {
		t.Fatalf("%d documents, %d items", len(documents), len(list.Items))
	}
	for i, d := range documents {
		var one resourceapi.ResourceSlice
		if err := yaml.UnmarshalStrict(d, &one); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(list.Items[i], one); diff != "" {
			t.Errorf("-json +yaml:\n%s", diff)
		}
	}
}

func TestCommandRefuses(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"at least one of the flags in the group [model from-node] is required":           {},
		`the GPU model "k80" is not known; there are a10, `:                              {"--model", "k80"},
		"33 GPUs: a node has 1 to 32":                                                    {"--model", "l4", "--count", "33"},
		"0 GPUs: a node has 1 to 32":                                                     {"--model", "l4", "--count", "0"},
		"the GPU model l4 has no MIG mode that could be on":                              {"--model", "l4", "--mig"},
		"--cuda-version 13: it must be two numbers, such as 13.0":                        {"--model", "l4", "--cuda-version", "13"},
		`invalid argument "wide" for "-o, --output" flag: it must be one of yaml, json`:  {"--model", "l4", "-o", "wide"},
		"read the policy: open /nonexistent/policy":                                      {"--model", "l4", "--policy", "/nonexistent/policy"},
		"if any flags in the group [from-node policy] are set none of the others can be": {"--from-node", "a", "--policy", "x"},
		"--node-name-template: it must not be empty":                                     {"--model", "l4", "--node-name-template", ""},
	} {
		if _, _, err := run(t, args...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %s", args, err, want)
		}
	}
}
