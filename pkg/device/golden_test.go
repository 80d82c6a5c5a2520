// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"cmp"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

const goldenHeader = `# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
`

// TestGolden compares the full slices of one GPU of every board. Boards whose slices differ in values only
// share a file, and digests.txt says in which. For 8 and 16 GPUs a digest is enough: the layout, and a hash of everything.
func TestGolden(t *testing.T) {
	var used []string
	var examples []example
	var digests strings.Builder
	all := testBoards(t)
	// Those that other tests read come first.
	slices.SortStableFunc(all, func(a, b testBoard) int {
		return cmp.Compare(slices.Index(goldenExamples, b.name), slices.Index(goldenExamples, a.name))
	})
	for _, b := range all {
		t.Run(b.name, func(t *testing.T) {
			one := documents(t, inventoryOf(t, b.node, Terms{}).ResourceSlices(testOptions))
			digests.WriteString("\n# " + b.name + "\n")
			if like := slices.IndexFunc(examples, func(e example) bool { return e.sameKeys(one) }); like >= 0 {
				digests.WriteString(examples[like].differences(one))
			} else {
				examples = append(examples, example{b.name, one})
				used = append(used, b.name+".yaml")
				compareGolden(t, "slices/"+b.name+".yaml", one)
			}
			for _, n := range []int{8, 16} {
				fmt.Fprintf(&digests, "%d GPUs:\n%s", n, digest(t, inventoryOf(t, replicate(b.node, n), Terms{}).ResourceSlices(testOptions)))
			}
		})
	}
	compareGolden(t, "digests.txt", digests.String())
	for board, s := range goldenStatus {
		t.Run(board+"-status", func(t *testing.T) {
			used = append(used, board+"-status.yaml")
			compareGolden(t, "slices/"+board+"-status.yaml", documents(t, mustInventory(t, loadNode(t, board)).With(s).ResourceSlices(testOptions)))
		})
	}
	for name, g := range goldenPolicies {
		t.Run(name, func(t *testing.T) {
			used = append(used, name+".yaml")
			compareGolden(t, "slices/"+name+".yaml", documents(t, inventoryOf(t, loadNode(t, g.board), g.terms).ResourceSlices(testOptions)))
		})
	}
	files := must.Get(filepath.Glob("testdata/slices/*"))(t)
	for _, file := range files {
		if !slices.Contains(used, filepath.Base(file)) {
			t.Errorf("%s belongs to no board", file)
		}
	}
}

// goldenExamples have files of their own where the slices of other boards differ in values only.
var goldenExamples = []string{"t4", "h100-80-sxm", "a100-40-mig"}

// goldenStatus has a bit of everything that holds for a part of a GPU.
var goldenStatus = map[string]Status{
	// In the order of memory slices: a claim has a 2g that is gone, a 1g of ours
	// cannot be removed, and a 1g+me lives, whose OFA engine is the only one.
	"h100-80-sxm": {
		Static: []Static{
			{PCIAddress: "0000:1b:00.0", ProfileID: 14, Placement: gpu.Placement{Start: 0, Size: 2}, UUID: "MIG-00000000-0000-0000-0000-000000000002", Gone: true},
			{PCIAddress: "0000:1b:00.0", ProfileID: 20, Placement: gpu.Placement{Start: 6, Size: 1}, UUID: "MIG-00000000-0000-0000-0000-000000000001"},
		},
		Conditions: []Condition{{
			PCIAddress: "0000:1b:00.0", Where: &gpu.Placement{Start: 4, Size: 1}, ProfileID: new(uint32(19)), Reason: ReleasePending,
		}},
	},
	// A 3g and an instance without a compute instance, as an admin left them.
	"a100-40-mig": {
		Static: []Static{
			{PCIAddress: "0000:1b:00.0", ProfileID: 9, Placement: gpu.Placement{Start: 4, Size: 4}, UUID: "MIG-00000000-0000-0000-0000-000000000001"},
		},
		Conditions: []Condition{{
			PCIAddress: "0000:1b:00.0", Where: &gpu.Placement{Start: 0, Size: 1}, ProfileID: new(uint32(19)), Reason: Occupied,
		}},
	},
}

