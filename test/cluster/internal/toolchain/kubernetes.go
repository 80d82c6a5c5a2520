// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/semver"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

// Kubernetes returns the version that wanted means: 1.36.1, or, of 1.36, the newest that is pinned. It returns nothing for the version
// that the rest of the cluster is built with, which needs no programs of its own; so does an empty wanted.
func Kubernetes(repo layout.Repo, wanted string) (string, error) {
	if wanted == "" {
		return "", nil
	}
	versions, err := Versions(repo)
	if err != nil {
		return "", err
	}
	usual := strings.TrimPrefix(versions[kubeModule], "v")
	all, err := otherVersions(repo)
	if err != nil {
		return "", err
	}
	all = append(all, usual)
	slices.SortFunc(all, func(a, b string) int { return semver.Compare("v"+b, "v"+a) })
	for _, v := range all {
		if v != wanted && !strings.HasPrefix(v, wanted+".") {
			continue
		}
		if v == usual {
			return "", nil
		}
		return v, nil
	}
	return "", fmt.Errorf("kubernetes %s is not among the versions that are pinned, %s; test/cluster/versions/add %[1]s pins another",
		wanted, strings.Join(all, ", "))
}

// otherVersions are those with a module file of their own.
func otherVersions(repo layout.Repo) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(repo.Versions(), "*.mod"))
	if err != nil {
		return nil, fmt.Errorf("list the versions of Kubernetes: %w", err)
	}
	var versions []string
	for _, file := range files {
		version := strings.TrimSuffix(filepath.Base(file), ".mod")
		if version == "go" {
			continue
		}
		mods, err := required(file)
		if err != nil {
			return nil, err
		}
		if mods[kubeModule] != "v"+version {
			return nil, fmt.Errorf("list the versions of Kubernetes: %s requires Kubernetes %s", file, mods[kubeModule])
		}
		versions = append(versions, version)
	}
	return versions, nil
}

// kubernetesSteps build the programs of another version of Kubernetes, none for the usual one. A cluster has only the programs whose
// version matters from there; etcd and kubectl are the usual ones.
func kubernetesSteps(repo layout.Repo, version string) []step {
	if version == "" {
		return nil
	}
	return []step{{
		name: "kubernetes " + version, packages: []string{"./kube"}, ldflags: "-s -w" + kubeVersionFlags("v"+version),
		out: repo.Kubernetes(version), programs: []string{"kube"}, links: versionedPrograms,
		dir: repo.Versions(), mod: version, sources: []string{"kube"},
	}}
}
