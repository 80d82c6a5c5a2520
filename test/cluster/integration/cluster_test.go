// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

//go:build cluster

// Package integration brings a real cluster up and down and checks that nothing of it is left. It needs root:
//
//	go test -tags cluster ./integration
package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/cgroup"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/poll"
)

// name differs from that of a cluster that a developer may have up.
const name = "selftest"

// waitLimit bounds one wait. Only a wait that would never end reaches it, also beside other clusters on a slow machine.
const waitLimit = 3 * time.Minute

// program is a freshly built cluster command and the cluster that it runs.
type program struct {
	path string
	c    layout.Cluster
}

// setup builds the command and ends a cluster that an earlier run left.
func setup(t *testing.T) program {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	repo, err := layout.Find(".")
	if err != nil {
		t.Fatal(err)
	}
	c, err := repo.Cluster(name)
	if err != nil {
		t.Fatal(err)
	}
	p := program{filepath.Join(t.TempDir(), "cluster"), c}
	build := exec.Command("go", "build", "-o", p.path, "../cmd/cluster")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	p.must(t, "down")
	t.Cleanup(func() { _, _ = p.run("down") })
	return p
}

func (p program) command(args ...string) *exec.Cmd {
	return exec.Command(p.path, append([]string{"--repo", p.c.Root, "--name", name}, args...)...)
}

func (p program) run(args ...string) (string, error) {
	out, err := p.command(args...).CombinedOutput()
	return string(out), err
}

func (p program) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := p.run(args...)
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return out
}

func (p program) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return p.must(t, append([]string{"run", "--", "kubectl"}, args...)...)
}

// leftovers is everything that a cluster could leave on the machine.
type leftovers struct {
	Mounts, Devices, Groups, Processes, Files []string
}

// find looks for what is on the machine now. Other programs may mount and unmount elsewhere, or make network devices, at the same time.
func find(t *testing.T, c layout.Cluster) leftovers {
	t.Helper()
	var m leftovers
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		point := strings.Fields(line)[4]
		// Those of logins and of services with credentials come and go at any time.
		if strings.HasPrefix(point, "/run/user/") || strings.HasPrefix(point, "/run/credentials/") {
			continue
		}
		if slices.ContainsFunc([]string{c.Run(), "/etc", "/run", "/var", "/sys"}, func(dir string) bool { return strings.HasPrefix(point+"/", dir+"/") }) {
			m.Mounts = append(m.Mounts, point)
		}
	}
	devices, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		if slices.Contains([]string{"node0", "cni0"}, d.Name) || strings.HasPrefix(d.Name, "cable") {
			m.Devices = append(m.Devices, d.Name)
		}
	}
	if m.Groups, err = cgroup.Find(c.ID()); err != nil {
		t.Fatal(err)
	}
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if _, isNumber := strconv.Atoi(e.Name()); isNumber == nil && err == nil && bytes.Contains(line, []byte(c.Run()+"/")) {
			m.Processes = append(m.Processes, string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}
	for _, path := range []string{c.Run(), c.Kubeconfig(), "/var/lib/kubelet", "/run/containerd", "/run/gpusim", "/etc/cni/net.d/10-bridge.conflist"} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			m.Files = append(m.Files, path)
		}
	}
	return m
}

// wantSame fails the test if something was left, or taken away, that was not before.
func wantSame(t *testing.T, before, after leftovers) {
	t.Helper()
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the machine has changed, -before +after:\n%s", diff)
	}
}

// TestTwice brings a cluster up, uses it and brings it down, twice.
func TestTwice(t *testing.T) {
	p := setup(t)
	before := find(t, p.c)
	for round := range 2 {
		t.Run(fmt.Sprint("round ", round+1), func(t *testing.T) {
			t.Log(p.must(t, "up"))
			if len(find(t, p.c).Groups) == 0 {
				t.Error("the cluster has no control groups, so looking for them proves nothing")
			}
			use(t, p)
			t.Log(p.must(t, "down"))
			wantSame(t, before, find(t, p.c))
		})
	}
	if out := p.must(t, "down"); !strings.Contains(out, "is not up") {
		t.Errorf("down again: %s", out)
	}
}

