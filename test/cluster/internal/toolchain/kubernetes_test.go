// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package toolchain

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/modfile"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

func TestKubernetesOfThisCheckout(t *testing.T) {
	repo, err := layout.Find(".")
	if err != nil {
		t.Fatal(err)
	}
	usual, err := Versions(repo)
	if err != nil {
		t.Fatal(err)
	}
	for wanted, want := range map[string]string{
		"": "", "1.37": "", strings.TrimPrefix(usual[kubeModule], "v"): "",
		"1.36.1": "1.36.1", "1.36": "1.36.4", "1.34": "1.34.4",
	} {
		if got, err := Kubernetes(repo, wanted); err != nil || got != want {
			t.Errorf("Kubernetes %q means %q (%v), want %q", wanted, got, err, want)
		}
	}
	for _, wanted := range []string{"1.3", "1.36.", "1.36.99", "2.0", "go"} {
		if got, err := Kubernetes(repo, wanted); err == nil || !strings.Contains(err.Error(), "1.36.4") {
			t.Errorf("Kubernetes %q means %q (%v), want an error with the versions that there are", wanted, got, err)
		}
	}
}

// All modules of an older Kubernetes are of its own version: a mixture was never released.
func TestModulesOfOtherVersions(t *testing.T) {
	repo, err := layout.Find(".")
	if err != nil {
		t.Fatal(err)
	}
	versions, err := otherVersions(repo)
	if err != nil || len(versions) < 4 {
		t.Fatalf("versions %v, %v; want at least 4", versions, err)
	}
	for _, version := range versions {
		content, err := os.ReadFile(filepath.Join(repo.Versions(), version+".mod"))
		if err != nil {
			t.Fatal(err)
		}
		mod, err := modfile.Parse(version+".mod", content, nil)
		if err != nil {
			t.Fatal(err)
		}
		want := "v0." + strings.TrimPrefix(version, "1.")
		for _, r := range mod.Replace {
			if r.New.Version != want {
				t.Errorf("%s.mod: %s is %s, want %s", version, r.Old.Path, r.New.Version, want)
			}
		}
		if len(mod.Replace) < 25 {
			t.Errorf("%s.mod replaces %d modules, want all that are folders of Kubernetes' repository", version, len(mod.Replace))
		}
		for _, s := range kubernetesSteps(repo, version) {
			if args := (Builder{Repo: repo}).args(s); !slices.Contains(args, "-modfile="+version+".mod") {
				t.Errorf("go %v does not name the module of %s", args, version)
			}
		}
	}
}
