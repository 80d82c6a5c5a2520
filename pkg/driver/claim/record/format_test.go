// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"flag"
	"hash/crc32"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

var update = flag.Bool("update", false, "write testdata")

// compose is a file's content.
func compose(t *testing.T, r *Record) string {
	t.Helper()
	h, body, err := encode(r, 7)
	must.Do(t, err)
	return string(h.line()) + string(body)
}

// TestFormat checks that the files of this version stay what they are: other versions read them.
func TestFormat(t *testing.T) {
	const path = "testdata/1.record"
	got := compose(t, example())
	if *update {
		must.Do(t, os.WriteFile(path, []byte(got), 0o600))
	}
	want, err := os.ReadFile(path)
	must.Do(t, err)
	expect.Same(t, got, string(want), "written")
	_, r, err := parse(want, uid, boot)
	must.Do(t, err)
	expect.Same(t, r, example(), "read")
}

// resum corrects the checksums.
func resum(text string) string {
	line, body, _ := strings.Cut(text, "\n")
	line, _, _ = strings.Cut(line, " body=")
	h := head{body: crc32.ChecksumIEEE([]byte(body))}
	_, sum, _ := strings.Cut(string(h.line()), " body=")
	line += " body=" + sum[:len("00000000 head=")]
	return line + hex(line) + "\n" + body
}

func hex(line string) string {
	const digits = "0123456789abcdef"
	var text []byte
	for sum, shift := crc32.ChecksumIEEE([]byte(line)), 28; shift >= 0; shift -= 4 {
		text = append(text, digits[sum>>shift&15])
	}
	return string(text)
}

func TestRefused(t *testing.T) {
	const all, none = pciA + "," + pciB, "unknown"
	whole := compose(t, example())
	if resum(whole) != whole {
		t.Fatal("the test computes other checksums")
	}
	for name, test := range map[string]struct {
		old, new string
		sum      bool
		// gpus are those that are known nevertheless.
		gpus  string
		other bool
	}{
		"other version":        {"record/1 ", "record/2 ", true, all, true},
		"no record":            {"partage-claim-record/1 ", "", true, none, false},
		"unknown state":        {"prepared ", "paused   ", true, all, true},
		"unknown mark":         {"marks=[+x+-", "marks=[+x+?", true, all, true},
		"a mark too few":       {"marks=[+x+-", "marks=[+x+", true, all, false},
		"shorter time":         {"arrived=000", "arrived=00", true, all, false},
		"no time":              {"arrived=000", "arrived=00x", true, all, false},
		"head changed":         {"marks=[+", "marks=[-", false, none, false},
		"body changed":         {"team-a", "team-b", false, all, false},
		"no JSON":              {"{\n", "[\n", true, all, false},
		"other claim":          {`"u1"`, `"u2"`, true, all, false},
		"unknown type":         {`"type": "mps"`, `"type": "vfio"`, true, all, true},
		"no address":           {`"pciAddress": "0000:1b:00.0"`, `"pciAddress": ""`, true, all, false},
		"no device":            {`"device": "gpu-0000-3b-00-0"`, `"device": ""`, true, all, false},
		"no partition":         {`"partition"`, `"portion"`, true, all, false},
		"partition of a whole": {`"adminAccess"`, `"partition": {}, "adminAccess"`, true, all, false},
		"no session":           {`"sessions"`, `"seasons"`, true, all, false},
		"cut off":              {whole[len(whole)/2:], "", false, all, false},
		"head cut off":         {whole[30:], "", false, none, false},
		"empty":                {whole, "", false, none, false},
	} {
		t.Run(name, func(t *testing.T) {
			text := strings.Replace(whole, test.old, test.new, 1)
			if text == whole {
				t.Fatal("the test changes nothing")
			}
			if test.sum {
				text = resum(text)
			}
			if _, r, err := parse([]byte(text), uid, boot); err == nil || errors.Is(err, ErrOtherVersion) != test.other {
				t.Errorf("got %v and %v", r, err)
			}
			// The file guards what it may be about.
			s := open(t, t.TempDir(), OS{})
			must.Do(t, put(s, pair(1)))
			must.Do(t, os.WriteFile(s.Path(uid), []byte(text), 0o600))
			guards := s.Snapshot().Guards
			if len(guards) != 1 || guards[0].Claim.UID != uid || guards[0].Path != s.Path(uid) {
				t.Fatalf("guards: %+v", guards)
			}
			for _, address := range []string{pciA, pciB, "0000:5e:00.0"} {
				if got, want := guards[0].GPUs == nil || slices.Contains(guards[0].GPUs, address), test.gpus == none || strings.Contains(test.gpus, address); got != want {
					t.Errorf("it guards GPU %s: %v, want %v", address, got, want)
				}
			}
			if got := strings.Contains(guards[0].Remedy, "version"); got != test.other {
				t.Errorf("remedy %q", guards[0].Remedy)
			}
			if _, err := s.Read(uid); err == nil || s.Update(uid, started) == nil || cleared(s, "") == nil {
				t.Errorf("it can be read or changed: %v", err)
			}
			must.Do(t, put(s, pair(99)))
			if kept, err := os.ReadFile(s.Snapshot().Guards[0].Path); err != nil || string(kept) != text {
				t.Errorf("it is not kept: %v, %q", err, kept)
			}
		})
	}
}

