// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// call runs the command without a cluster.
func call(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	o := options.New(genericiooptions.IOStreams{Out: &out, ErrOut: &out})
	c := NewAdvise(o)
	c.SetArgs(args)
	c.SetOut(&out)
	c.SetErr(&out)
	c.SilenceErrors, c.SilenceUsage = true, true
	err := c.ExecuteContext(t.Context())
	return out.String(), err
}

// TestOutputs: YAML is the manifest alone, to be piped into kubectl apply; JSON is everything.
func TestOutputs(t *testing.T) {
	args := []string{"--gpu", "h100=8", "--model-size", "13B", "--image", "registry.example.com/llm:1", "--count", "2"}
	made, err := call(t, append(args, "-o", "yaml")...)
	if err != nil {
		t.Fatal(err)
	}
	if claims := claimsOf(t, "manifest", []byte(made)); len(claims) != 1 || claims[0].Spec.Devices.Requests[0].Exactly.DeviceClassName != manifest.ClassMIG {
		t.Errorf("claims %+v", claims)
	}
	if !strings.Contains(made, "image: registry.example.com/llm:1\n") || !strings.Contains(made, "replicas: 2\n") {
		t.Errorf("the image or the replicas are missing:\n%s", made)
	}
	if strings.Contains(made, "command:") {
		t.Errorf("the template's program runs in another image:\n%s", made)
	}
	text, err := call(t, append(args, "-o", "json")...)
	if err != nil {
		t.Fatal(err)
	}
	var a Advice
	if err := json.Unmarshal([]byte(text), &a); err != nil {
		t.Fatal(err)
	}
	if a.Kind != "Advice" || a.APIVersion != "kubectl.partage.dev/v1alpha1" || a.Mechanism != Partition || a.Manifest != made {
		t.Errorf("%+v", a)
	}
	if text, err = call(t, append(args, "-o", "name")...); err != nil || text != "inference.yaml\n" {
		t.Errorf("-o name: %q, %v", text, err)
	}
	if text, err = call(t, args...); err != nil || !strings.HasPrefix(text, "Use a MIG partition: ") || !strings.HasSuffix(text, made) {
		t.Errorf("%v\n%s", err, text)
	}
}

// TestMistakes: each error names the flag, its value, and what would be right.
func TestMistakes(t *testing.T) {
	for args, want := range map[string]string{
		"":                                     "--model-size or --memory is needed",
		"--workload batch":                     "--workload batch: it must be one of inference, training, notebook, ci, mpi",
		"--workload ci --trust everybody":      "--trust everybody: it must be one of same-team, other-tenants, regulated",
		"--workload ci --traffic never":        "--traffic never: it must be one of steady, bursty, batch",
		"--workload ci --latency fast":         "--latency fast: it must be one of p99-ms, relaxed",
		"--workload ci --count -2":             "--count -2: it must be 1 or more",
		"--workload ci --count 3000000000":     "--count 3000000000: it must be 1 or more, and 1000000 at most",
		"--workload ci --price -2":             "--price -2: it must be dollars for an hour",
		"--workload ci --price NaN":            "--price NaN: it must be dollars for an hour",
		"--workload ci --price 1e300":          "--price 1e+300: it must be dollars for an hour, from 0 to 1e+06",
		"--gpu h100=64 --memory 3000Gi":        "a replica needs 38 GPUs, and a claim has 32 devices at most",
		"--model-size 7B --memory 1Gi":         "give one of them",
		"--memory 1Gi --quantized":             "--model-size, which is missing",
		"--model-size seven":                   "--model-size seven: it must be a number of parameters, such as 13B",
		"--model-size 7":                       "--model-size 7: it must be a number of parameters",
		"--model-size 0B":                      "--model-size 0B: it must be more than 0",
		"--memory lots":                        "--memory lots: it must be an amount",
		"--memory -1Gi":                        "--memory -1Gi: it must be an amount",
		"--memory 10":                          "--memory 10: it must be an amount of at least 1Mi",
		"--workload ci --gpu h1000":            "--gpu h1000: the GPU model \"h1000\" is not known; there are a10, a100-40",
		"--workload ci --gpu h100=0":           "--gpu h100=0: the number of GPUs must be 1 or more",
		"--workload ci --gpu h100=two":         "--gpu h100=two: the number of GPUs must be 1 or more",
		"--workload ci --gpu h100=2x":          "--gpu h100=2x: the number of GPUs must be 1 or more",
		"--workload ci --gpu h100 unexpected":  "unknown command",
		"--workload ci --gpu h100 -o template": "it must be one of",
	} {
		if out, err := call(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q\n%s", args, err, want, out)
		}
	}
}

// TestModelSizeFlag: what people write.
func TestModelSizeFlag(t *testing.T) {
	for given, want := range map[string]float64{"13B": 13, "1.5b": 1.5, "350M": 0.35, "0.5B": 0.5, "405B": 405} {
		q, err := (&adviseFlags{modelSize: given}).query(fleettest.Driver)
		if err != nil || q.Billions != want {
			t.Errorf("%s: %g, %v", given, q.Billions, err)
		}
	}
}

// TestEveryQuery: for all workloads on all models there is an answer with a manifest that
// decodes, and whoever is not trusted shares nothing but partitions.
func TestEveryQuery(t *testing.T) {
	n := 0
	for _, alias := range boards.Names() {
		s, err := SupplyOfNames([]string{alias})
		if err != nil {
			t.Fatal(err)
		}
		for _, kind := range Kinds {
			for _, trust := range Trusts {
				for _, latency := range []string{"", "p99-ms", "relaxed"} {
					for _, memory := range []string{"1Gi", "9Gi", "50Gi", "200Gi"} {
						n++
						f := adviseFlags{workload: string(kind), trust: string(trust), latency: latency, memory: memory, count: 3}
						q, err := f.query(fleettest.Driver)
						if err != nil {
							t.Fatal(err)
						}
						a, err := Advise(q, s)
						if err != nil {
							t.Fatalf("%s, %+v: %v", alias, f, err)
						}
						if trust != SameTeam && Guarantees[a.Mechanism].Attribute != "hardware" {
							t.Errorf("%s, %+v: %s", alias, f, a.Mechanism)
						}
						if a.Cost.GPUs > a.Cost.Unshared || a.Cost.GPUs < 1 {
							t.Errorf("%s, %+v: %+v", alias, f, a.Cost)
						}
						if claims := claimsOf(t, alias, []byte(a.Manifest)); len(claims) != 1 {
							t.Errorf("%s, %+v: %d claims", alias, f, len(claims))
						}
					}
				}
			}
		}
	}
	if want := len(boards.Names()) * 5 * 3 * 3 * 4; n != want {
		t.Errorf("%d queries, want %d", n, want)
	}
}
