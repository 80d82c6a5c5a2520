// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package workflows

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

const root = "../.."

// workflow is the part of one that is looked at.
type workflow struct {
	Permissions *map[string]string `json:"permissions"`
	Jobs        map[string]job     `json:"jobs"`
}

type job struct {
	TimeoutMinutes int               `json:"timeout-minutes"`
	Permissions    map[string]string `json:"permissions"`
	Strategy       struct {
		Matrix map[string]any `json:"matrix"`
	} `json:"strategy"`
	Steps []struct {
		Name string            `json:"name"`
		Uses string            `json:"uses"`
		Env  map[string]string `json:"env"`
		With map[string]any    `json:"with"`
		Run  string            `json:"run"`
	} `json:"steps"`
}

func read(t *testing.T) map[string]workflow {
	t.Helper()
	files, err := filepath.Glob(root + "/.github/workflows/*")
	if err != nil || len(files) < 3 {
		t.Fatalf("workflows %v, %v", files, err)
	}
	all := map[string]workflow{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var w workflow
		if err := yaml.Unmarshal(data, &w); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if len(w.Jobs) == 0 {
			t.Errorf("%s has no jobs", file)
		}
		all[filepath.Base(file)] = w
	}
	return all
}

var (
	pinned   = regexp.MustCompile(`^[A-Za-z0-9._/-]+@[0-9a-f]{40}$`)
	callMake = regexp.MustCompile(`(?m)(?:^|[ ;(])make ((?:[a-z"$][A-Za-z"$-]* ?)+)`)
	usesGo   = regexp.MustCompile(`(?m)(?:^|[ (])(?:go [a-z]|make setup)`)
	script   = regexp.MustCompile(`(?:^|[ =(])((?:deployments|test)/[a-z/]+)(?: |$)`)
	target   = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)
)

// mayWrite has the rights to write of workflows: of a release, of a proposal of base images, and of findings about the code.
var mayWrite = map[string][]string{
	"release.yaml":    {"packages", "id-token", "contents", "attestations"},
	"pin-images.yaml": {"contents", "pull-requests"},
	"codeql.yaml":     {"security-events"},
	"scorecard.yaml":  {"security-events", "id-token"},
}

// TestTrust: a workflow has no right that a job does not ask for, ends, runs actions that
// nobody can change, uses the Go of go.mod, and leaves no token behind.
func TestTrust(t *testing.T) {
	actions, jobs := 0, 0
	for file, w := range read(t) {
		if w.Permissions == nil || len(*w.Permissions) > 0 {
			t.Errorf("%s: the workflow has permissions; give them to jobs", file)
		}
		for name, j := range w.Jobs {
			jobs++
			if j.TimeoutMinutes == 0 {
				t.Errorf("%s: job %s has no timeout", file, name)
			}
			for right, access := range j.Permissions {
				if access != "read" && !slices.Contains(mayWrite[file], right) {
					t.Errorf("%s: job %s may %s %s", file, name, access, right)
				}
			}
			setUp := false
			for _, step := range j.Steps {
				setUp = setUp || strings.HasPrefix(step.Uses, "actions/setup-go@")
				if usesGo.MatchString(step.Run) && !setUp {
					t.Errorf("%s: %s: %s runs the Go of the runner", file, name, step.Name)
				}
				if step.Uses == "" {
					continue
				}
				actions++
				if !pinned.MatchString(step.Uses) {
					t.Errorf("%s: %s uses %s, want the hash of a commit", file, name, step.Uses)
				}
				if strings.HasPrefix(step.Uses, "actions/setup-go@") && step.With["go-version-file"] != "go.mod" {
					t.Errorf("%s: %s sets up another Go than that of go.mod", file, name)
				}
				if strings.HasPrefix(step.Uses, "actions/checkout@") && step.With["persist-credentials"] != false {
					t.Errorf("%s: %s keeps the token in the checkout", file, name)
				}
			}
		}
	}
	if jobs < 10 || actions < 15 {
		t.Errorf("%d jobs, %d actions", jobs, actions)
	}
}

// of returns the values that a matrix has for a key, with those of combinations that it includes.
func of(matrix map[string]any, key string) (values []string) {
	all, _ := matrix[key].([]any)
	included, _ := matrix["include"].([]any)
	for _, one := range included {
		if combination, ok := one.(map[string]any); ok && combination[key] != nil {
			all = append(all, combination[key])
		}
	}
	for _, one := range all {
		values = append(values, fmt.Sprint(one))
	}
	return values
}

// made returns the targets of make that a job calls, with those of its matrix.
func made(j job) (targets []string) {
	for _, step := range j.Steps {
		for _, call := range callMake.FindAllStringSubmatch(step.Run, -1) {
			for _, word := range strings.Fields(call[1]) {
				name := strings.Trim(word, `"$`)
				if value, isVariable := step.Env[name]; isVariable {
					key := strings.TrimSuffix(strings.TrimPrefix(value, "${{ matrix."), " }}")
					for _, one := range of(j.Strategy.Matrix, key) {
						targets = append(targets, strings.Fields(one)...)
					}
					continue
				}
				targets = append(targets, name)
			}
		}
	}
	return targets
}

// TestTargets: every target that a workflow calls exists, and so does every script; changes are
// tested by all that make test consists of, and make lint.
func TestTargets(t *testing.T) {
	makefile, err := os.ReadFile(root + "/Makefile")
	if err != nil {
		t.Fatal(err)
	}
	targets, scripts := 0, 0
	for file, w := range read(t) {
		for name, j := range w.Jobs {
			for _, one := range made(j) {
				targets++
				if !target.MatchString(one) || !strings.Contains(string(makefile), "\n"+one+":") {
					t.Errorf("%s: job %s makes %q, which is no target", file, name, one)
				}
			}
			for _, step := range j.Steps {
				for _, found := range script.FindAllStringSubmatch(step.Run, -1) {
					scripts++
					if _, err := os.Stat(filepath.Join(root, found[1])); err != nil {
						t.Errorf("%s: job %s names %v", file, name, err)
					}
				}
			}
		}
	}
	if targets < 15 || scripts < 4 {
		t.Errorf("%d targets, %d scripts", targets, scripts)
	}

	tested := made(read(t)["ci.yaml"].Jobs["make"])
	all := regexp.MustCompile(`(?m)^test: ([a-z -]*)`).FindSubmatch(makefile)
	if all == nil {
		t.Fatal("the Makefile has no target test")
	}
	for _, one := range append(strings.Fields(string(all[1])), "lint") {
		if one != "root" && one != "begin" && !slices.Contains(tested, one) {
			t.Errorf("ci.yaml does not make %s", one)
		}
	}
}
