// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/must"
)

// bundleOf makes a bundle whose configuration is what a function makes at a path.
func bundleOf(t *testing.T, make func(path string) error) string {
	t.Helper()
	dir := t.TempDir()
	must.Do(t, make(filepath.Join(dir, "config.json")))
	return dir
}

func content(text string) func(string) error {
	return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
}

// TestBadInput: whatever the runtime gives, or somebody has put in the place of what it
// made. A pipe or a device would keep the hook waiting.
func TestBadInput(t *testing.T) {
	good := content(`{"process": {}}`)
	long := strings.Repeat("x", 5000)
	for name, test := range map[string]struct {
		input string
		want  []string
	}{
		"nothing":              {"", []string{"container's state"}},
		"not JSON":             {"hello", []string{"container's state"}},
		"more than a state":    {input(bundleOf(t, good)) + "{}", []string{"container's state"}},
		"an endless state":     {`{"bundle": "` + strings.Repeat("x", maxState), []string{"container's state", "more than 1048576 bytes"}},
		"no bundle":            {`{"id":"a"}`, []string{`bundle ""`}},
		"a relative bundle":    {input("b"), []string{`bundle "b"`}},
		"an odd bundle":        {`{"bundle": "b\u001b[2J\n` + long + `"}`, []string{`bundle "b\x1b[2J\nxxx`, "…: want an absolute path"}},
		"a long bundle":        {input("/" + long), []string{"file name too long", "…"}},
		"a bundle with a zero": {`{"bundle": "/a\u0000b"}`, []string{`"/a\x00b/config.json"`}},
		"no configuration":     {input(t.TempDir()), []string{"config.json", "no such file"}},
		"half of one":          {input(bundleOf(t, content("{"))), []string{"config.json"}},
		"two of them":          {input(bundleOf(t, content(`{"process": {}} {"process": {}}`))), []string{"config.json"}},
		"no process":           {input(bundleOf(t, content(`{"ociVersion":"1.2.1"}`))), []string{"no process"}},
		"too deep":             {input(bundleOf(t, content(`{"process": `+strings.Repeat("[", 50_000)))), []string{"config.json", "depth"}},
		"a large one": {input(bundleOf(t, func(path string) error {
			return errors.Join(good(path), os.Truncate(path, maxConfig+1))
		})), []string{"config.json", "more than 16777216 bytes"}},
		"a link to one": {input(bundleOf(t, func(path string) error {
			return errors.Join(good(path+".real"), os.Symlink(path+".real", path))
		})), []string{"config.json", "is a symbolic link: want a regular file"}},
		"a link to nothing":  {input(bundleOf(t, func(path string) error { return os.Symlink("/nowhere", path) })), []string{"is a symbolic link"}},
		"a folder":           {input(bundleOf(t, func(path string) error { return os.Mkdir(path, 0o700) })), []string{"is a folder"}},
		"a pipe":             {input(bundleOf(t, func(path string) error { return unix.Mkfifo(path, 0o600) })), []string{"is a pipe"}},
		"a link to a device": {input(bundleOf(t, func(path string) error { return os.Symlink("/dev/zero", path) })), []string{"is a symbolic link"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckMPSClient(t.Context(), strings.NewReader(test.input), "/no/control", "gpu-0")
			if err == nil {
				t.Fatal("the container starts")
			}
			text := err.Error()
			for _, want := range append(test.want, "gpu-0") {
				if !strings.Contains(text, want) {
					t.Errorf("got %v, want %q", text, want)
				}
			}
			if len(text) > 800 || strings.ContainsAny(text, "\x1b\x00\n") {
				t.Errorf("the message has %d bytes: %q", len(text), text)
			}
		})
	}
}

// endless is an input that never ends.
type endless struct{ read int64 }

func (e *endless) Read(p []byte) (int, error) {
	e.read += int64(len(p))
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestEndlessInput(t *testing.T) {
	var e endless
	if err := CheckSoftwareLimits(io.Reader(&e)); err == nil || e.read > 2*maxState {
		t.Errorf("read %d bytes: %v", e.read, err)
	}
}

// TestHostilePreloadFile: a pod can mount what it likes over the file.
func TestHostilePreloadFile(t *testing.T) {
	for name, test := range map[string]struct {
		make func(path string) error
		want string
	}{
		"a pipe":            {func(path string) error { return unix.Mkfifo(path, 0o600) }, "is a pipe"},
		"a folder":          {func(path string) error { return os.Mkdir(path, 0o700) }, "is a folder"},
		"a device":          {func(path string) error { return os.Symlink("/dev/zero", path) }, "is a symbolic link"},
		"a secret":          {func(path string) error { return os.Symlink("/etc/shadow", path) }, "is a symbolic link"},
		"more than memory":  {func(path string) error { return errors.Join(content("")(path), os.Truncate(path, 1<<40)) }, "more than 65536 bytes"},
		"a text for people": {content("\x1b[2Jlook here\n"), "does not name /usr/local/vgpu/libvgpu.so"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "preload\n\x1b")
			must.Do(t, test.make(path))
			mounts := []mount{{"/l.so", InterposerLibrary}, {path, PreloadFile}}
			err := CheckSoftwareLimits(strings.NewReader(input(bundleWith(t, mounts))))
			if err == nil || !strings.Contains(err.Error(), test.want) || strings.ContainsAny(err.Error(), "\x1b\n") {
				t.Errorf("got %q, want %q", err, test.want)
			}
		})
	}
}

// TestQuotes: what a pod sets is quoted and cut wherever it is repeated.
func TestQuotes(t *testing.T) {
	evil := "\n\x1b[2J" + strings.Repeat("é", 4000)
	markers := func(prefix string, n int) (env []string) {
		for i := range n {
			env = append(env, fmt.Sprint(prefix, i, "=", i, evil))
		}
		return env
	}
	shortMarkers := func(n int) (env []string) {
		for i := range n {
			env = append(env, fmt.Sprint(MPSMarkerPrefix, i, "=", i))
		}
		return env
	}
	for name, test := range map[string]struct {
		env  []string
		want string
	}{
		"sessions":            {markers(MPSMarkerPrefix, 100), "and 9"},
		"session and devices": {append(markers(MPSMarkerPrefix, 1), markers(DirectMarkerPrefix, 100)...), "and 9"},
		"limited":             {markers(LimitsMarkerPrefix, 100), "and 9"},
		"limited and devices": {append(markers(LimitsMarkerPrefix, 1), markers(DirectMarkerPrefix, 100)...), "and 9"},
		"numbered limit":      {[]string{"CUDA_DEVICE_MEMORY_LIMIT_" + evil}, `CUDA_DEVICE_MEMORY_LIMIT_\n\x1b`},
		"one very often":      {slices.Repeat([]string{MPSMarkerPrefix + "=a"}, 50_000), "library that limits"},
		"very many":           {shortMarkers(50_000), "50000 MPS shares"},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckSoftwareLimits(strings.NewReader(input(bundle(t, test.env...))))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %v, want %q", err, test.want)
			}
			if text := err.Error(); len(text) > 3000 || strings.ContainsAny(text, "\x1b\n") {
				t.Errorf("the message has %d bytes: %q", len(text), text)
			}
		})
	}
}