// TestNewerFields checks that what a newer version wrote is ignored, and stays while only the head changes.
func TestNewerFields(t *testing.T) {
	s := open(t, t.TempDir(), OS{})
	must.Do(t, put(s, pair(1)))
	data, err := os.ReadFile(s.Path(uid))
	must.Do(t, err)
	text := resum(strings.Replace(string(data), `"devices"`, `"color": "red", "devices"`, 1))
	must.Do(t, os.WriteFile(s.Path(uid), []byte(text), 0o600))
	for _, change := range []struct {
		step
		red bool
	}{
		{step{do: func(s *Store) error { return s.Update(uid, started) }, want: "preparing 1 ++"}, true},
		{step{do: release(3), want: "releasing 1 ++; released 3"}, true},
		{step{do: func(s *Store) error {
			return s.Update(uid, func(r *Record) error {
				r.Devices[0].Partition.Made = &gpu.PartitionID{InstanceID: 9, UUID: "MIG-1"}
				return nil
			})
		}, want: "releasing 1 ++ made; released 3"}, false},
	} {
		must.Do(t, change.do(s))
		wantView(t, "changed", change.want, s)
		data, err := os.ReadFile(s.Path(uid))
		must.Do(t, err)
		if got := strings.Contains(string(data), `"red"`); got != change.red {
			t.Errorf("after %q the field is there: %v", change.want, got)
		}
	}
}

func TestNotSaved(t *testing.T) {
	s := open(t, t.TempDir(), OS{})
	for name, change := range map[string]func(*Record){
		"UID is a path":          func(r *Record) { r.Claim.UID = "../u1" },
		"no UID":                 func(r *Record) { r.Claim.UID = "" },
		"address with a comma":   func(r *Record) { r.Devices[0].PCIAddress = "a,b" },
		"address with a bracket": func(r *Record) { r.Devices[0].PCIAddress = "a]b" },
	} {
		r := pair(1)
		change(r)
		if err := put(s, r); err == nil {
			t.Errorf("%s: saved", name)
		}
	}
	wantView(t, "nothing is saved", "", s)
	if _, err := Open(t.TempDir(), "../boot", OS{}); err == nil {
		t.Error("a boot ID that is a path")
	}
	if _, err := s.Release("../u1", 3); err == nil || s.Released("../u1", 1) {
		t.Error("released a path")
	}
}

func FuzzParse(f *testing.F) {
	h, body, err := encode(example(), 7)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(append(h.line(), body...))
	stone := head{state: gone, released: 3}
	f.Add(stone.line())
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, data := range [][]byte{data, []byte(resum(string(data)))} {
			_, r, err := parse(data, uid, boot)
			if err != nil || r == nil {
				continue
			}
			h, body, err := encode(r, 7)
			if err != nil {
				t.Fatalf("%q: read, but cannot be written: %v", data, err)
			}
			_, again, err := parse(append(h.line(), body...), uid, boot)
			if diff := cmp.Diff(r, again); err != nil || diff != "" {
				t.Fatalf("%q: %v, -want +got:\n%s", data, err, diff)
			}
		}
	})
}

// TestLookups checks what is found in a record by name.
func TestLookups(t *testing.T) {
	r := example()
	r.Clone().Devices[0].Partition.Made.UUID = "changed in a copy"
	share := r.Device("gpu-0000-3b-00-0-mps-s1")
	if share == nil || !share.Shared().Limited || share.Shared().Interval != "Long" || r.Devices[0].Shared() != (Sharing{}) {
		t.Errorf("got %+v", share)
	}
	if r.Session("none") != nil || !r.Session("gpu-0000-3b-00-0-mps").Running() {
		t.Error("sessions")
	}
	if r.Device("none") != nil || r.Devices[0].Partition.Made.UUID != "MIG-1" {
		t.Error("devices")
	}
}

// TestClone: a copy is the same, and nothing that it points to is the original's, also in fields that come later.
func TestClone(t *testing.T) {
	r := &Record{}
	fill(reflect.ValueOf(r).Elem())
	copied := r.Clone()
	expect.Same(t, copied, r, "copy")
	var shared func(path string, a, b reflect.Value)
	shared = func(path string, a, b reflect.Value) {
		switch a.Kind() {
		case reflect.Pointer, reflect.Slice:
			if a.Pointer() == b.Pointer() {
				t.Errorf("%s is shared", path)
			}
			if a.Kind() == reflect.Pointer {
				shared(path, a.Elem(), b.Elem())
			} else {
				shared(path, a.Index(0), b.Index(0))
			}
		case reflect.Struct:
			for i := range a.NumField() {
				shared(path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
			}
		case reflect.Map, reflect.Interface, reflect.Chan, reflect.Func:
			t.Errorf("%s: nothing is known of copies of a %s", path, a.Kind())
		}
	}
	shared("record", reflect.ValueOf(r).Elem(), reflect.ValueOf(copied).Elem())
}

// fill makes all pointers and slices lead somewhere.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	}
}
