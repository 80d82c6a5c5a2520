// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"io"
	"testing"

	"github.com/partage-dev/partage/test/docs/flags"
	"github.com/partage-dev/partage/test/docs/page"
)

var update = flag.Bool("update", false, "rewrite the documentation")

// TestDocs writes the flags into their page, or compares it.
func TestDocs(t *testing.T) {
	page.Generated(t, *update, "docs/reference/cli.md", flags.Markdown(t, newCommand(io.Discard, io.Discard)))
}
