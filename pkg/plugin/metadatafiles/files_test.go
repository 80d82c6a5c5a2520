// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metadatafiles

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
)

const driver = "gpu.nvidia.com"

type rig struct {
	*Files

	t *testing.T
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir := t.TempDir()
	return &rig{t: t, Files: &Files{DriverName: driver, DataDir: filepath.Join(dir, "data"), CDIDir: filepath.Join(dir, "cdi")}}
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) metadata(claim, request string) string {
	return filepath.Join(r.DataDir, "dra-device-metadata", "team_"+claim, request, "metadata.json")
}

func specName(uid, request string) string {
	return fmt.Sprintf("%s_metadata_%s_%s.json", driver, uid, request)
}

// prepare does what the helper does for a claim.
func (r *rig) prepare(claim, uid string, requests ...string) {
	r.t.Helper()
	o := r.Operations()
	for _, request := range requests {
		path := r.metadata(claim, request)
		r.must(os.MkdirAll(filepath.Dir(path), 0o755))
		r.must(o.WriteFile(path, []byte("about "+uid), 0o644))
		r.must(os.MkdirAll(r.CDIDir, 0o755))
		spec := fmt.Sprintf(`{"cdiVersion": "0.6.0", "kind": "%s/metadata", "devices": [{"name": "%s_%s", "containerEdits": {"mounts": [{"hostPath": %q, "containerPath": "/m"}]}}]}`,
			driver, uid, request, path)
		r.must(o.WriteFile(filepath.Join(r.CDIDir, specName(uid, request)), []byte(spec), 0o644))
	}
}

// unprepare does what the helper does for a claim.
func (r *rig) unprepare(claim, uid string) {
	r.t.Helper()
	o := r.Operations()
	r.must(o.RemoveAll(filepath.Dir(filepath.Dir(r.metadata(claim, "r")))))
	found, err := o.Glob(filepath.Join(r.CDIDir, specName(uid, "*")))
	r.must(err)
	for _, path := range found {
		r.must(o.Remove(path))
	}
}

// files lists all files and empty folders but the three at the top.
func (r *rig) files() []string {
	r.t.Helper()
	var found []string
	root := filepath.Dir(r.DataDir)
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			relative, _ := filepath.Rel(root, path)
			found = append(found, relative)
		}
		return err
	})
	r.must(err)
	slices.Sort(found)
	return found
}

