// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/device"
)

// Names that sentences use: the reference has them all, and tests of the packages compare it with the code.
var (
	code        = regexp.MustCompile("`([^`]+)`")
	oneOrMore   = "((?:`[^`]+`(?:, | and | or )?)+)"
	saidEvent   = regexp.MustCompile(`\b[Ee]vents? ` + oneOrMore)
	saidTaint   = regexp.MustCompile(`\b[Tt]aints? ` + oneOrMore)
	eventWord   = regexp.MustCompile(`^[A-Z][A-Za-z]+$`)
	taintWord   = regexp.MustCompile(`^[a-z]+(-[a-z]+)*$`)
	fullTaint   = regexp.MustCompile(`(?:^|[^/\w.])gpu\.nvidia\.com/([a-z]+(?:-[a-z]+)*)\b`)
	alertName   = regexp.MustCompile(`\bPartage[A-Z][A-Za-z]+\b`)
	metricName  = regexp.MustCompile(`\bpartage_[a-z0-9_]*[a-z0-9]\b`)
	partageName = regexp.MustCompile(`\b[a-z-]+\.partage\.dev\b`)
	flagName    = regexp.MustCompile("`--([a-z][a-z-]+)")
	histogram   = regexp.MustCompile(`_(bucket|sum|count)$`)
	fromVersion = regexp.MustCompile(`\b(1\.3[6-9])\.(\d+)( or later| and later| on\b| for (?:all|everything))`)
)

// eventsOfOthers are those of Kubernetes itself.
var eventsOfOthers = []string{"DeviceTaintManagerEviction", "Failed", "FailedScheduling", "FailedPrepareDynamicResources", "FailedResourceClaimCreation", "Unhealthy"}

// flagsOfOthers are those of other programs that pages name: helm, Kubernetes' own, vLLM, autoscalers, and test/hardware/run.
var flagsOfOthers = strings.Fields(`
	api-versions no-hooks reset-then-reuse-values reuse-values set values version wait
	quota-backend-bytes root-dir runtime-config enable-dynamic-resource-allocation
	gpu-memory-utilization kv-cache-memory-bytes tensor-parallel-size ignore-dra-requests kubernetes-enable-dra kubernetes-virtual-gpus
	budget out read-only`)

// partageNames are the chart's classes, what those of extended resources end in, and the groups of the objects.
var partageNames = append([]string{"kubectl.partage.dev", "policy.partage.dev", "status.partage.dev", "demo.partage.dev", "resource.partage.dev"}, classes...)

// vocabulary is what the reference lists.
type vocabulary struct{ events, taints, attributes, metrics, alerts, flags map[string]bool }

