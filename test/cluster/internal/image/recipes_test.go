// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
)

// An image is not built without one of its programs, and the error says how to get it.
func TestRecipesMissAProgram(t *testing.T) {
	folder := func(names ...string) string {
		dir := t.TempDir()
		for _, name := range names {
			put(t, filepath.Join(dir, name), []byte("#!/bin/sh\n"))
		}
		return dir
	}
	for name, c := range map[string]struct {
		build func(string) (Image, error)
		bin   string
		want  string
	}{
		"plugin":     {plugin, folder(), "gpu-kubelet-plugin (run make build)"},
		"supervisor": {plugin, folder("gpu-kubelet-plugin"), "mps-supervisor (run make build)"},
		"hook":       {plugin, folder("gpu-kubelet-plugin", "mps-supervisor"), "partage-hook (run make build)"},
		"probe":      {plugin, folder("gpu-kubelet-plugin", "mps-supervisor", "partage-hook"), "health-probe (run make build)"},
		"NVIDIA's":   {plugin, folder("gpu-kubelet-plugin", "mps-supervisor", "partage-hook", "health-probe"), "nvidia-cdi-hook (run make build)"},
		"CUDA":       {plugin, folder("gpu-kubelet-plugin", "mps-supervisor", "partage-hook", "health-probe", "nvidia-cdi-hook"), "cuda-probe (run make build)"},
		"client":     {demo, folder(), "cuda-client (run make gpusim)"},
		"NIC driver": {demo, folder("cuda-client"), "nic-driver (run make gpusim)"},
		"pause":      {pause, filepath.Join(t.TempDir(), "pause"), "pause (run cluster build)"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.build(c.bin)
			if !errors.Is(err, ErrMissing) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got error %v, want one with %q", err, c.want)
			}
		})
	}
}

func TestDemoHasTheClient(t *testing.T) {
	dir := t.TempDir()
	put(t, filepath.Join(dir, "cuda-client"), []byte("#!/bin/sh\n"))
	put(t, filepath.Join(dir, "nic-driver"), []byte("#!/bin/sh\n"))
	i, err := demo(dir)
	if errors.Is(err, ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	tar, err := i.Layer.Tar()
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"usr/bin/cuda-client", "usr/bin/nic-driver"} {
		if !strings.Contains(string(tar), program) {
			t.Errorf("the layer has no %s", program)
		}
	}
}
