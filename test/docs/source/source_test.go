// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package source

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const code = `package thing

// Kind is a kind.
type Kind string

const (
	// One is
	// the first.
	One Kind = "one"
	Two Kind = "two"
)

// Other is none.
const Other = "other"

// Thing is a thing.
type Thing struct {
	meta.Type
	// name is the name of a Thing.
	Name *Kind ` + "`json:\"name\"`" + `
	Limits map[string]Kind ` + "`json:\"limits,omitempty\"`" + `
}

var all = []Kind{One, Two}

var byName = map[string]Kind{"1": One, Other: Two}
`

func TestRead(t *testing.T) {
	folder := t.TempDir()
	for name, content := range map[string]string{"a.go": code, "a_test.go": "not Go", "b.txt": "not Go"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	files := Files(t, folder)
	for _, diff := range []string{
		cmp.Diff([]Constant{{"One", "one", "One is the first."}, {"Two", "two", ""}}, Constants(files, "Kind")),
		cmp.Diff([]Constant{{"Other", "other", "Other is none."}}, Constants(files, "")),
		cmp.Diff([]string{"One", "Two"}, Names(files, "all")),
		cmp.Diff([]string{"One", "Two"}, Names(files, "byName")),
		cmp.Diff([]Field{
			{Type: "Type"},
			{Name: "name", Type: "*Kind", Doc: "name is the name of a Thing."},
			{Name: "limits", Optional: true, Type: "map[string]Kind"},
		}, Fields(t, files, "Thing")),
	} {
		if diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}
