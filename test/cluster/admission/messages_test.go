// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestMessages: what kubectl says of wrong manifests is what docs/how-to/admission.md shows of
// it. Rewrite the golden files with -update.
func TestMessages(t *testing.T) {
	server := newAPIServer(t, "defaults")
	manifests, err := filepath.Glob("testdata/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range manifests {
		document, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, refused := server.create(t, "default", document)
		var status *apierrors.StatusError
		// Of errors with the reason Invalid kubectl writes something else, which names no file.
		if !errors.As(refused, &status) || !apierrors.IsForbidden(refused) {
			t.Errorf("%s: %v", path, refused)
			continue
		}
		// As kubectl writes it.
		got := fmt.Sprintf("Error from server (%s): error when creating %q: %s\n", status.ErrStatus.Reason, filepath.Base(path), status.ErrStatus.Message)
		golden := strings.TrimSuffix(path, ".yaml") + ".txt"
		if *update {
			if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil || got != string(want) {
			t.Errorf("%s: %v\ngot  %swant %s", path, err, got, want)
		}
	}
	if len(manifests) < 4 {
		t.Errorf("%d manifests", len(manifests))
	}
}
