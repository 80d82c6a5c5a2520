// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package knownfailures runs tests of promises that are broken today. list.yaml has their names, the issues that will
// mend them and what they say when they fail.
//
// Such a test is an ordinary test whose first statement is knownfailures.Expect(t). While it is on the list it runs in a
// process of its own and has to fail there with the text that the list quotes, so that it is noticed if the promise is kept
// again, and if the test fails for another reason.
package knownfailures

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// Entry is a test that fails.
type Entry struct {
	// Package is its folder, from the top of the repository: "pkg/driver/claim".
	Package string `json:"package"`
	// Test is its name as `go test -v` prints it: "TestRelease" or "TestRelease/full_disk".
	Test string `json:"test"`
	// Issue is the number of the issue that will mend it.
	Issue int `json:"issue"`
	// Says is part of one line of what the test prints when it fails.
	Says string `json:"says"`
}

const (
	module = "github.com/partage-dev/partage/"
	// child is set for the process in which a listed test runs as it is.
	child = "PARTAGE_KNOWN_FAILURE"
	// limit is for a test that hangs. The time a test should take is 30 s at most, but a busy machine is no reason to fail.
	limit = 2 * time.Minute
)

//go:embed list.yaml
var list []byte

// List returns the tests that fail today, in the order of the file.
func List() ([]Entry, error) {
	var entries []Entry
	if err := yaml.UnmarshalStrict(list, &entries); err != nil {
		return nil, fmt.Errorf("read the list of known failures: %w", err)
	}
	return entries, nil
}

// Expect is the first statement of a test, or of a case of one, that may be on the list. It returns if the test is to run
// as it is: it is not on the list, or this is the process that Expect has started for it. Otherwise Expect runs the test in
// another process, fails t unless that fails as the list says, and does not return.
func Expect(t *testing.T) {
	t.Helper()
	entries, err := List()
	if err != nil {
		t.Fatal(err)
	}
	in := caller(2)
	for _, e := range entries {
		if e.Package != in || e.Test != t.Name() || os.Getenv(child) == e.Test {
			continue
		}
		began := time.Now()
		output, failed := run(t.Context(), e.Test)
		if skipped(output, e.Test) {
			t.Skipf("known failure, skipped:\n%s", output)
		}
		if err := judge(e, output, failed); err != nil {
			t.Fatalf("%v\n%s", err, output)
		}
		t.Skipf("%s after %s: %s", e.seen(), time.Since(began).Round(100*time.Millisecond), e.Says)
	}
}

// seen begins what Expect prints when the test has failed as the list says.
func (e Entry) seen() string {
	return fmt.Sprintf("known failure of issue %d: %s %s,", e.Issue, e.Package, e.Test)
}

// Unseen returns the listed tests that did not fail as the list says in the logs of a run of all tests: they were skipped,
// do not exist, or are in a package that nothing tests.
func Unseen(logs string) ([]Entry, error) {
	entries, err := List()
	return slices.DeleteFunc(entries, func(e Entry) bool { return strings.Contains(logs, e.seen()) }), err
}

// InChild reports whether this is a process that Expect has started. What the program of the test has prepared for all its
// tests is there.
func InChild() bool { return os.Getenv(child) != "" }

// caller returns the package of the function that called, from the top of the repository.
func caller(skip int) string {
	pc, _, _, _ := runtime.Caller(skip)
	return packageOf(runtime.FuncForPC(pc).Name())
}

// packageOf takes a name as "github.com/partage-dev/partage/pkg/claim_test.TestRelease.func1".
func packageOf(function string) string {
	function = strings.TrimPrefix(function, module)
	slash := strings.LastIndex(function, "/") + 1
	name, _, _ := strings.Cut(function[slash:], ".")
	return function[:slash] + strings.TrimSuffix(name, "_test")
}

// run runs one test of this program in a process of its own.
func run(ctx context.Context, test string) (output string, failed error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	used, err := os.CreateTemp("", "known-failure-")
	if err != nil {
		return "", fmt.Errorf("note what a known failure uses: %w", err)
	}
	defer os.Remove(used.Name())
	defer used.Close()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run="+pattern(test), "-test.v", "-test.count=1", "-test.testlogfile="+used.Name())
	cmd.Env = append(os.Environ(), child+"="+test)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	// What the test has started may keep the pipe open.
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		err = fmt.Errorf("not finished after %s: %w", limit, ctx.Err())
	}
	touch(used)
	return string(out), err
}

// touch opens the files that the other process has opened, so that go test, which caches results, knows what this one
// depends on. Its log has a line for each: "open deployments/helm/partage/values.yaml".
func touch(log io.Reader) {
	for lines := bufio.NewScanner(log); lines.Scan(); {
		if name, opened := strings.CutPrefix(lines.Text(), "open "); opened {
			if file, err := os.Open(name); err == nil {
				_ = file.Close()
			}
		}
	}
}

// pattern matches one test and, of its cases, the one that is named.
func pattern(test string) string {
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

func skipped(output, test string) bool {
	return strings.Contains(output, "--- SKIP: "+test+" ")
}

// judge says what is wrong with how a listed test ended.
func judge(e Entry, output string, failed error) error {
	name := e.Package + " " + e.Test
	var exit *exec.ExitError
	switch {
	case failed == nil && !strings.Contains(output, "--- PASS: "+e.Test+" "):
		return fmt.Errorf("%s did not run", name)
	case failed == nil:
		return fmt.Errorf("%s passes: take it off the list in test/knownfailures/list.yaml, with its call of knownfailures.Expect (issue %d)", name, e.Issue)
	case !errors.As(failed, &exit):
		return fmt.Errorf("%s could not be run: %w", name, failed)
	case !strings.Contains(output, "--- FAIL: "+e.Test+" "):
		return fmt.Errorf("%s did not come to its end: %w", name, failed)
	case strings.Contains(output, "\npanic: ") || strings.Contains(output, "WARNING: DATA RACE"):
		return fmt.Errorf("%s fails by a panic or a data race, which no list allows", name)
	case !strings.Contains(output, e.Says):
		return fmt.Errorf("%s fails, and does not say %q as the list does", name, e.Says)
	}
	return nil
}