func (r *rig) want(what string, want ...string) {
	r.t.Helper()
	slices.Sort(want)
	if diff := cmp.Diff(want, r.files()); diff != "" {
		r.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// of are the files of a request.
func of(claim, uid, request string) []string {
	return []string{
		"cdi/" + specName(uid, request), "data/dra-device-metadata-cdi/" + specName(uid, request),
		"data/dra-device-metadata/team_" + claim + "/" + request + "/metadata.json",
	}
}

// sweep is a sweep long after everything was written.
func (r *rig) sweep(recorded, prepared []types.UID) error {
	set := func(uids []types.UID) map[types.UID]bool {
		all := map[types.UID]bool{}
		for _, uid := range uids {
			all[uid] = true
		}
		return all
	}
	return r.Sweep(time.Now().Add(time.Hour), func() (Claims, error) { return Claims{set(recorded), set(prepared)}, nil })
}

// TestPrepareAndUnprepare: nothing is left, and files of others stay.
func TestPrepareAndUnprepare(t *testing.T) {
	r := newRig(t)
	others := []string{"cdi/k8s.gpu.nvidia.com-claim_u1.json", "cdi/nic.example.com_metadata_u1_r.json", "data/claims"}
	for _, path := range others {
		full := filepath.Join(filepath.Dir(r.DataDir), path)
		r.must(os.MkdirAll(filepath.Dir(full), 0o755))
		r.must(os.WriteFile(full, []byte("of somebody else"), 0o600))
	}
	r.prepare("a", "u1", "r", "s")
	r.prepare("b", "u2", "r")
	first := slices.Concat(of("a", "u1", "r"), of("a", "u1", "s"))
	r.want("both prepared", slices.Concat(others, first, of("b", "u2", "r"))...)
	info, err := os.Stat(r.metadata("a", "r"))
	if err != nil || info.Mode() != 0o644 {
		t.Errorf("containers of any user must be able to read it: %v, %v", info, err)
	}
	r.prepare("a", "u1", "r", "s")
	r.unprepare("b", "u2")
	r.unprepare("b", "u2")
	r.want("one released", slices.Concat(others, first)...)
	r.unprepare("a", "u1")
	r.want("both released", others...)
	if left, _ := filepath.Glob(filepath.Join(r.DataDir, "dra-device-metadata", "*")); len(left) > 0 {
		t.Errorf("folders are left: %v", left)
	}
}

// TestNewClaimOfTheSameName: the late release of a claim takes nothing from another one that
// has its name.
func TestNewClaimOfTheSameName(t *testing.T) {
	r := newRig(t)
	r.prepare("a", "u1", "r")
	r.prepare("a", "u2", "r")
	r.unprepare("a", "u1")
	r.want("the first released", of("a", "u2", "r")...)
	if content, err := os.ReadFile(r.metadata("a", "r")); string(content) != "about u2" {
		t.Errorf("%s, %v", content, err)
	}
	r.unprepare("a", "u2")
	r.want("both released")
}

// TestSweepFolders: folders of a process that was killed before it wrote into them go, once they
// are old, and no others.
func TestSweepFolders(t *testing.T) {
	r := newRig(t)
	r.prepare("live", "1", "r")
	for _, path := range []string{r.metadata("killed", "r"), r.metadata("live", "s")} {
		r.must(os.MkdirAll(filepath.Dir(path), 0o755))
	}
	r.must(os.MkdirAll(filepath.Join(r.DataDir, "dra-device-metadata", "team_early"), 0o755))
	claims := func() (Claims, error) {
		return Claims{Recorded: map[types.UID]bool{"1": true}, Prepared: map[types.UID]bool{"1": true}}, nil
	}
	want := func(when string, want ...string) {
		t.Helper()
		var found []string
		for _, pattern := range []string{"*", "*/*"} {
			paths, err := filepath.Glob(filepath.Join(r.DataDir, "dra-device-metadata", pattern))
			r.must(err)
			for _, path := range paths {
				relative, err := filepath.Rel(filepath.Join(r.DataDir, "dra-device-metadata"), path)
				r.must(err)
				found = append(found, relative)
			}
		}
		slices.Sort(found)
		if diff := cmp.Diff(want, found); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	r.must(r.Sweep(time.Now(), claims))
	want("young", "team_early", "team_killed", "team_killed/r", "team_live", "team_live/r", "team_live/s")
	r.must(r.Sweep(time.Now().Add(time.Hour), claims))
	want("old", "team_live", "team_live/r")
}

// TestSweep: what is left of claims that are not known goes, and nothing else.
func TestSweep(t *testing.T) {
	r := newRig(t)
	for _, uid := range []string{"prepared", "preparing", "unknown"} {
		r.prepare(uid, uid, "r", "s")
	}
	// A process ended after it had written the first file.
	r.must(os.MkdirAll(filepath.Dir(r.metadata("half", "r")), 0o755))
	r.must(os.WriteFile(r.metadata("half", "r"), nil, 0o600))
	known := slices.Concat(of("prepared", "prepared", "r"), of("prepared", "prepared", "s"), of("preparing", "preparing", "r"), of("preparing", "preparing", "s"))
	unknown := append(slices.Concat(of("unknown", "unknown", "r"), of("unknown", "unknown", "s")), "data/dra-device-metadata/team_half/r/metadata.json")
	// Others were killed while they wrote.
	for _, path := range []string{r.metadata("half", "r"), r.copyOf(specName("u", "r")), filepath.Join(r.CDIDir, specName("u", "r"))} {
		file, err := os.CreateTemp(filepath.Dir(path), temporaryName(filepath.Base(path)))
		r.must(err)
		r.must(file.Close())
		relative, err := filepath.Rel(filepath.Dir(r.DataDir), file.Name())
		r.must(err)
		unknown = append(unknown, relative)
	}

	claims := func() (Claims, error) {
		return Claims{Recorded: map[types.UID]bool{"prepared": true, "preparing": true}, Prepared: map[types.UID]bool{"prepared": true}}, nil
	}
	r.must(r.Sweep(time.Now(), claims))
	r.want("just written", slices.Concat(known, unknown)...)
	r.must(r.Sweep(time.Now().Add(time.Hour), claims))
	r.want("later", known...)
	failed := errors.New("no journal")
	if err := r.Sweep(time.Now().Add(time.Hour), func() (Claims, error) { return Claims{}, failed }); !errors.Is(err, failed) {
		t.Error(err)
	}
	r.want("while the claims are not known", known...)
}

// TestRestore: the specs of prepared claims are made again when their folder was emptied. Those
// of claims that the kubelet has to prepare again are not.
func TestRestore(t *testing.T) {
	r := newRig(t)
	r.prepare("a", "u1", "r")
	r.prepare("b", "u2", "r")
	spec := filepath.Join(r.CDIDir, specName("u1", "r"))
	before, err := os.ReadFile(spec)
	r.must(err)
	r.must(os.RemoveAll(r.CDIDir))
	both := []types.UID{"u1", "u2"}
	r.must(r.sweep(both, both[:1]))
	r.want("restored", append(of("a", "u1", "r"), of("b", "u2", "r")[1:]...)...)
	if after, err := os.ReadFile(spec); string(after) != string(before) || err != nil {
		t.Errorf("it was %s and is %s, %v", before, after, err)
	}
	r.unprepare("b", "u2")
	r.unprepare("a", "u1")
	r.want("released")
}

// TestCannotRemove: the pod ends, and the next sweep removes what is left.
func TestCannotRemove(t *testing.T) {
	r := newRig(t)
	r.prepare("a", "u1", "r")
	// A folder in place of the spec cannot be removed like a file while something is in it.
	spec := filepath.Join(r.CDIDir, specName("u1", "r"))
	r.must(os.Remove(spec))
	r.must(os.MkdirAll(filepath.Join(spec, "something"), 0o755))
	r.unprepare("a", "u1")
	if err := r.sweep(nil, nil); err == nil || !strings.Contains(err.Error(), "u1") {
		t.Errorf("got %v", err)
	}
	r.must(os.RemoveAll(spec))
	r.must(r.sweep(nil, nil))
	r.want("later")
}

// TestHostileSpec: a copy that names files elsewhere, or that makes no sense, leads to nothing
// but its own end.
func TestHostileSpec(t *testing.T) {
	r := newRig(t)
	r.prepare("a", "u1", "r")
	victim := filepath.Join(filepath.Dir(r.DataDir), "victim")
	r.must(os.WriteFile(victim, nil, 0o600))
	path := r.copyOf(specName("u1", "r"))
	for _, content := range []string{
		fmt.Sprintf(`{"devices": [{"containerEdits": {"mounts": [{"hostPath": %q}]}}]}`, victim),
		fmt.Sprintf(`{"devices": [{"containerEdits": {"mounts": [{"hostPath": %q}]}}]}`, r.DataDir+"/dra-device-metadata/../../victim"),
		`{"devices": [`,
	} {
		r.must(os.WriteFile(path, []byte(content), 0o600))
		r.unprepare("a", "u1")
		if _, err := os.Stat(victim); err != nil {
			t.Fatalf("%s: %v", content, err)
		}
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the copy is left: %v", content, err)
		}
	}
	r.must(r.sweep(nil, nil))
	r.want("swept", "victim")
}

// TestRestoreOfReleasedClaim: a spec that is made again while its claim is released, by this
// process or by another instance of the plugin, does not stay.
func TestRestoreOfReleasedClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	other := &Files{DriverName: driver, DataDir: r.DataDir, CDIDir: r.CDIDir}
	for i := range 500 {
		uid := fmt.Sprint("uid-", i)
		r.prepare("claim", uid, "gpu")
		spec := filepath.Join(r.CDIDir, specName(uid, "gpu"))
		r.must(os.Remove(spec))
		var sweeps sync.WaitGroup
		for _, f := range []*Files{r.Files, other} {
			// Two at once may fail, and are tried again.
			sweeps.Go(func() { _ = f.restore(specName(uid, "gpu")) })
		}
		r.must(r.removeSpec(specName(uid, "gpu")))
		sweeps.Wait()
		if _, err := os.Lstat(spec); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("round %d: the spec of a released claim is there: %v", i, err)
		}
	}
}
