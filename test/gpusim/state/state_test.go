// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// fill sets every field of a value to something of its own, so that a field
// that is forgotten on the way to the file and back is noticed.
func fill(v reflect.Value, next *int) {
	*next++
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), next)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), next)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), next)
		fill(v.Index(1), next)
	case reflect.String:
		v.SetString(fmt.Sprint("text ", *next))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*next))
	case reflect.Float64:
		v.SetFloat(1 / float64(*next))
	default:
		v.SetUint(uint64(*next))
	}
}

func full() *machine.Machine {
	m := &machine.Machine{}
	next := 0
	fill(reflect.ValueOf(m).Elem(), &next)
	for i := range m.Processes {
		p := &m.Processes[i]
		p.GPU, p.Kind, p.Status = i, machine.MPSServer+machine.ProcessKind(i), machine.MPSActive+machine.MPSStatus(i)
		p.Owner = 0 // TestOwner is about that
		p.SM = 99 + i
	}
	for i := range m.Events {
		e := &m.Events[i]
		e.Serial, e.GPU, e.Type = uint64(i+1), i, 1<<i
	}
	for i := range m.Faults {
		f := &m.Faults[i]
		f.GPU, f.Effect, f.Seen, f.Struck = i, machine.Proceed-machine.Effect(i), 0, 0
	}
	// The capability files are named by these.
	for g := range m.GPUs {
		m.GPUs[g].Minor = g
		for i := range m.GPUs[g].MIG.Instances {
			m.GPUs[g].MIG.Instances[i].ID = i + 1
			for c := range m.GPUs[g].MIG.Instances[i].Compute {
				m.GPUs[g].MIG.Instances[i].Compute[c].ID = c
			}
		}
	}
	return m
}

// place is the state's path in a new root.
func place(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), RelativePath)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func create(t *testing.T, m *machine.Machine) (string, *File) {
	t.Helper()
	path := place(t)
	if err := Create(path, m); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return path, f
}

