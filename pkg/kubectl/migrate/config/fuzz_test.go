// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"
)

// maxInput keeps inputs small, so that many are tried.
const maxInput = 1 << 14

func seed(f *testing.F, folder string, more ...string) {
	f.Helper()
	files, err := filepath.Glob(filepath.Join("../testdata", folder, "*"))
	if err != nil || len(files) == 0 {
		f.Fatalf("no examples in %s: %v", folder, err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, text := range more {
		f.Add([]byte(text))
	}
}

// checkAny checks what holds for every input: it is refused with a short message, or the result
// is valid.
func checkAny(t *testing.T, data []byte, o Options, translate func([]byte, Options) (*Result, error)) {
	t.Helper()
	if len(data) > maxInput {
		t.Skip("too long")
	}
	r, err := translate(data, o)
	if err != nil {
		if len(err.Error()) > 64<<10 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
		return
	}
	if _, err := r.Values(); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(r.Findings.Comment("title")) {
		if line != "\n" && !strings.HasPrefix(line, "# ") {
			t.Errorf("no comment: %q", line)
		}
	}
	classes, err := r.Classes()
	if err != nil {
		t.Fatal(err)
	}
	checkObjects(t, classes, &resourceapi.DeviceClass{}, func(o *resourceapi.DeviceClass) string { return o.Name })
}

func checkObjects[T any](t *testing.T, stream []byte, _ *T, name func(*T) string) {
	t.Helper()
	if len(stream) == 0 {
		return
	}
	for _, text := range strings.Split(string(stream), "---\n") {
		object := new(T)
		if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if wrong := validation.IsDNS1123Subdomain(name(object)); len(wrong) > 0 {
			t.Errorf("name %q: %v", name(object), wrong)
		}
	}
}

func FuzzDevicePlugin(f *testing.F) {
	seed(f, "device-plugin")
	f.Fuzz(func(t *testing.T, data []byte) {
		checkAny(t, data, Options{Driver: "gpu.nvidia.com"}, DevicePlugin)
		checkAny(t, data, Options{Driver: "gpu.nvidia.com", SingleProfile: "1g.10gb"}, DevicePlugin)
	})
}

func FuzzMIGParted(f *testing.F) {
	seed(f, "mig-parted")
	f.Fuzz(func(t *testing.T, data []byte) { checkAny(t, data, Options{Driver: "gpu.nvidia.com"}, MIGParted) })
}

func FuzzCastAI(f *testing.F) {
	seed(f, "castai")
	f.Fuzz(func(t *testing.T, data []byte) { checkAny(t, data, Options{Driver: "gpu.nvidia.com"}, CastAI) })
}
