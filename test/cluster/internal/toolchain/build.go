// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/renameio/v2"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/progress"
)

// noteEvery is how often a long step says how far it is.
const noteEvery = 20 * time.Second

// Builder builds what is out of date.
type Builder struct {
	Repo     layout.Repo
	Progress *progress.Printer
	Parallel int      // as in go build -p; 0: all processors
	Only     []string // names of parts; none means all
	// Kubernetes are other versions that are built as well, as Kubernetes returns them; empty: none.
	Kubernetes []string
}

// Build brings all programs up to date, or those of the named parts. A step whose inputs have not changed since it last ran is skipped
// without calling go.
func (b Builder) Build(ctx context.Context) error {
	versions, err := Versions(b.Repo)
	if err != nil {
		return err
	}
	wanted := steps(b.Repo, versions)
	for i, version := range b.Kubernetes {
		if !slices.Contains(b.Kubernetes[:i], version) {
			wanted = append(wanted, kubernetesSteps(b.Repo, version)...)
		}
	}
	all, err := b.selected(wanted)
	if err != nil {
		return err
	}
	var todo []step
	stamps := map[string]string{}
	for _, s := range all {
		stamp, err := b.stamp(s)
		if err != nil {
			return err
		}
		stamps[s.name] = stamp
		if !b.current(s, stamp) {
			todo = append(todo, s)
		}
	}
	if len(todo) == 0 {
		return nil
	}
	if err := Check(ctx, todo...); err != nil {
		return err
	}
	b.Progress.Printf("building %d of the cluster's %d parts; from cold caches on two processors all of them take about seven minutes, and so does another version of Kubernetes", len(todo), len(all))
	for i, s := range todo {
		start := time.Now()
		label := fmt.Sprintf("build %d/%d %s", i+1, len(todo), s.name)
		if err := b.run(ctx, s, label); err != nil {
			return fmt.Errorf("build %s: %w", s.name, err)
		}
		if err := b.finish(s, stamps[s.name]); err != nil {
			return fmt.Errorf("build %s: %w", s.name, err)
		}
		b.Progress.Printf("%s: done in %.1fs", label, time.Since(start).Seconds())
	}
	return nil
}

// selected returns the steps that Only names.
func (b Builder) selected(all []step) ([]step, error) {
	if len(b.Only) == 0 {
		return all, nil
	}
	var chosen []step
	for _, name := range b.Only {
		i := slices.IndexFunc(all, func(s step) bool { return s.name == name })
		if i < 0 {
			return nil, fmt.Errorf("build %q: the cluster has no such part", name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// module returns the folder of the module that a step builds, and its file without .mod.
func (b Builder) module(s step) (dir, file string) {
	return cmp.Or(s.dir, b.Repo.Module()), cmp.Or(s.mod, "go")
}

// modFlag is the argument of go that names another module file than go.mod.
func modFlag(s step) []string {
	if s.mod == "" {
		return nil
	}
	return []string{"-modfile=" + s.mod + ".mod"}
}

func (b Builder) args(s step) []string {
	args := []string{"build", "-trimpath", "-v", "-ldflags", s.ldflags, "-o", s.out + string(filepath.Separator)}
	if s.tags != "" {
		args = append(args, "-tags", s.tags)
	}
	return slices.Concat(args, modFlag(s), s.packages)
}

func (b Builder) command(ctx context.Context, s step, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, _ = b.module(s)
	cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false", "GOWORK=off", "GOOS=linux", "GOARCH="+runtime.GOARCH, "CGO_ENABLED=0")
	if s.cgo {
		cmd.Env = append(cmd.Env, "CGO_ENABLED=1")
	}
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// run calls go build, which with -v names each package that it compiles, on stderr.
func (b Builder) run(ctx context.Context, s step, label string) error {
	if err := os.MkdirAll(s.out, 0o755); err != nil {
		return fmt.Errorf("make the folder of programs: %w", err)
	}
	total := 0
	if len(s.links) > 0 { // the long one: worth counting
		b.Progress.Printf("%s: fetching modules", label)
		out, err := b.command(ctx, s, slices.Concat([]string{"list", "-deps"}, modFlag(s), s.packages)...).Output()
		if err != nil {
			return describe(err)
		}
		total = bytes.Count(out, []byte("\n"))
	}
	b.Progress.Printf("%s: started", label)
	args := b.args(s)
	if b.Parallel > 0 { // not in args: it changes nothing in the outcome
		args = slices.Insert(args, 1, "-p", fmt.Sprint(b.Parallel))
	}
	cmd := b.command(ctx, s, args...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start go: %w", err)
	}
	messages := b.follow(stderr, label, total)
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%w\n%s", err, messages)
	}
	return nil
}

// follow counts packages and returns the lines that are not package names: errors.
func (b Builder) follow(stderr io.Reader, label string, total int) string {
	var messages strings.Builder
	built, last := 0, time.Now()
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		line := lines.Text()
		if strings.ContainsAny(line, " \t") {
			fmt.Fprintln(&messages, line)
			continue
		}
		built++
		if total > 0 && time.Since(last) >= noteEvery {
			last = time.Now()
			b.Progress.Printf("%s: %d of %d packages", label, min(built, total), total)
		}
	}
	return messages.String()
}

// finish makes the links, and the stamp last.
func (b Builder) finish(s step, stamp string) error {
	for _, link := range s.links {
		path := filepath.Join(s.out, link)
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("replace a link: %w", err)
		}
		if err := os.Symlink(s.programs[0], path); err != nil {
			return fmt.Errorf("link a program: %w", err)
		}
	}
	// A new file, in case it is linked to that of another checkout.
	if err := renameio.WriteFile(b.stampFile(s), []byte(stamp), 0o644); err != nil {
		return fmt.Errorf("note that a step is done: %w", err)
	}
	return nil
}

func (b Builder) stampFile(s step) string {
	return filepath.Join(b.Repo.Bin(), ".built-"+strings.ReplaceAll(s.name, " ", "-"))
}

func (b Builder) current(s step, stamp string) bool {
	old, err := os.ReadFile(b.stampFile(s))
	if err != nil || string(old) != stamp {
		return false
	}
	for _, p := range append(s.programs, s.links...) {
		if _, err := os.Stat(filepath.Join(s.out, p)); err != nil {
			return false
		}
	}
	return true
}

// stamp changes whenever the step's outcome may.
func (b Builder) stamp(s step) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, runtime.GOARCH, runtime.Version(), s.cgo, b.args(s))
	module, mod := b.module(s)
	files := []string{mod + ".mod", mod + ".sum"}
	for _, dir := range s.sources {
		more, err := filepath.Glob(filepath.Join(module, dir, "*.go"))
		if err != nil {
			return "", fmt.Errorf("list sources: %w", err)
		}
		for _, f := range more {
			files = append(files, filepath.Join(dir, filepath.Base(f)))
		}
	}
	for _, f := range files {
		content, err := os.ReadFile(filepath.Join(module, f))
		if err != nil {
			return "", fmt.Errorf("read sources: %w", err)
		}
		fmt.Fprintf(h, "%s %x\n", f, sha256.Sum256(content))
	}
	return fmt.Sprintf("%x\n", h.Sum(nil)), nil
}

func describe(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return fmt.Errorf("%w\n%s", err, exit.Stderr)
	}
	return err
}