func readVocabulary(t *testing.T) vocabulary {
	t.Helper()
	all := rawPages(t)
	rules, err := os.ReadFile(filepath.Join(root, "deployments/helm/partage/rules/partage.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	v := vocabulary{
		events:     firstColumn(all["docs/reference/events.md"], `([A-Z][A-Za-z]+)`),
		taints:     firstColumn(all["docs/reference/taints.md"], `(?:gpu\.nvidia\.com|…)/([a-z-]+)`),
		attributes: firstColumn(all["docs/reference/devices.md"], `([a-z][A-Za-z]+)`),
		metrics:    firstColumn(all["docs/reference/metrics.md"], `(partage_\w+)`),
		alerts:     map[string]bool{},
		flags:      map[string]bool{},
	}
	for _, found := range flagName.FindAllStringSubmatch(all["docs/reference/cli.md"], -1) {
		v.flags[found[1]] = true
	}
	for _, found := range regexp.MustCompile(`(?m)^ *- alert: (\w+)$`).FindAllStringSubmatch(string(rules), -1) {
		v.alerts[found[1]] = true
	}
	for name, has := range map[string]int{"events": len(v.events), "taints": len(v.taints), "metrics": len(v.metrics), "alerts": len(v.alerts)} {
		if has < 15 {
			t.Errorf("only %d %s in the reference", has, name)
		}
	}
	return v
}

// firstColumn are the names in the first column of a page's tables.
func firstColumn(page, name string) map[string]bool {
	names, pattern := map[string]bool{}, regexp.MustCompile("`"+name+"`")
	for line := range strings.Lines(page) {
		cells := strings.Split(line, "|")
		if len(cells) < 3 || cells[0] != "" {
			continue
		}
		for _, found := range pattern.FindAllStringSubmatch(cells[1], -1) {
			names[found[1]] = true
		}
	}
	return names
}

// unknown returns the names that a page has and the reference does not, and how many it has in all.
func (v vocabulary) unknown(page string) (wrong []string, names int) {
	expect := func(kind, name string, known bool) {
		if names++; !known {
			wrong = append(wrong, kind+" "+name)
		}
	}
	for _, name := range alertName.FindAllString(page, -1) {
		expect("alert", name, v.alerts[name])
	}
	for _, name := range metricName.FindAllString(page, -1) {
		known := v.metrics[name] || v.metrics[histogram.ReplaceAllString(name, "")]
		// partage_claim_… stands for several.
		expect("metric", name, known || strings.Contains(page, name+"_…"))
	}
	for _, name := range partageName.FindAllString(page, -1) {
		expect("class or group", name, slices.Contains(partageNames, name) || ownClass.MatchString(name))
	}
	for _, found := range flagName.FindAllStringSubmatch(page, -1) {
		expect("flag", "--"+found[1], v.flags[found[1]] || slices.Contains(flagsOfOthers, found[1]))
	}
	for _, name := range said(page, saidEvent, eventWord, "event") {
		expect("event", name, v.events[name] || slices.Contains(eventsOfOthers, name))
	}
	for _, name := range said(page, saidTaint, taintWord, "taint") {
		expect("taint", name, v.taints[name])
	}
	for _, found := range fullTaint.FindAllStringSubmatch(page, -1) {
		if isAttribute := regexp.MustCompile(regexp.QuoteMeta(found[0]) + `[A-Z]`); isAttribute.MatchString(page) {
			continue
		}
		expect("taint or attribute", found[1], v.taints[found[1]] || v.attributes[found[1]])
	}
	return wrong, names
}

// said are the names of a kind, in sentences and in the first column of tables that are headed by it.
func said(page string, sentence, word *regexp.Regexp, header string) []string {
	var names []string
	add := func(text string) {
		for _, found := range code.FindAllStringSubmatch(text, -1) {
			if word.MatchString(found[1]) {
				names = append(names, found[1])
			}
		}
	}
	for _, found := range sentence.FindAllStringSubmatch(strings.Join(strings.Fields(page), " "), -1) {
		add(found[1])
	}
	inTable, isHeaded := false, false
	for line := range strings.Lines(page) {
		cells := strings.Split(line, "|")
		isRow := len(cells) > 2 && cells[0] == ""
		if isRow && !inTable {
			first, _, _ := strings.Cut(strings.TrimSpace(cells[1]), " ")
			isHeaded = first == header
		}
		if inTable = isRow; isRow && isHeaded {
			first, _, _ := strings.Cut(cells[1], ",")
			add(first)
		}
	}
	return names
}

// TestNamesInProse: events, taints, metrics, alerts and classes that pages name are in the reference.
func TestNamesInProse(t *testing.T) {
	v, names := readVocabulary(t), 0
	for path, page := range rawPages(t) {
		if path == "CHANGELOG.md" || strings.HasPrefix(path, "test/") {
			continue // the one also names what is gone, the others what only tests have
		}
		wrong, n := v.unknown(page)
		names += n
		for _, name := range wrong {
			t.Errorf("%s: there is no %s", path, name)
		}
	}
	if t.Logf("%d cases", names); names < 500 {
		t.Errorf("only %d names", names)
	}
}

func TestBrokenNamesInProse(t *testing.T) {
	v := readVocabulary(t)
	for text, want := range map[string]string{
		"The event `GPULost` of a node.":                                         "",
		"The event `GPUGone` of a node.":                                         "event GPUGone",
		"Events `GPULost`, `GPUGone`":                                            "event GPUGone",
		"the\nevent `GPUGone`":                                                   "event GPUGone",
		"| event | what |\n|---|---|\n| `GPUGone` | it |\n":                      "event GPUGone",
		"| taint | what |\n|---|---|\n| `gpu-gone` | it |\n":                     "taint gpu-gone",
		"The taint `gpu-gone`.":                                                  "taint gpu-gone",
		"The taint `gpu.nvidia.com/gpu-gone`.":                                   "taint or attribute gpu-gone",
		"The taint `gpu-lost`, or `gpu.nvidia.com/gpu-lost`.":                    "",
		"matchAttribute: gpu.nvidia.com/productName":                             "",
		"in `/var/lib/kubelet/plugins/gpu.nvidia.com/hooks`":                     "",
		"The alert `PartageGPUGone`":                                             "alert PartageGPUGone",
		"`partage_claim_idle_secs` says it":                                      "metric partage_claim_idle_secs",
		"`partage_claim_…` and `partage_claim_step_duration_seconds_bucket`":     "",
		"class `mps.partage.io`, and `mps.partage.dev`, and `team.example.com`":  "",
		"with `--quantised`":                                                     "flag --quantised",
		"with `--quantized`, `--output wide` and `--reuse-values`":               "",
		"class `mpss.partage.dev`":                                               "class or group mpss.partage.dev",
		"`FailedPrepareDynamicResources` and the event `FailedScheduling` of it": "",
	} {
		wrong, _ := v.unknown(text)
		if got := strings.Join(wrong, "; "); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestTaintsOfTroubleshooting: whoever sees a taint finds where to go on.
func TestTaintsOfTroubleshooting(t *testing.T) {
	v := readVocabulary(t)
	_, rest, _ := strings.Cut(rawPages(t)["docs/how-to/troubleshoot.md"], "\n## Taints\n")
	section, _, _ := strings.Cut(rest, "\n## ")
	listed := firstColumn(section, `([a-z-]+)`)
	for name := range v.taints {
		if !listed[name] {
			t.Errorf("docs/how-to/troubleshoot.md: the table of taints lacks %s", name)
		}
	}
}

// withoutRemedy is what needs none.
var withoutRemedy = regexp.MustCompile(`^(nothing|tolerate it|delete the pod$|restart processes)`)

// TestRemedies: each event and each taint has a link to what to do, unless that is nothing or said in full.
func TestRemedies(t *testing.T) {
	rows := 0
	for _, path := range []string{"docs/reference/events.md", "docs/reference/taints.md"} {
		for line := range strings.Lines(rawPages(t)[path]) {
			cells := strings.Split(strings.TrimSpace(line), "|")
			if len(cells) < 6 || !strings.HasPrefix(cells[1], " `") {
				continue
			}
			rows++
			if remedy := strings.TrimSpace(cells[len(cells)-2]); !withoutRemedy.MatchString(remedy) && !link.MatchString(remedy) {
				t.Errorf("%s:%sneeds a link to what to do: %s", path, cells[1], remedy)
			}
		}
	}
	if t.Logf("%d cases", rows); rows < 55 {
		t.Errorf("only %d rows", rows)
	}
}

// wrongDefault returns what is wrong with a row of a table of values: the first code of its second
// cell is a default.
func wrongDefault(values map[string]any, row string) (checked bool, wrong error) {
	cells := strings.Split(row, "|")
	if len(cells) < 4 {
		return false, nil
	}
	names, said := code.FindAllStringSubmatch(cells[1], -1), code.FindStringSubmatch(cells[2])
	if len(names) != 1 || said == nil || !strings.HasPrefix(strings.TrimSpace(cells[2]), "`") {
		return false, nil
	}
	var value any = values
	for key := range strings.SplitSeq(names[0][1], ".") {
		section, isSection := value.(map[string]any)
		if !isSection || section[key] == nil {
			return true, fmt.Errorf("the chart has no value %s", names[0][1])
		}
		value = section[key]
	}
	if got := fmt.Sprint(value); got != said[1] {
		return true, fmt.Errorf("the default of %s is %s, not %s", names[0][1], got, said[1])
	}
	return true, nil
}

// TestDefaultsInProse: tables of values, other than the generated one, have the chart's defaults.
func TestDefaultsInProse(t *testing.T) {
	values, rows := chartValues(t), 0
	for path, page := range rawPages(t) {
		inTable := false
		for line := range strings.Lines(page) {
			switch {
			case strings.HasPrefix(line, "| value | default |"):
				inTable = true
			case !strings.HasPrefix(line, "|"):
				inTable = false
			case inTable:
				checked, wrong := wrongDefault(values, line)
				if wrong != nil {
					t.Errorf("%s: %v", path, wrong)
				}
				if checked {
					rows++
				}
			}
		}
	}
	if t.Logf("%d cases", rows); rows < 12 {
		t.Errorf("only %d defaults", rows)
	}
	for row, want := range map[string]bool{
		"| `kubeletPlugin.maxSurge` | `10%` | x |": true, "| `kubeletPlugin.maxSurge` | `20%` | x |": false,
		"| `configPolicy.create` | `true` | x |": true, "| `configPolicy.created` | `true` | x |": false, "| `sharingPolicy` | all | x |": true,
	} {
		if _, wrong := wrongDefault(values, row); (wrong == nil) != want {
			t.Errorf("%s: %v", row, wrong)
		}
	}
}

// isFirstForAll reports whether everything works with the scheduler of a version, and did not with the one before.
func isFirstForAll(t *testing.T, minor string, patch int) bool {
	t.Helper()
	forgets := func(patch int) bool {
		faults, err := device.FaultsOfScheduler(fmt.Sprintf("v%s.%d", minor, patch))
		if err != nil {
			t.Fatal(err)
		}
		return faults.ForgetsShares
	}
	return !forgets(patch) && patch > 0 && forgets(patch-1)
}

// TestVersionForAll: where pages name a patch of Kubernetes from which on something works, it is the one
// whose scheduler is without faults.
func TestVersionForAll(t *testing.T) {
	found := 0
	for path, page := range pages(t) {
		if path == "CHANGELOG.md" {
			continue
		}
		for _, version := range fromVersion.FindAllStringSubmatch(page, -1) {
			patch, err := strconv.Atoi(version[2])
			if err != nil {
				t.Fatal(err)
			}
			if found++; !isFirstForAll(t, version[1], patch) {
				t.Errorf("%s: %s: not the first version whose scheduler is without faults", path, version[0])
			}
		}
	}
	if t.Logf("%d cases", found); found < 10 {
		t.Errorf("only %d versions", found)
	}
	for patch, want := range map[int]bool{1: false, 2: true, 3: false} {
		if isFirstForAll(t, "1.36", patch) != want {
			t.Errorf("1.36.%d: want %v", patch, want)
		}
	}
}
