// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/docs/snippet"
)

// repository is what commands can name.
type repository struct {
	makefiles, tests string
	values           map[string]any
	// cluster has the sub-commands of bin/cluster, flags those of all of them.
	cluster, flags map[string]bool
}

func readRepository(t *testing.T) repository {
	t.Helper()
	var makefiles, tests strings.Builder
	files(t, "Makefile", func(_, content string) { makefiles.WriteString("\n" + content) })
	files(t, "_test.go", func(_, content string) { tests.WriteString("\n" + content) })
	r := repository{makefiles: makefiles.String(), tests: tests.String(), values: chartValues(t)}
	r.cluster, r.flags = clusterWords(t)
	return r
}

// check returns what is wrong with a command. Those of kubectl gpu and of the driver are
// compared with their definitions by tests of these programs.
func (r repository) check(c snippet.Command) []string {
	wrong := missingFiles(c)
	switch c.Program() {
	case "make":
		wrong = append(wrong, r.checkMake(c.Args[1:])...)
	case "go":
		wrong = append(wrong, r.checkTests(c.Args[1:])...)
	case "cluster":
		wrong = append(wrong, r.checkCluster(c.Args[1:])...)
	case "kubectl":
		wrong = append(wrong, checkKubectl(c.Args[1:])...)
	case "helm":
		wrong = append(wrong, r.checkHelm(c.Args[1:])...)
	}
	return wrong
}

func (r repository) checkMake(args []string) []string {
	var wrong []string
	for _, arg := range args {
		name, value, isVariable := strings.Cut(arg, "=")
		switch {
		case strings.HasPrefix(arg, "-"):
		case isVariable && name == "RUN":
			wrong = append(wrong, r.checkTests([]string{value})...)
		case isVariable:
			if !strings.Contains(r.makefiles, "$("+name+")") {
				wrong = append(wrong, "no Makefile uses "+name)
			}
		case !strings.Contains(r.makefiles, "\n"+arg+":"):
			wrong = append(wrong, "no Makefile has the target "+arg)
		}
	}
	return wrong
}

var nameOfTest = regexp.MustCompile(`\bTest[A-Z]\w*`)

// checkTests: tests that arguments name exist. A name may be the beginning of one.
func (r repository) checkTests(args []string) []string {
	var wrong []string
	for _, arg := range args {
		for _, name := range nameOfTest.FindAllString(arg, -1) {
			if !strings.Contains(r.tests, "\nfunc "+name) {
				wrong = append(wrong, "there is no test "+name)
			}
		}
	}
	return wrong
}

// checkCluster: sub-commands and flags of bin/cluster exist.
func (r repository) checkCluster(args []string) []string {
	var wrong []string
	command := ""
	for i := 0; i < len(args); i++ {
		name, _, hasValue := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		switch {
		case strings.HasPrefix(args[i], "-"):
			if !r.flags[name] {
				wrong = append(wrong, "bin/cluster has no flag --"+name)
			}
			if !hasValue {
				i++ // what follows is its value
			}
		case command == "":
			if command = args[i]; !r.cluster[command] {
				wrong = append(wrong, "bin/cluster has no command "+command)
			}
		}
	}
	return wrong
}

// built are files that are made, and not in the repository.
var built = regexp.MustCompile(`^(bin|_output)/|/base-images$`)

// missingFiles returns the paths in a command that begin like those of the repository, from its
// root or from the folder of the page, and do not exist.
func missingFiles(c snippet.Command) []string {
	var wrong []string
	for i, arg := range c.Args {
		if _, value, is := strings.Cut(arg, "="); is {
			arg = value
		}
		path := strings.TrimSuffix(strings.TrimPrefix(arg, "./"), "/...")
		first, _, isPath := strings.Cut(path, "/")
		isOurs := strings.HasPrefix(arg, "./") || slices.Contains(folders, first)
		if !isPath && !strings.HasPrefix(arg, "./") || !isOurs || strings.ContainsAny(path, ":* ") || built.MatchString(path) {
			continue
		}
		if exists(path) || exists(filepath.Join(filepath.Dir(c.Page), path)) {
			continue
		}
		wrong = append(wrong, fmt.Sprintf("argument %d: there is no %s", i, path))
	}
	return wrong
}