// goldenPolicies are offers that differ from the built-in one.
var goldenPolicies = map[string]struct {
	board string
	terms Terms
}{
	// With all variants of profiles.
	"h100-80-sxm-everything":  {"h100-80-sxm", everything},
	"rtx-pro-6000-everything": {"rtx-pro-6000", everything},
	// Seven partitions for four claims each, and nothing else.
	"a100-80-mig-policy": {"a100-80-mig", Terms{Policy: &policy.Policy{Default: policy.Offer{Partition: &policy.PartitionOffer{
		Profiles: []string{}, Shares: []policy.PartitionShares{{Profiles: []string{"1g.10gb"}, TimeSlice: timeSliceOf(4)}},
	}}}}},
	// More promised than there is, and limits for those that take turns.
	"h100-80-sxm-policy": {"h100-80-sxm", Terms{Limited: true, Policy: &policy.Policy{Default: policy.Offer{
		Whole: true, Partition: &policy.PartitionOffer{Profiles: []string{"7g.80gb"}},
		MPS:       &policy.MPSOffer{Clients: 8, MemoryOvercommit: 1.5, ComputeOvercommit: 2, ReservedMemoryBytes: gib},
		TimeSlice: &policy.TimeSliceOffer{Clients: 4, Interval: policy.IntervalShort, MemoryOvercommit: 1.25},
	}}}},
}

// example is the first board with slices of its kind.
type example struct{ board, documents string }

// sameKeys tells whether other documents have the same keys in the same lines.
func (e example) sameKeys(other string) bool {
	these, others := strings.Split(e.documents, "\n"), strings.Split(other, "\n")
	key := func(line string) string { before, _, _ := strings.Cut(line, ": "); return before }
	return len(these) == len(others) && slices.EqualFunc(these, others, func(a, b string) bool { return key(a) == key(b) })
}

// differences lists what stands in the lines of other documents with the same keys, each pair of lines once.
func (e example) differences(other string) string {
	others, seen := strings.Split(other, "\n"), map[string]bool{}
	out := "as " + e.board + ".yaml, but for:\n"
	for i, line := range strings.Split(e.documents, "\n") {
		_, value, _ := strings.Cut(others[i], ": ")
		if change := fmt.Sprintf("  %s -> %s\n", strings.TrimSpace(line), value); line != others[i] && !seen[change] {
			seen[change] = true
			out += change
		}
	}
	return out
}

// documents is a YAML stream, without depending on the order of map keys.
func documents(t *testing.T, objects []resourceapi.ResourceSlice) string {
	t.Helper()
	var out []string
	for _, object := range objects {
		data := must.Get(yaml.Marshal(object))(t)
		out = append(out, string(data))
	}
	return strings.Join(out, "---\n")
}

func digest(t *testing.T, objects []resourceapi.ResourceSlice) string {
	t.Helper()
	var out strings.Builder
	for _, object := range objects {
		fmt.Fprintf(&out, "- name: %s\n", object.Name)
		for _, set := range object.Spec.SharedCounters {
			fmt.Fprintf(&out, "  counterSet: %s, %d counters\n", set.Name, len(set.Counters))
		}
		if devices := object.Spec.Devices; len(devices) > 0 {
			fmt.Fprintf(&out, "  devices: %d, %s to %s\n", len(devices), devices[0].Name, devices[len(devices)-1].Name)
		}
	}
	fmt.Fprintf(&out, "sha256: %x\n", sha256.Sum256([]byte(documents(t, objects))))
	return out.String()
}

func compareGolden(t *testing.T, file, got string) {
	t.Helper()
	path := filepath.Join("testdata", file)
	got = goldenHeader + got
	if *update {
		must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Do(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (run the test with -update to write it)", err)
	}
	expect.Same(t, got, string(want), path+" (run the test with -update to accept)")
}
