// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// traces are all that claims leave on a node.
type traces struct {
	GPUs []gpuTraces
	// Files are the contents of CDI specs, journal and locks, by path.
	Files map[string]string
}

type gpuTraces struct {
	Current, Pending bool
	Instances        []machine.GPUInstance
}

// traces reads everything, so that files that nobody expects are found as well.
func (n *node) traces(t testing.TB) traces {
	t.Helper()
	all := traces{Files: map[string]string{}}
	for _, g := range n.machine(t).GPUs {
		var one gpuTraces
		if g.MIG != nil {
			one = gpuTraces{Current: g.MIG.Current, Pending: g.MIG.Pending, Instances: g.MIG.Instances}
		}
		slices.SortFunc(one.Instances, func(a, b machine.GPUInstance) int {
			return cmp.Compare(a.Placement.Start, b.Placement.Start)
		})
		all.GPUs = append(all.GPUs, one)
	}
	data := filepath.Join(n.plugins, driverName)
	for prefix, dir := range map[string]string{
		"cdi": n.cdi, "claims": filepath.Join(data, "claims"), "locks": filepath.Join(data, "locks"),
		"quarantine": filepath.Join(data, "quarantine"),
	} {
		if err := readTree(dir, prefix, all.Files); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// readTree adds the files below a folder. One that vanishes meanwhile, or a
// folder that is not there, is not there.
func readTree(dir, prefix string, files map[string]string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || entry.IsDir() {
			return err
		}
		// The lock of a GPU is a file that stays.
		name := filepath.Join(prefix, strings.TrimPrefix(path, dir))
		if strings.HasPrefix(name, "locks/gpu-") {
			return nil
		}
		data, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		files[name] = string(data)
		return err
	})
}

// diff is empty where there is no difference.
func (want traces) diff(got traces) string { return gocmp.Diff(want, got) }

// checkDevice fails unless a device of a claim is there and a container that
// gets it has its device nodes.
func (n *node) checkDevice(uid, id string, d request, g *machine.GPU) error {
	var instance *machine.GPUInstance
	if d.profile != "" {
		if instance = (place{d.profile, d.start}).find(g); instance == nil {
			return fmt.Errorf("the GPU has %v", places(g))
		}
	} else if g.MIG != nil && g.MIG.Current {
		return errors.New("MIG mode is on")
	}
	want, err := n.wantNodes(g, instance)
	if err != nil {
		return err
	}
	got, err := n.specNodes(uid, id)
	if err != nil {
		return err
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("its CDI spec has the device nodes %v, want %v", got, want)
	}
	return nil
}