// folders are those at the root of the repository.
var folders = []string{"cmd", "demo", "deployments", "docs", "pkg", "templates", "test", ".github"}

func exists(path string) bool {
	_, err := os.Stat(filepath.Join(root, path))
	return err == nil
}

// programs are those whose commands are also looked at where they stand in a sentence.
var programs = []string{"make", "kubectl", "helm", "bin/cluster", "go"}

// TestCommands: what commands of the pages name exists: targets, tests, sub-commands, flags, kinds
// of objects, values of the chart, and files.
func TestCommands(t *testing.T) {
	r := readRepository(t)
	seen := map[string]int{}
	for path, page := range rawPages(t) {
		if path == "CHANGELOG.md" {
			continue // it also names what is gone
		}
		commands, err := snippet.Commands(path, page, programs...)
		if err != nil {
			t.Error(err)
		}
		for _, c := range commands {
			seen[c.Program()]++
			for _, wrong := range r.check(c) {
				t.Errorf("%v: %s", c, wrong)
			}
		}
	}
	all := 0
	for _, n := range seen {
		all += n
	}
	t.Logf("%d cases", all)
	for program, least := range map[string]int{"make": 40, "kubectl": 100, "helm": 8, "cluster": 15, "go": 10} {
		if seen[program] < least {
			t.Errorf("only %d commands of %s", seen[program], program)
		}
	}
}

// TestBrokenCommands: a page with a wrong command fails.
func TestBrokenCommands(t *testing.T) {
	r := readRepository(t)
	for text, want := range map[string]string{
		"make demo": "",
		"sudo env \"PATH=$PATH\" make test-one PKG=./pkg/device RUN=TestGolden": "",
		"make demmo":                                                                         "no Makefile has the target demmo",
		"make test-one PACKAGE=./pkg":                                                        "no Makefile uses PACKAGE",
		"make test-one PKG=./pkg/dvice":                                                      "there is no pkg/dvice",
		"make test-one RUN=TestNothingLike":                                                  "there is no test TestNothingLike",
		"go test ./pkg/device -run TestNothingLike":                                          "there is no test TestNothingLike",
		"kubectl get pods -A --output wide":                                                  "",
		"kubectl get podz":                                                                   "podz is no kind",
		"kubectl gett pods":                                                                  "kubectl has no command gett",
		"kubectl get pods --no-such-flag":                                                    "unknown flag: --no-such-flag",
		"kubectl apply -f demo/nothing/demo.yaml":                                            "there is no demo/nothing/demo.yaml",
		"kubectl apply -f demo/whole-gpu/demo.yaml":                                          "",
		"helm install partage deployments/helm/partage --set image.tag=dev":                  "",
		"helm install partage deployments/helm/partage --set image.tga=dev":                  "the chart has no value image.tga",
		"helm upgrade partage deployments/helm/partage --set a.b=1,image.tag=x":              "the chart has no value a.b",
		"helm upgrade partage deployments/helm/partage --set kubeletPlugin.nodeLabels=Yes":   "the chart refuses these values",
		"helm upgrade partage deployments/helm/partage --set kubeletPlugin.nodeLabels=Write": "",
		"helm upgrade partage deployments/helm/partage --set mpsSupervisor.enabled=no-way":   "the chart refuses these values",
		"helm upgrade partage deployments/helm/partage --set-string image.tag=1":             "",
		"helm upgrade partage deployments/helm/partage --valuess my-values.yaml":             "unknown flag: --valuess",
		"helm remove partage":                                                                "helm has no command remove",
		"bin/cluster up --machine dgx-h100 --kubernetes 1.36":                                "",
		"bin/cluster upp":                                                                    "bin/cluster has no command upp",
		"bin/cluster up --machines dgx-h100":                                                 "bin/cluster has no flag --machines",
		"bin/cluster run -- kubectl gett":                                                    "kubectl has no command gett",
		"kubectl get pods | kubectl gett":                                                    "kubectl has no command gett",
	} {
		commands, err := snippet.Commands("docs/page.md", "text\n\n```sh\n"+text+"\n```\n")
		if err != nil || len(commands) == 0 {
			t.Fatalf("%s: %d commands, %v", text, len(commands), err)
		}
		var wrong []string
		for _, c := range commands {
			wrong = append(wrong, r.check(c)...)
		}
		if got := strings.Join(wrong, "; "); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}
