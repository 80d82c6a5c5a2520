// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"debug/elf"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// uncalled is an exported method of a type that every program here has, which nothing calls.
const uncalled = "net.IP.IsInterfaceLocalMulticast"

// TestLinkedMethods checks that the linker leaves out methods that nothing calls. It keeps them all
// as soon as a single function may call any method by a name that is made at run time: the driver
// is then half as large again, and so is what it has in memory.
//
// text/template is such a function, with whatever uses it. The output of go build
// -ldflags=-dumpdep says who does.
func TestLinkedMethods(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]string{
		"../../../Makefile":                         "GO_TAGS := " + harness.BuildTags + "\n",
		"../../../deployments/container/Dockerfile": " tags=" + harness.BuildTags + " ",
	} {
		if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: no %q, %v: what is released is not what is tested", file, want, err)
		}
	}
	for _, path := range []string{harness.Built.Driver, harness.Built.Supervisor} {
		file, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		symbols, err := file.Symbols()
		if err := file.Close(); err != nil {
			t.Error(err)
		}
		has := func(name string) bool {
			return slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == name })
		}
		if err != nil || !has("main.main") || !has("net.IP.String") {
			t.Fatalf("%s has %d symbols, %v: nothing is tested", path, len(symbols), err)
		}
		if has(uncalled) {
			t.Errorf("%s contains %s, which nothing calls; text/template is linked: %t", path, uncalled, has("text/template.(*state).evalField"))
		}
	}
}
