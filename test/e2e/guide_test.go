//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// guide is a page whose commands a test runs, so that the page cannot say anything else than what works. Before each block of
// commands stands a comment: <!-- test: NAME --> or <!-- not tested: REASON -->.
type guide struct {
	page   string
	dir    string // where the commands run
	blocks map[string]string
	ran    map[string]bool
	names  *strings.Replacer
}

var guideBlock = regexp.MustCompile("(?ms)^(?:<!-- (test|not tested): ([^\n]*) -->\n)?```sh\n(.*?)^```$")

// openGuide reads a page. What the commands name and the test has elsewhere is replaced: old, new and so on. When the test ends well,
// all blocks must have run.
func openGuide(t *testing.T, page, dir string, replaced ...string) *guide {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(repoRoot, page))
	if err != nil {
		t.Fatal(err)
	}
	g := &guide{page: page, dir: dir, blocks: map[string]string{}, ran: map[string]bool{}, names: strings.NewReplacer(replaced...)}
	for _, found := range guideBlock.FindAllStringSubmatch(string(content), -1) {
		kind, name, commands := found[1], found[2], found[3]
		switch {
		case kind == "":
			t.Fatalf("%s: no comment says whether these commands are tested:\n%s", page, commands)
		case kind == "test" && g.blocks[name] != "":
			t.Fatalf("%s: two blocks are named %s", page, name)
		case kind == "test":
			g.blocks[name] = commands
		}
	}
	t.Cleanup(func() {
		for name := range g.blocks {
			if !g.ran[name] && !t.Failed() {
				t.Errorf("%s: the commands of %s were not run", page, name)
			}
		}
		t.Logf("%s: %d cases of commands", page, len(g.ran))
	})
	return g
}

// run runs the blocks of these names, one after the other, with variables of the environment, and returns what they print.
func (g *guide) run(t *testing.T, env []string, names ...string) string {
	t.Helper()
	var all strings.Builder
	for _, name := range names {
		commands, ok := g.blocks[name]
		if !ok {
			t.Fatalf("%s has no commands named %s", g.page, name)
		}
		g.ran[name] = true
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
		cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", g.names.Replace(commands))
		cmd.Dir, cmd.Env = g.dir, slices.Concat(os.Environ(), env)
		out, err := cmd.CombinedOutput()
		cancel()
		if err != nil {
			t.Fatalf("%s, %s: %v\n%s\n%s", g.page, name, err, commands, out)
		}
		t.Logf("%s, %s: %v", g.page, name, time.Since(start).Round(time.Millisecond))
		all.Write(out)
	}
	return all.String()
}

// onNodeNamed is the environment of commands about one node.
func onNodeNamed(node string) []string { return []string{"NODE=" + node} }
