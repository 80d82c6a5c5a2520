// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// overlap is an old and a new driver on one node. Both get calls until the old one is
// told to end, which then only finishes those that it has.
type overlap struct {
	n        *harness.Node
	old, new *harness.Driver
	ending   atomic.Bool
}

// call makes one call, to the new driver if the old one is gone.
func (o *overlap) call(ctx context.Context, toOld bool, what harness.Operation, claim *drapb.Claim) ([]string, error) {
	if toOld && !o.ending.Load() {
		ids, err := o.old.Call(ctx, what, claim, harness.KubeletTimeout)
		if status.Code(err) != codes.Unavailable {
			return ids, err
		}
	}
	return o.new.Call(ctx, what, claim, harness.KubeletTimeout)
}

// use prepares and unprepares claims for one device with alternating drivers until enough
// is closed, and then once more.
func (o *overlap) use(ctx context.Context, address string, d harness.Device, enough <-chan struct{}) error {
	at := harness.Place{Profile: d.Profile, Start: d.Start}
	for round, more := 0, true; more; round++ {
		select {
		case <-enough:
			more = false
		default:
		}
		claim := o.n.AllocateNamed([]string{harness.DeviceName(address, at)})
		oldPrepares := (round+d.GPU+at.Start)%2 == 0
		ids, err := o.call(ctx, oldPrepares, harness.Prepare, claim)
		if err == nil {
			err = o.n.CheckPrepared(claim.GetUid(), ids, d.GPU, at)
		}
		if err == nil {
			_, err = o.call(ctx, !oldPrepares, harness.Unprepare, claim)
		}
		if err == nil {
			// What a call releases before its driver has opened NVML is finished in the background.
			err = harness.Eventually(ctx, func() error { return o.n.CheckNoFiles(claim.GetUid()) })
		}
		if err != nil {
			return fmt.Errorf("round %d, %+v: %w", round, d, err)
		}
	}
	return nil
}

// TestUpgradeUnderLoad checks that every call succeeds and all devices stay published while
// an old and a new driver are called for the same GPUs and the old one ends.
func TestUpgradeUnderLoad(t *testing.T) {
	t.Parallel()
	n, old := harness.NewDriver(t, "h100x3")
	published := len(n.API.Slices())
	var deleted atomic.Int64
	n.API.Refuse(func(r *http.Request) *apierrors.StatusError {
		if r.Method == http.MethodDelete {
			deleted.Add(1)
		}
		return nil
	})
	o := &overlap{n: n, old: old, new: n.Start(t)}

	enough := make(chan struct{})
	var wg sync.WaitGroup
	devices := []harness.Device{harness.Partition(0, "3g.40gb", 4), harness.Partition(1, "2g.20gb", 0), harness.Partition(1, "2g.20gb", 4), {GPU: 2}}
	for start := range 4 {
		devices = append(devices, harness.Partition(0, "1g.10gb", start))
	}
	for _, d := range devices {
		address := n.Address(t, d.GPU)
		wg.Go(func() {
			expect.Do(t, o.use(t.Context(), address, d, enough))
		})
	}
	// Both have work to do when the old one is told to end.
	for _, p := range []*harness.Driver{o.old, o.new} {
		p.UntilTrue(t, "some calls", func() bool { return strings.Count(p.Log.String(), `"Unprepared"`) >= 20 })
	}
	o.ending.Store(true)
	old.Stop(t)
	close(enough)
	wg.Wait()
	n.WantClean(t)
	if now := len(n.API.Slices()); deleted.Load() > 0 || now != published {
		t.Errorf("%d of %d slices are there, %d were deleted", now, published, deleted.Load())
	}
}

// checkHooks fails unless the hooks of a container are copies of programs in this
// folder, with an environment and a time limit.
func checkHooks(spec *oci.Spec, folder string) error {
	if spec.Hooks == nil || len(spec.Hooks.CreateContainer) == 0 {
		return errors.New("no hook")
	}
	copies := regexp.MustCompile("^" + regexp.QuoteMeta(folder) + "/(nvidia-cdi|partage)-hook-[0-9a-f]{12}$")
	for _, h := range spec.Hooks.CreateContainer {
		if !copies.MatchString(h.Path) || len(h.Env) == 0 || h.Timeout == nil {
			return fmt.Errorf("hook %s has the environment %q and the time limit %v", h.Path, h.Env, h.Timeout)
		}
		if _, err := os.Stat(h.Path); err != nil {
			return err
		}
	}
	return nil
}

