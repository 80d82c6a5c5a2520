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

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
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
	must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
	return path
}

func create(t *testing.T, m *machine.Machine) (string, *File) {
	t.Helper()
	path := place(t)
	must.Do(t, Create(path, m))
	f := must.Get(Open(path))(t)
	t.Cleanup(f.Close)
	return path, f
}

func snapshot(t *testing.T, f *File) *machine.Machine {
	t.Helper()
	return must.Get(f.Snapshot())(t)
}

func TestRoundTrip(t *testing.T) {
	want := full()
	_, f := create(t, want)
	expect.Same(t, snapshot(t, f), want, "read back")
	want.GPUs = want.GPUs[:1]
	want.GPUs[0].MIG = nil
	want.Processes, want.Faults, want.Latencies = want.Processes[:1], want.Faults[:1], want.Latencies[:1]
	want.Events = want.Events[:1]
	err := f.Update(func(m *machine.Machine) error {
		*m = *want
		return nil
	})
	must.Do(t, err)
	expect.Same(t, snapshot(t, f), want, "read back after an update")
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
		expect.Same(t, snapshot(t, f), full(), name, "the machine changed")
	}
	func() {
		defer func() { _ = recover() }()
		_ = f.Update(func(*machine.Machine) error { panic("in the middle") })
	}()
	expect.Do(t, f.Update(func(*machine.Machine) error { return nil }), "update after a panic")
}

func TestOpenErrors(t *testing.T) {
	path, f := create(t, full())
	f.Close()
	expect.Is(t, expect.Err(f.Snapshot()), fs.ErrClosed, "snapshot of a closed file")
	expect.Is(t, expect.Err(Open(path+"x")), fs.ErrNotExist, "absent file")
	text := must.Get(os.ReadFile(path))(t)
	open := func(name string, content []byte) error {
		t.Helper()
		other := filepath.Join(t.TempDir(), name)
		must.Do(t, os.WriteFile(other, content, 0o644))
		_, err := Open(other)
		return err
	}
	expect.Is(t, open("short", text[:len(text)/2]), ErrLayout, "short file")
	text[8]++
	expect.Is(t, open("version", text), ErrLayout, "other version")
	expect.Says(t, open("foreign", []byte("hello")), "not a gpusim state file", "foreign file")
}

// TestCreateReplaces: who has the earlier file keeps it.
func TestCreateReplaces(t *testing.T) {
	path, f := create(t, full())
	other := &machine.Machine{Name: "other"}
	must.Do(t, Create(path, other))
	expect.Equal(t, snapshot(t, f).Name, full().Name, "the open file became")
	g := must.Get(Open(path))(t)
	defer g.Close()
	expect.Same(t, snapshot(t, g), other, "new file")
	expect.Len(t, must.Get(filepath.Glob(path+".*"))(t), 0, "left over")
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
	expect.Equal(t, snapshot(t, f).GPUs[1].Cores, writers*rounds, "updates counted")
}

// letIn opens the folders above a path to everybody.
func letIn(t *testing.T, path string) {
	t.Helper()
	for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		must.Do(t, os.Chmod(dir, 0o755))
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
		expect.Same(t, snapshot(t, f), full(), "read by a user")
		err = f.Update(func(*machine.Machine) error { return nil })
		expect.Is(t, err, ErrReadOnly, "update by a user")
	})
}

func TestFind(t *testing.T) {
	root := t.TempDir()
	touch := func(path string) string {
		t.Helper()
		path = filepath.Join(root, path)
		must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must.Do(t, os.WriteFile(path, nil, 0o755))
		return path
	}
	library := touch("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05")
	tool := touch("usr/bin/nvidia-smi")
	alone := touch("tool")
	find := func(self string) string {
		t.Helper()
		l, err := FindFor(self)
		if err != nil {
			expect.Is(t, err, fs.ErrNotExist, self)
			return "none"
		}
		return strings.ReplaceAll(l.State+" "+l.Root, root, "R")
	}
	check := func(when, self, want string) {
		t.Helper()
		expect.Equal(t, find(self), want, when)
	}
	t.Setenv("GPUSIM_STATE", "")
	check("nothing there", library, "none")
	link := touch("usr/lib/x86_64-linux-gnu/libnvidia-gpusim-state.so.580.95.05")
	check("library, link only", library, "R"+strings.TrimPrefix(link, root)+" R")
	check("tool, link only", tool, "R"+strings.TrimPrefix(link, root)+" R")
	touch(RelativePath)
	check("library", library, "R/var/lib/gpusim/state R")
	check("tool", tool, "R/var/lib/gpusim/state R")
	t.Setenv("GPUSIM_STATE", "/elsewhere/state")
	check("given, not in a root", library, "/elsewhere/state R")
	check("given, tool alone", alone, "/elsewhere/state /")
	t.Setenv("GPUSIM_STATE", "/other"+"/"+RelativePath)
	check("given, in a root", library, "/other/var/lib/gpusim/state /other")
}