func snapshot(t *testing.T, f *File) *machine.Machine {
	t.Helper()
	m, err := f.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestRoundTrip(t *testing.T) {
	want := full()
	_, f := create(t, want)
	if diff := cmp.Diff(want, snapshot(t, f)); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	want.GPUs = want.GPUs[:1]
	want.GPUs[0].MIG = nil
	want.Processes, want.Faults, want.Latencies = want.Processes[:1], want.Faults[:1], want.Latencies[:1]
	want.Events = want.Events[:1]
	err := f.Update(func(m *machine.Machine) error {
		*m = *want
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, snapshot(t, f)); diff != "" {
		t.Errorf("read back after an update (-want +got):\n%s", diff)
	}
}

func TestUpdateThatFails(t *testing.T) {
	_, f := create(t, full())
	refused := errors.New("refused")
	for name, change := range map[string]func(*machine.Machine) error{
		"by the caller":     func(m *machine.Machine) error { m.Name = "x"; return refused },
		"long name":         func(m *machine.Machine) error { m.GPUs[0].UUID = strings.Repeat("x", 64); return nil },
		"many GPUs":         func(m *machine.Machine) error { m.GPUs = make([]machine.GPU, 17); return nil },
		"many instances":    func(m *machine.Machine) error { m.GPUs[0].MIG.Instances = make([]machine.GPUInstance, 17); return nil },
		"huge number":       func(m *machine.Machine) error { m.GPUs[0].Cores = 1 << 40; return nil },
		"process on no GPU": func(m *machine.Machine) error { m.Processes[0].GPU = 2; return nil },
		"busy process":      func(m *machine.Machine) error { m.Processes[0].SM = 101; return nil },
		"event on no GPU":   func(m *machine.Machine) error { m.Events[0].GPU = 2; return nil },
		"two types":         func(m *machine.Machine) error { m.Events[0].Type = 3; return nil },
		"negative rows":     func(m *machine.Machine) error { m.GPUs[0].Health.RemappedRows.Corrected = -1; return nil },
	} {
		before, _ := f.Generation()
		if err := f.Update(change); err == nil || name == "by the caller" && !errors.Is(err, refused) {
			t.Errorf("%s: error %v", name, err)
		}
		if after, _ := f.Generation(); after != before {
			t.Errorf("%s: a generation was committed", name)
		}
		if diff := cmp.Diff(full(), snapshot(t, f)); diff != "" {
			t.Errorf("%s: the machine changed (-want +got):\n%s", name, diff)
		}
	}
	func() {
		defer func() { _ = recover() }()
		_ = f.Update(func(*machine.Machine) error { panic("in the middle") })
	}()
	if err := f.Update(func(*machine.Machine) error { return nil }); err != nil {
		t.Errorf("update after a panic: %v", err)
	}
}

func TestOpenErrors(t *testing.T) {
	path, f := create(t, full())
	f.Close()
	if _, err := f.Snapshot(); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("snapshot of a closed file: %v", err)
	}
	if _, err := Open(path + "x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	open := func(name string, content []byte) error {
		t.Helper()
		other := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(other, content, 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := Open(other)
		return err
	}
	if err := open("short", text[:len(text)/2]); !errors.Is(err, ErrLayout) {
		t.Errorf("short file: %v", err)
	}
	text[8]++
	if err := open("version", text); !errors.Is(err, ErrLayout) {
		t.Errorf("other version: %v", err)
	}
	if err := open("foreign", []byte("hello")); err == nil || !strings.Contains(err.Error(), "not a gpusim state file") {
		t.Errorf("foreign file: %v", err)
	}
}

// TestCreateReplaces: who has the earlier file keeps it.
func TestCreateReplaces(t *testing.T) {
	path, f := create(t, full())
	other := &machine.Machine{Name: "other"}
	if err := Create(path, other); err != nil {
		t.Fatal(err)
	}
	if got := snapshot(t, f).Name; got != full().Name {
		t.Errorf("the open file became %q", got)
	}
	g, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if diff := cmp.Diff(other, snapshot(t, g)); diff != "" {
		t.Errorf("new file (-want +got):\n%s", diff)
	}
	left, err := filepath.Glob(path + ".*")
	if err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

// TestConcurrency has goroutines with files of their own read and add up; a
// torn machine would have GPUs that differ, a lost update a wrong sum.
func TestConcurrency(t *testing.T) {
	m := full()
	for i := range m.GPUs {
		m.GPUs[i].Cores = 0
	}
	path, f := create(t, m)
	const writers, rounds = 3, 200
	var wg sync.WaitGroup
	work := func(fn func(f *File) error) {
		wg.Go(func() {
			f, err := Open(path)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			for range rounds {
				if err := fn(f); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range writers {
		work(func(f *File) error {
			return f.Update(func(m *machine.Machine) error {
				for i := range m.GPUs {
					m.GPUs[i].Cores++
				}
				return nil
			})
		})
		work(func(f *File) error {
			m, err := f.Snapshot()
			if err == nil && m.GPUs[0].Cores != m.GPUs[1].Cores {
				err = fmt.Errorf("torn: %d and %d", m.GPUs[0].Cores, m.GPUs[1].Cores)
			}
			return err
		})
	}
	wg.Wait()
	if got := snapshot(t, f).GPUs[1].Cores; got != writers*rounds {
		t.Errorf("%d updates counted, want %d", got, writers*rounds)
	}
}

// letIn opens the folders above a path to everybody.
func letIn(t *testing.T, path string) {
	t.Helper()
	for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReadOnly(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, who then becomes somebody else")
	}
	path, f := create(t, full())
	f.Close()
	letIn(t, path)
	asNobody(t, func() {
		f, err := Open(path)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		if diff := cmp.Diff(full(), snapshot(t, f)); diff != "" {
			t.Errorf("read by a user (-want +got):\n%s", diff)
		}
		err = f.Update(func(*machine.Machine) error { return nil })
		if !errors.Is(err, ErrReadOnly) {
			t.Errorf("update by a user: %v", err)
		}
	})
}
