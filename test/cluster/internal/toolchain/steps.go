// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package toolchain builds the programs of the cluster from the Go modules that test/cluster/go.mod pins.
package toolchain

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/modfile"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

// step is one call of go build.
type step struct {
	name     string
	packages []string
	ldflags  string
	tags     string
	cgo      bool
	out      string   // folder
	programs []string // what it leaves in out
	links    []string // other names of the one program
	sources  []string // folders of the module that are compiled, beside what go.sum pins
	dir      string   // of the module; empty: that of the cluster
	mod      string   // name of the module's file without .mod; empty: go
}

const kubeModule = "k8s.io/kubernetes"

var (
	versionedPrograms = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"}
	kubePrograms      = append(slices.Clone(versionedPrograms), "kubectl", "etcd")
)

// steps are in the order of building: the first fills the build cache for the rest.
func steps(repo layout.Repo, versions map[string]string) []step {
	const strip = "-s -w"
	return []step{
		{
			name: "kubernetes and etcd", packages: []string{"./cmd/kube"}, ldflags: strip + kubeVersionFlags(versions[kubeModule]),
			out: repo.Bin(), programs: []string{"kube"}, links: kubePrograms, sources: []string{"cmd/kube"},
		},
		{
			name: "containerd", ldflags: strip, out: repo.Bin(), programs: []string{"containerd", "containerd-shim-runc-v2", "ctr"},
			packages: []string{
				"github.com/containerd/containerd/v2/cmd/containerd",
				"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
				"github.com/containerd/containerd/v2/cmd/ctr",
			},
		},
		{
			// Without seccomp runc starts no pod: the kubelet asks for RuntimeDefault on every sandbox.
			name: "runc", packages: []string{"github.com/opencontainers/runc"}, ldflags: strip, tags: "seccomp", cgo: true,
			out: repo.Bin(), programs: []string{"runc"},
		},
		{
			name: "network plugins", ldflags: strip, out: repo.CNI(), programs: []string{"bridge", "host-local", "loopback"},
			packages: []string{
				"github.com/containernetworking/plugins/plugins/main/bridge",
				"github.com/containernetworking/plugins/plugins/ipam/host-local",
				"github.com/containernetworking/plugins/plugins/main/loopback",
			},
		},
		{name: "helm", packages: []string{"helm.sh/helm/v4/cmd/helm"}, ldflags: strip, out: repo.Bin(), programs: []string{"helm"}},
		{
			name: "pause", packages: []string{"./cmd/pause"}, ldflags: strip, out: repo.Bin(), programs: []string{"pause"},
			sources: []string{"cmd/pause"},
		},
	}
}

// kubeVersionFlags: without them the programs call themselves v0.0.0-master+$Format and kubectl cannot read that.
func kubeVersionFlags(version string) string {
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	var b strings.Builder
	for _, kv := range [][2]string{
		{"gitVersion", version}, {"gitMajor", major}, {"gitMinor", minor}, {"gitCommit", "unknown"}, {"gitTreeState", "clean"},
	} {
		fmt.Fprintf(&b, " -X k8s.io/component-base/version.%s=%s", kv[0], kv[1])
	}
	return b.String()
}

// Component is a part of the cluster and the module it comes from.
type Component struct{ Name, Module string }

// Components are the parts that a user may want the version of.
var Components = []Component{
	{"kubernetes", kubeModule}, {"etcd", "go.etcd.io/etcd/server/v3"}, {"containerd", "github.com/containerd/containerd/v2"},
	{"runc", "github.com/opencontainers/runc"}, {"cni plugins", "github.com/containernetworking/plugins"}, {"helm", "helm.sh/helm/v4"},
}

// Versions returns the version of every module that the cluster is built from, by module path.
func Versions(repo layout.Repo) (map[string]string, error) {
	file := filepath.Join(repo.Module(), "go.mod")
	versions, err := required(file)
	if err != nil {
		return nil, err
	}
	for _, c := range Components {
		if versions[c.Module] == "" {
			return nil, fmt.Errorf("read pinned versions: %s does not require %s", file, c.Module)
		}
	}
	return versions, nil
}

// required returns the versions that a go.mod file requires, by module path.
func required(file string) (map[string]string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read pinned versions: %w", err)
	}
	mod, err := modfile.Parse(file, b, nil)
	if err != nil {
		return nil, fmt.Errorf("read pinned versions: %w", err)
	}
	versions := map[string]string{}
	for _, r := range mod.Require {
		versions[r.Mod.Path] = r.Mod.Version
	}
	return versions, nil
}
