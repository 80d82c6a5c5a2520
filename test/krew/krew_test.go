// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package krew

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const (
	release = "../../deployments/krew/release"
	version = "v1.2.3-rc.1"
)

// manifest is krew's API v1alpha2, with all of its fields.
type manifest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Version          string     `json:"version"`
		ShortDescription string     `json:"shortDescription"`
		Description      string     `json:"description"`
		Caveats          string     `json:"caveats"`
		Homepage         string     `json:"homepage"`
		Platforms        []platform `json:"platforms"`
	} `json:"spec"`
}

type platform struct {
	URI      string                `json:"uri"`
	SHA256   string                `json:"sha256"`
	Selector *metav1.LabelSelector `json:"selector"`
	Files    []struct {
		From string `json:"from"`
		To   string `json:"to"`
	} `json:"files"`
	Bin string `json:"bin"`
}

func (p platform) name() string {
	return p.Selector.MatchLabels["os"] + "/" + p.Selector.MatchLabels["arch"]
}

// madeRelease runs the script with a go that writes down for what it was called.
func madeRelease(t *testing.T) (folder string) {
	t.Helper()
	bin, folder := t.TempDir(), t.TempDir()
	standIn := `#!/bin/sh
[ "$CGO_ENABLED" = 0 ] || exit 3
for arg; do [ "$last" = -o ] && out=$arg; last=$arg; done
printf '%s/%s: %s' "$GOOS" "$GOARCH" "$*" | sed "s| -o [^ ]*||" >"$out" && chmod 700 "$out"
`
	for name, program := range map[string]string{
		"go":              standIn,
		"notices":         "#!/bin/sh\necho \"notices of $* for $GOOS/$GOARCH\"\n",
		"cyclonedx-gomod": "#!/bin/sh\nwhile [ $# -gt 0 ]; do [ \"$1\" = -output ] && echo \"$GOOS/$GOARCH\" >\"$2\"; shift; done\n",
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte(program), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), release, version, folder)
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "COMMIT=abc", "SOURCE_DATE_EPOCH=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", release, err, out)
	}
	return folder
}

