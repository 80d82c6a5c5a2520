// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestFileGate: programs that open a file, or list a folder, are held and go on one by one, in their order; this process
// and those that open other files are not held.
func TestFileGate(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("holding opened files needs root")
	}
	dir := t.TempDir()
	file, folder, other := filepath.Join(dir, "information"), filepath.Join(dir, "folder"), filepath.Join(dir, "other")
	for _, path := range []string{file, other, filepath.Join(dir, "folder/in it/file")} {
		must.Do(t, os.MkdirAll(filepath.Dir(path), 0o700))
		must.Do(t, os.WriteFile(path, []byte("text"), 0o600))
	}
	g := HoldFiles(t, file, folder)
	type end struct {
		command string
		output  string
		err     error
	}
	ends := make(chan end, 4)
	run := func(command ...string) {
		go func() {
			output, err := exec.CommandContext(t.Context(), command[0], command[1:]...).Output()
			ends <- end{command[0], string(output), err}
		}()
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "text" {
		t.Errorf("this process reads %q, %v", text, err)
	}
	run("cat", file)
	g.UntilHeld(t, 1)
	run("ls", folder)
	g.UntilHeld(t, 2)
	run("head", filepath.Join(folder, "in it/file"))
	g.UntilHeld(t, 3)
	expect.Same(t, g.Held(), []string{file, folder, filepath.Join(folder, "in it/file")}, "held")
	if output, err := exec.CommandContext(t.Context(), "cat", other).Output(); err != nil || string(output) != "text" {
		t.Errorf("another file: %q, %v", output, err)
	}
	for _, want := range []end{{"cat", "text", nil}, {"ls", "in it\n", nil}} {
		g.LetGo(t, 1)
		expect.Equal(t, <-ends, want, "let go")
	}
	run("tail", file)
	g.UntilHeld(t, 2)
	g.Open()
	for range 2 {
		if got := <-ends; got.output != "text" || got.err != nil {
			t.Errorf("after the gate was opened: %+v", got)
		}
	}
	if output, err := exec.CommandContext(t.Context(), "cat", file).Output(); err != nil || string(output) != "text" {
		t.Errorf("with the gate open: %q, %v", output, err)
	}
}
