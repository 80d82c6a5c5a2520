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
	{"a taint that keeps pods away is written at once", "taints.go", "s.grade = urgent", "s.tells = true", "sources appear and vanish"},
	{"one that comes back again and again stays for some time", "memory.go", "f.hold = min(max(p.Hold, 2*f.hold), p.HoldMost)", "f.hold = 0", "a flapping fault"},
	{"one that only tells something waits", "taints.go", "d.due(since+d.p.TellLatest) && d.due(d.m.told(s.want.Name)+d.p.TellOnce)", "since > Never", "a thermal storm"},
	{"the rules say when they have to be asked again", "decide.go", "if d.next == Never || at < d.next {", "if d.next == Never && false {", "sources appear and vanish"},
	{"no slice of devices completes a pool when it is created", "generation.go", "p.hasCounters && p.lacksDevices && !p.lacksCounters &&", "false &&", "an older server drops counters"},
	{"counters change together with devices in a new generation", "generation.go", "p.present == len(d.slots) && p.counters && p.changed > 1", "false", "the policy changes counters"},
	{"a pool with another number of slices has another generation", "decide.go", "ResourceSliceCount: int64(len(d.slots))}", "ResourceSliceCount: int64(max(3, len(d.slots)))}", "a thermal storm"},
	{"repairs slow down", "memory.go", "m.repairDelay = min(max(p.Repair, 2*m.repairDelay), p.RepairMost)", "m.repairDelay = 0", "somebody fights"},
	{"registration ends the round of repairs", "memory.go", "m.repairing, m.repaired, m.repairDelay, m.repairAt = false, false, 0, Never\n", "\n", "kubelet restarts"},
	{"registration has the slices read", "memory.go", "m.doubt, m.listAt, m.retryAt = true, now, Never\n", "\n", "kubelet restarts"},
	{"only what is stored is published", "decide.go", "plan.Published = plan.Missing+plan.Wrong == 0", "plan.Published = true", "the API server is away or refuses"},
	{"the owner is compared", "decide.go", "!apiequality.Semantic.DeepEqual(s.have.OwnerReferences, d.object(s).OwnerReferences)", "false", "the node leaves and comes back"},
	{"a failure does not delay what is new", "decide.go", "if d.isNews(urgent) || d.due(d.m.retryAt) {", "if d.due(d.m.retryAt) {", "the API server is away or refuses"},
	{"a taint stays as long as somebody says it", "taints.go", "for _, t := range wanted {\n\t\tif find(", "for _, t := range wanted[:0] {\n\t\tif find(", "sources appear and vanish"},
	{"slices that should not be there are deleted", "decide.go", "if len(d.strays) > 0 && mayRepair {", "if false {", "others rewrite"},
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