func readManifest(t *testing.T, folder string) manifest {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(folder, "partage.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var m manifest
	if err := yaml.UnmarshalStrict(raw, &m); err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	return m
}

// TestManifest has the rules of krew's own check of a manifest, and those of its index.
func TestManifest(t *testing.T) {
	m := readManifest(t, madeRelease(t))
	if m.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || m.Kind != "Plugin" || m.Name != "partage" {
		t.Errorf("it is a %s %s named %s", m.APIVersion, m.Kind, m.Name)
	}
	if m.Spec.Version != version {
		t.Errorf("version %s, want %s", m.Spec.Version, version)
	}
	// Longer ones do not fit on a line of krew search.
	if d := m.Spec.ShortDescription; d == "" || len(d) > 60 || strings.ContainsAny(d, "\r\n") || strings.HasSuffix(d, ".") {
		t.Errorf("short description %q", d)
	}
	if m.Spec.Description == "" || m.Spec.Homepage == "" {
		t.Error("no description or no homepage")
	}
	var names []string
	for _, p := range m.Spec.Platforms {
		names = append(names, p.name())
		if len(p.Selector.MatchLabels) != 2 || len(p.Selector.MatchExpressions) != 0 {
			t.Errorf("%s: selector %v", p.name(), p.Selector)
		}
		if !regexp.MustCompile(`^[0-9a-f]{64}$`).MatchString(p.SHA256) {
			t.Errorf("%s: sha256 %q", p.name(), p.SHA256)
		}
		if want := fmt.Sprintf("https://github.com/partage-dev/partage/releases/download/%s/kubectl-gpu_%s.tar.gz", version, strings.ReplaceAll(p.name(), "/", "_")); p.URI != want {
			t.Errorf("%s: %s, want %s", p.name(), p.URI, want)
		}
	}
	want := []string{"linux/amd64", "linux/arm64", "darwin/amd64", "darwin/arm64", "windows/amd64", "windows/arm64"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("platforms (-want +got):\n%s", diff)
	}
}

// TestArchives: an archive of each platform has its program, which is the one that krew links,
// the license and the notices of what is linked, and its checksum is the manifest's. So has its SBOM.
func TestArchives(t *testing.T) {
	folder := madeRelease(t)
	checksums, err := os.ReadFile(filepath.Join(folder, "checksums.txt"))
	if err != nil {
		t.Fatal(err)
	}
	license, err := os.ReadFile("../../LICENSE")
	if err != nil {
		t.Fatal(err)
	}
	platforms := readManifest(t, folder).Spec.Platforms
	for _, p := range platforms {
		archive := path.Base(p.URI)
		raw, err := os.ReadFile(filepath.Join(folder, archive))
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(raw)
		if got := hex.EncodeToString(sum[:]); got != p.SHA256 {
			t.Errorf("%s has the checksum %s, the manifest %s", archive, got, p.SHA256)
		}
		if line := p.SHA256 + "  " + archive + "\n"; !strings.Contains(string(checksums), line) {
			t.Errorf("checksums.txt lacks %s", line)
		}
		content := unpacked(t, raw)
		for _, f := range p.Files {
			if _, has := content[f.From]; !has || f.To != "." {
				t.Errorf("%s: krew copies %s to %s; the archive has %v", archive, f.From, f.To, slices.Sorted(maps.Keys(content)))
			}
		}
		if !bytes.Equal(content["LICENSE"], license) {
			t.Errorf("%s: the license is another", archive)
		}
		if got, want := string(content["NOTICES"]), "notices of ./cmd/kubectl-gpu for "+p.name()+"\n"; got != want {
			t.Errorf("%s: the notices are %q, want %q", archive, got, want)
		}
		sbom := strings.TrimSuffix(archive, ".tar.gz") + ".cdx.json"
		if raw, err := os.ReadFile(filepath.Join(folder, sbom)); err != nil || string(raw) != p.name()+"\n" {
			t.Errorf("%s is %q, %v", sbom, raw, err)
		}
		if !strings.Contains(string(checksums), "  "+sbom+"\n") {
			t.Errorf("checksums.txt lacks %s", sbom)
		}
		want := p.name() + ": build -trimpath -ldflags -s -w -X github.com/partage-dev/partage/pkg/util/version.version=" + version +
			" -X github.com/partage-dev/partage/pkg/util/version.commit=abc ./cmd/kubectl-gpu"
		if got := string(content[p.Bin]); got != want {
			t.Errorf("%s: %s was built with\n%s\nwant\n%s", archive, p.Bin, got, want)
		}
		if isExe := strings.HasSuffix(p.Bin, ".exe"); isExe != strings.HasPrefix(p.name(), "windows/") {
			t.Errorf("%s: the program is called %s", archive, p.Bin)
		}
	}
	t.Logf("%d cases", len(platforms))
}

// TestArchivesAreReproducible: who builds a release again gets the same archives.
func TestArchivesAreReproducible(t *testing.T) {
	first, second := readManifest(t, madeRelease(t)), readManifest(t, madeRelease(t))
	if diff := cmp.Diff(first, second); diff != "" {
		t.Errorf("the second time it is another (-first +second):\n%s", diff)
	}
}

func TestReleaseRefusesVersions(t *testing.T) {
	for _, version := range []string{"", "1.2.3", "v1.2", "v1.2.3|g", "devel"} {
		out, err := exec.CommandContext(t.Context(), release, version, t.TempDir()).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "a version such as v0.1.0") {
			t.Errorf("version %q: %v: %s", version, err, out)
		}
	}
}

// unpacked returns the regular files of an archive by name. Programs can be run by all.
func unpacked(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	zipped, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for reader := tar.NewReader(zipped); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		want := int64(0o644)
		if strings.HasPrefix(header.Name, "kubectl-gpu") {
			want = 0o755
		}
		if header.Typeflag != tar.TypeReg || header.Mode != want {
			t.Errorf("%s: type %c, mode %o, want %o", header.Name, header.Typeflag, header.Mode, want)
		}
		if files[header.Name], err = io.ReadAll(reader); err != nil {
			t.Fatal(err)
		}
	}
}
