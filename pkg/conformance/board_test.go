// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/gpusim/catalog"
)

var update = flag.Bool("update", false, "rewrite the golden files, and boards.json")

// TestBoards: the program has what the simulator's catalogue says of each board.
func TestBoards(t *testing.T) {
	want := []byte("[")
	for i, name := range catalog.Boards() {
		text, err := os.ReadFile(filepath.Join("../../test/gpusim/catalog/boards", name+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var board Board
		if err := yaml.Unmarshal(text, &board); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		line, err := json.Marshal(board)
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			want = append(want, ',')
		}
		want = append(append(want, '\n'), line...)
	}
	want = append(want, "\n]\n"...)
	if *update {
		if err := os.WriteFile("boards.json", want, 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(want, boardsJSON) {
		t.Error("boards.json is not what the catalogue has: go test ./pkg/conformance -run TestBoards -update")
	}
}