// use checks the commands that work while a cluster is up, and that pods run in it.
func use(t *testing.T, p program) {
	t.Helper()
	if out := p.must(t, "up"); !strings.Contains(out, "is up already") {
		t.Errorf("up again: %s", out)
	}
	if out, err := p.run("up", "--feature-gates", "DRAPartitionableDevices=false"); err == nil || !strings.Contains(out, "run cluster down first") {
		t.Errorf("up with other options: %v\n%s", err, out)
	}
	status := p.must(t, "status")
	for _, want := range []string{"selftest, up", "v1.37.", "kubelet", "Ready"} {
		if !strings.Contains(status, want) {
			t.Errorf("%q is not in the status:\n%s", want, status)
		}
	}
	_, err := p.run("run", "--", "sh", "-c", "exit 7")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("exit status of a command: %v, want 7", err)
	}
	cat := p.command("run", "cat")
	cat.Stdin = strings.NewReader("through")
	if out, err := cat.Output(); err != nil || string(out) != "through" {
		t.Errorf("stdin gave %q, %v", out, err)
	}
	chart, err := filepath.Abs("testdata/chart")
	if err != nil {
		t.Fatal(err)
	}
	p.must(t, "run", "--", "helm", "install", "trial", chart, "--wait", "--timeout", waitLimit.String())
	pods := p.kubectl(t, "get", "pods", "-o", "name")
	if n := strings.Count(pods, "pod/"); n != 2 {
		t.Errorf("%d pods, want 2:\n%s", n, pods)
	}
	for pod := range strings.Lines(pods) {
		// The C library is the machine's: a dynamic program started through it runs.
		if out := p.kubectl(t, "exec", strings.TrimSpace(pod), "--", "sh", "-c", "/lib*/ld-linux-*.so.* --version | head -n 1"); !strings.Contains(out, "ld.so") {
			t.Errorf("%s: %s", pod, out)
		}
	}
	p.must(t, "load-image", filepath.Join(p.c.Images(), "demo.tar"))
	restarts(t, p)
	p.must(t, "run", "--", "helm", "uninstall", "trial", "--wait")
}

// restarts checks that a component that dies is restarted and that the node becomes ready again.
func restarts(t *testing.T, p program) {
	t.Helper()
	p.must(t, "run", "--", "sh", "-c", "kill -KILL $(pidof kubelet)")
	if err := poll.Until(context.Background(), waitLimit, "the kubelet to be started again", func(context.Context) error {
		if out := p.must(t, "status"); !strings.Contains(out, "started again 1 times") {
			return errors.New(out)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	p.kubectl(t, "wait", "--for=condition=Ready", "node", "--all", "--timeout="+waitLimit.String())
}

// TestKilled checks that a cluster whose command is killed while it starts ends by itself, and that down removes what it left.
func TestKilled(t *testing.T) {
	p := setup(t)
	before := find(t, p.c)
	for _, sig := range []unix.Signal{unix.SIGKILL, unix.SIGINT} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			cmd := p.command("up", "--nodes", "n1,n2")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			log := p.c.Log("kube-apiserver")
			if err := poll.Until(context.Background(), waitLimit, "the API server to start", func(context.Context) error {
				if !slices.ContainsFunc(find(t, p.c).Processes, func(s string) bool { return strings.HasPrefix(s, "kube-apiserver") }) {
					return fmt.Errorf("not yet, see %s", log)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err == nil {
				t.Error("up succeeded")
			}
			if sig == unix.SIGKILL {
				p.must(t, "down")
			}
			wantSame(t, before, find(t, p.c))
		})
	}
}

// TestRefused checks that what cannot work fails with the reason and leaves nothing.
func TestRefused(t *testing.T) {
	p := setup(t)
	before := find(t, p.c)
	for want, args := range map[string][]string{
		"unrecognized feature gate": {"up", "--feature-gates", "NoSuchGate=true"},
		"make build":                {"up", "--machine", "any"},
		"exclude each other":        {"up", "--machine", "any", "--nodes", "n1,n2"},
		"the name n1":               {"up", "--nodes", "n1,n1"},
		"is not up":                 {"run", "true"},
	} {
		cmd := p.command(args...)
		cmd.Env = append(os.Environ(), "GPUSIM_BIN=/no/such/program")
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v: %v, want %q in\n%s", args, err, want, out)
		}
	}
	wantSame(t, before, find(t, p.c))
}