// TestUpgradeOfHooks checks that a claim which another version has prepared gets a spec
// with the hooks of this one, and that those which a spec may have named until then are
// still there.
func TestUpgradeOfHooks(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	claim, ids := p.NewClaim(t, n, harness.Device{GPU: 0})
	hooks := filepath.Join(n.DataDir(), "hooks")
	must.Do(t, checkHooks(n.Container(t, ids...), hooks))
	p.Stop(t)

	// The spec and the hook of a version without hashes.
	spec, earlier := filepath.Join(n.CDIDir, n.CDISpecs(t)[0]), filepath.Join(n.DataDir(), "nvidia-cdi-hook")
	text, err := os.ReadFile(spec)
	old := strings.ReplaceAll(string(text), `"timeout": 60`, `"timeout": 0`)
	for _, name := range harness.List(t, hooks) {
		old = strings.ReplaceAll(old, "/hooks/"+name, "/nvidia-cdi-hook")
	}
	later := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	if err := errors.Join(err, os.WriteFile(spec, []byte(old), 0o644), os.WriteFile(earlier, []byte("#!/bin/sh\n"), 0o755),
		os.WriteFile(later, []byte("#!/bin/sh\n# later\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	if checkHooks(n.Container(t, ids...), hooks) == nil {
		t.Fatal("the spec is not that of an earlier version")
	}

	// This version, and then a later one.
	for _, flags := range [][]string{nil, {"--nvidia-cdi-hook=" + later}} {
		before, named := harness.List(t, hooks), n.Container(t, ids...).Hooks.CreateContainer[0].Path
		p = n.Start(t, append(flags, harness.Frequent...)...)
		p.Until(t, "a spec with the hooks of this version", func(context.Context) error {
			container := n.Container(t, ids...)
			if container.Hooks.CreateContainer[0].Path == named {
				return fmt.Errorf("the spec still names %s", named)
			}
			return checkHooks(container, hooks)
		})
		for _, path := range []string{earlier, named} {
			expect.Do(t, expect.Err(os.Stat(path)), "a container that is being made may need it")
		}
		if after := harness.List(t, hooks); len(after) != len(before)+len(flags) {
			t.Errorf("the hooks are %v; before: %v", after, before)
		}
		p.Stop(t)
	}
	p = n.Start(t)
	p.MustUnprepare(t, claim)
	p.UntilClean(t, n)
}

// TestHooksNeedNoLoader checks that the programs that container runtimes run on the host start on
// hosts without a dynamic loader, or with one elsewhere. What they run there is another matter.
func TestHooksNeedNoLoader(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"../../../Makefile", "../../../deployments/container/Dockerfile"} {
		text, err := os.ReadFile(file)
		for _, flags := range []string{"-tags " + harness.StaticTags, harness.StaticLDFlags} {
			if err != nil || !strings.Contains(string(text), flags) {
				t.Errorf("%s: no %q, %v: what is released is not what is tested", file, flags, err)
			}
		}
	}
	hook := filepath.Join(t.TempDir(), "nvidia-cdi-hook")
	build := exec.CommandContext(t.Context(), "go", "build", "-tags="+harness.StaticTags, "-ldflags="+harness.StaticLDFlags, "-o", hook,
		"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	n, p := harness.NewDriver(t, "h100x1", "--nvidia-cdi-hook="+hook)
	_, ids := p.NewClaim(t, n, harness.Device{GPU: 0})
	container, folder := n.Container(t, ids...), filepath.Join(n.DataDir(), "hooks")
	must.Do(t, checkHooks(container, folder))
	// Those of this container, and the one for shares with limits.
	programs := harness.List(t, folder)
	if len(programs) != 2 || !slices.Contains(programs, filepath.Base(container.Hooks.CreateContainer[0].Path)) {
		t.Fatalf("the hooks are %v", programs)
	}
	for _, name := range programs {
		file, err := elf.Open(filepath.Join(folder, name))
		must.Do(t, err, name)
		if slices.ContainsFunc(file.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
			t.Errorf("%s needs the host's dynamic loader", name)
		}
		expect.Len(t, must.Get(file.ImportedLibraries())(t), 0, name, "needs libraries of the host")
		_ = file.Close()
	}
}
