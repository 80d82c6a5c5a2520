// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// mutants are rules that are broken one at a time, each in a file, and a scenario whose states show it.
var mutants = []struct{ name, file, rule, broken, scenario string }{
	{"a taint that keeps pods away is written at once", "taints.go", "s.grade = urgent", "s.informs = true", "sources appear and vanish"},
	{"one that comes back again and again stays for some time", "memory.go", "_, again := m.ended[k.taintKey]", "again := false", "a flapping fault"},
	{"one that only informs waits", "taints.go", "if d.due(after) && d.due(d.m.last(s.want.Name).informed+d.m.p.InformOnce) {", "if after >= Never {", "a thermal storm"},
	{"the rules say when they have to be asked again", "decide.go", "d.next = min(d.next, at)", "_ = at", "sources appear and vanish"},
	{"no slice of devices completes a pool when it is created", "generation.go", "lacksDevices && !lacksCounters &&", "lacksDevices && !lacksCounters && false &&", "an older server drops counters"},
	{"counters change together with devices in a new generation", "generation.go", "complete && counters && changed > 1", "complete && false && changed > 1", "the policy changes counters"},
	{"a pool with another number of slices has another generation", "decide.go", "ResourceSliceCount: int64(len(d.slots))}", "ResourceSliceCount: int64(max(3, len(d.slots)))}", "a thermal storm"},
	{"repairs slow down", "memory.go", "m.repairDelay = min(max(m.p.Repair, 2*m.repairDelay), m.p.RepairMost)", "m.repairDelay = 0", "somebody fights"},
	{"registration ends the round of repairs", "memory.go", "m.unread, m.repairDelay, m.repairAt, m.retryAt = true, 0, Never, Never", "m.unread, m.retryAt = true, Never", "kubelet restarts"},
	{"registration has the slices read", "memory.go", "m.unread, m.repairDelay, m.repairAt, m.retryAt = true, 0, Never, Never", "m.repairDelay, m.repairAt, m.retryAt = 0, Never, Never", "kubelet restarts"},
	{"only what is stored is published", "decide.go", "plan.Published = plan.Missing+plan.Wrong == 0", "plan.Published = true", "the API server is away or refuses"},
	{"the owner is compared", "decide.go", "!apiequality.Semantic.DeepEqual(s.have.OwnerReferences, want.OwnerReferences)", "false", "the node leaves and comes back"},
	{"a failure does not delay what is new", "decide.go", "return s.grade >= least && s.news > d.m.triedAt })", "return s.grade >= least && s.news > Forever })", "the API server is away or refuses"},
	{"a taint stays as long as somebody says it", "taints.go", "if find(kept, t.Key).Key == \"\" {", "if find(kept, t.Key).Key == \"\" && was.Key == \"\" {", "sources appear and vanish"},
	{"what is not wanted any more makes room", "taints.go", "kept[:min(len(kept), max(0, d.MaxTaints-len(taints)))]...", "kept...", "an API server takes one taint of a device"},
	{"slices that should not be there are deleted", "decide.go", "case mayRepair && (len(d.strays) > 0 || d.nextOfPool() != nil):", "case mayRepair && d.nextOfPool() != nil:", "others rewrite"},
}

// TestMutants breaks one rule after the other: the model finds each.
func TestMutants(t *testing.T) {
	e := harness.Enumerate(t, "broken rules of publishing", len(mutants))
	for _, m := range harness.Choose(e, mutants) {
		t.Run(m.name, func(t *testing.T) {
			e.Ran("mutant")
			original, err := filepath.Abs(m.file)
			if err != nil {
				t.Fatal(err)
			}
			source, err := os.ReadFile(original)
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(string(source), m.rule); n != 1 {
				t.Fatalf("the rule is %d times in %s", n, m.file)
			}
			dir := t.TempDir()
			mutated, overlay := filepath.Join(dir, m.file), filepath.Join(dir, "overlay.json")
			replace, err := json.Marshal(map[string]any{"Replace": map[string]string{original: mutated}})
			if err != nil {
				t.Fatal(err)
			}
			for path, data := range map[string][]byte{mutated: []byte(strings.Replace(string(source), m.rule, m.broken, 1)), overlay: replace} {
				if err := os.WriteFile(path, data, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			scenario := "^TestModel$/^" + strings.ReplaceAll(m.scenario, " ", "_") + "$"
			output, err := exec.CommandContext(t.Context(), "go", "test", "-overlay", overlay, "-vet=off", "-run", scenario, ".", "-args", "-model.states=2500").CombinedOutput()
			if err == nil || !strings.Contains(string(output), "broken: ") {
				t.Errorf("nothing was found: %v\n%s", err, output)
			}
		})
	}
}
