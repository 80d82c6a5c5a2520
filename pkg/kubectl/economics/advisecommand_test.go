// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/boards"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/manifest"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// call runs the command with a cluster.
func call(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	o := options.New(genericiooptions.IOStreams{Out: &out, ErrOut: &out})
	f, c := &adviseFlags{}, &cobra.Command{}
	f.add(c)
	o.AddOutputFlag(c)
	if err := errors.Join(c.ParseFlags(args), f.check(c.Flags())); err != nil {
		return "", err
	}
	err := f.run(t.Context(), o, client(dgx(t)))
	return out.String(), err
}

// TestOutputs: YAML is the manifest alone, to be piped into kubectl apply; JSON is everything.
func TestOutputs(t *testing.T) {
	args := []string{"--model-size", "13B", "--image", "registry.example.com/llm:1", "--count", "2"}
	made, err := call(t, append(args, "-o", "yaml")...)
	if err != nil {
		t.Fatal(err)
	}
	if claims := claimsOf(t, "manifest", []byte(made)); len(claims) != 1 || claims[0].Spec.Devices.Requests[0].Exactly.DeviceClassName != manifest.ClassOf("mig") {
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
		"":                                                "--model-size or --memory is needed",
		"--workload batch":                                `invalid argument "batch" for "--workload" flag: it must be one of inference, training, notebook, ci, mpi`,
		"--workload ci --trust everybody":                 `invalid argument "everybody" for "--trust" flag: it must be one of same-team, other-tenants, regulated`,
		"--workload ci --traffic never":                   `invalid argument "never" for "--traffic" flag: it must be one of steady, bursty, batch`,
		"--workload ci --latency fast":                    `invalid argument "fast" for "--latency" flag: it must be one of p99-ms, relaxed`,
		"--workload ci --count -2":                        "--count -2: it must be 1 or more",
		"--workload ci --count 3000000000":                "--count 3000000000: it must be 1 or more, and 1000000 at most",
		"--workload ci --price -2":                        "--price -2: it must be dollars for an hour",
		"--workload ci --price NaN":                       "--price NaN: it must be dollars for an hour",
		"--workload ci --price 1e300":                     "--price 1e+300: it must be dollars for an hour, from 0 to 1e+06",
		"--model-size 7B --memory 1Gi":                    "give one of them",
		"--memory 1Gi --quantized":                        "--model-size, which is missing",
		"--workload training --model-size 7B --quantized": "--quantized is about inference",
		"--model-size seven":                              "--model-size seven: it must be a number of parameters, such as 13B",
		"--model-size 7":                                  "--model-size 7: it must be a number of parameters",
		"--model-size 0B":                                 "--model-size 0B: it must be more than 0",
		"--memory lots":                                   "--memory lots: it must be an amount",
		"--memory -1Gi":                                   "--memory -1Gi: it must be an amount",
		"--workload ci -o template":                       "it must be one of",
		"--memory 10":                                     "--memory 10: it must be an amount of at least 1Mi",
	} {
		if out, err := call(t, strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q\n%s", args, err, want, out)
		}
	}
}

// TestMemoryFlag: the claim asks for what was written, and not for more.
func TestMemoryFlag(t *testing.T) {
	for given, bytes := range map[string]int64{"10G": 10_000_000_000, "10Gi": 10 << 30, "1500M": 1_500_000_000, "2.5Gi": 5 << 29} {
		a, err := Advise(query(t, "--workload notebook --memory "+given), fleet.New(dgx(t).Snapshot, fleettest.Driver))
		if err != nil {
			t.Fatal(err)
		}
		memory := claimsOf(t, given, []byte(a.Manifest))[0].Spec.Devices.Requests[0].Exactly.Capacity.Requests["memory"]
		if memory.Value() != bytes || !strings.Contains(a.Manifest, "memory: "+given+"\n") ||
			a.Request.MemoryBytes != bytes || !strings.Contains(a.Request.text(), given+" of memory") {
			t.Errorf("%s: %s, %s", given, memory.String(), a.Request.text())
		}
	}
}

// TestModelSizeFlag: what people write.
func TestModelSizeFlag(t *testing.T) {
	for given, want := range map[string]float64{"13B": 13, "1.5b": 1.5, "350M": 0.35, "0.5B": 0.5, "405B": 405} {
		if q := query(t, "--model-size "+given); q.Billions != want {
			t.Errorf("%s: %g", given, q.Billions)
		}
	}
}

// TestEveryQuery: for all workloads on all models there is an answer with a manifest that
// decodes, and whoever is not trusted shares nothing but partitions.
func TestEveryQuery(t *testing.T) {
	n := 0
	for _, alias := range boards.Names() {
		// As many GPUs as the largest workload needs.
		each := factsOfBoard(t, alias, false).GPUs[0].Resources.MemoryBytes
		m := fleet.New(with(t, alias, int(200*gib/each)+1).Snapshot, fleettest.Driver)
		for _, kind := range Kinds {
			for _, trust := range Trusts {
				for _, latency := range []string{"", "p99-ms", "relaxed"} {
					for _, memory := range []string{"1Gi", "9Gi", "50Gi", "200Gi"} {
						n++
						f := fmt.Sprintf("--workload %s --trust %s --latency=%s --memory %s --count 3", kind, trust, latency, memory)
						a, err := Advise(query(t, f), m)
						if err != nil {
							t.Fatalf("%s, %s: %v", alias, f, err)
						}
						if trust != SameTeam && Guarantees[a.Mechanism].Memory != "hardware" {
							t.Errorf("%s, %s: %s", alias, f, a.Mechanism)
						}
						if a.Cost.GPUs > a.Cost.Unshared || a.Cost.GPUs < 1 {
							t.Errorf("%s, %s: %+v", alias, f, a.Cost)
						}
						if claims := claimsOf(t, alias, []byte(a.Manifest)); len(claims) != 1 {
							t.Errorf("%s, %s: %d claims", alias, f, len(claims))
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
