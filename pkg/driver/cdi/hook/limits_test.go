// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/must"
)

func TestSoftwareLimits(t *testing.T) {
	dir := t.TempDir()
	preload := func(name, content string) mount {
		path := filepath.Join(dir, name)
		must.Do(t, os.WriteFile(path, []byte(content), 0o600))
		return mount{Source: path, Destination: PreloadFile}
	}
	machine := libraryMachines[runtime.GOARCH]
	library := mount{Source: header(t, dir, elf.ELFCLASS64, elf.ET_DYN, machine), Destination: InterposerLibrary}
	libraryOf := func(class elf.Class, kind elf.Type, machine elf.Machine) []mount {
		return []mount{{Source: header(t, dir, class, kind, machine), Destination: InterposerLibrary}, preload("good", InterposerLibrary+"\n")}
	}
	good, old := preload("good", InterposerLibrary+"\n"), preload("old", "/usr/local/vgpu/libhami.so\n")
	both := []mount{library, good}
	const marker = "PARTAGE_LIMITS_12ab34cd=gpu-0"
	for name, test := range map[string]struct {
		env    []string
		mounts []mount
		want   []string // in the error; none if it is empty
	}{
		"limited":                 {[]string{marker, "CUDA_DEVICE_MEMORY_LIMIT=1024m"}, both, nil},
		"several of one owner":    {[]string{marker, "PARTAGE_LIMITS_12ab34cd=gpu-1"}, both, nil},
		"more that is preloaded":  {[]string{marker}, []mount{library, preload("more", "/lib/a.so "+InterposerLibrary)}, nil},
		"the other is covered":    {[]string{marker}, []mount{library, old, good}, nil},
		"two":                     {[]string{marker, "PARTAGE_LIMITS_ffffffff=gpu-1"}, both, []string{"2 shares with limits in software, gpu-0, gpu-1:", "with the sum"}},
		"and a GPU":               {[]string{marker, "PARTAGE_GPU_ffffffff=gpu-1"}, both, []string{"gpu-0 with limits in software and also gpu-1:", "different containers"}},
		"and an MPS share":        {[]string{marker, "PARTAGE_MPS_ffffffff=gpu-1"}, both, []string{"MPS session gpu-1"}},
		"numbered memory":         {[]string{marker, "CUDA_DEVICE_MEMORY_LIMIT_0=9g"}, both, []string{"CUDA_DEVICE_MEMORY_LIMIT_0=9g", "remove it"}},
		"numbered SMs":            {[]string{marker, "CUDA_DEVICE_SM_LIMIT_1=90"}, both, []string{"CUDA_DEVICE_SM_LIMIT_1=90"}},
		"no library":              {[]string{marker}, []mount{good}, []string{"without its limits", "no mount at " + InterposerLibrary}},
		"a link to one":           {[]string{marker}, []mount{{Source: linkTo(t, library.Source), Destination: InterposerLibrary}, good}, nil},
		"gone from the node":      {[]string{marker}, []mount{{Source: dir + "/gone.so", Destination: InterposerLibrary}, good}, []string{"without its limits", dir + "/gone.so", "no such file"}},
		"a program":               {[]string{marker}, libraryOf(elf.ELFCLASS64, elf.ET_EXEC, machine), []string{"without its limits", "ET_EXEC"}},
		"of another machine":      {[]string{marker}, libraryOf(elf.ELFCLASS64, elf.ET_DYN, elf.EM_S390), []string{"without its limits", "EM_S390"}},
		"of 32 bits":              {[]string{marker}, libraryOf(elf.ELFCLASS32, elf.ET_DYN, machine), []string{"without its limits", "ELFCLASS32"}},
		"no library in the file":  {[]string{marker}, []mount{{Source: good.Source, Destination: InterposerLibrary}, good}, []string{"without its limits", good.Source, "bad magic"}},
		"no file":                 {[]string{marker}, []mount{{Source: dir, Destination: InterposerLibrary}, good}, []string{"without its limits", "is a folder"}},
		"nothing is preloaded":    {[]string{marker}, []mount{library}, []string{"without its limits", "no mount at " + PreloadFile}},
		"another is preloaded":    {[]string{marker}, []mount{library, old}, []string{"without its limits", old.Source}},
		"covered by another":      {[]string{marker}, []mount{library, good, old}, []string{"without its limits", old.Source}},
		"preload file is missing": {[]string{marker}, []mount{library, {Source: filepath.Join(dir, "x"), Destination: PreloadFile}}, []string{"without its limits", dir + "/x"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckSoftwareLimits(strings.NewReader(input(bundleWith(t, test.mounts, test.env...))))
			if len(test.want) == 0 && err != nil {
				t.Errorf("got %v", err)
			}
			for _, want := range test.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q", err, want)
				}
			}
		})
	}
}

// header makes a file with the header of a program or library, and nothing else.
func header(t *testing.T, dir string, class elf.Class, kind elf.Type, machine elf.Machine) (path string) {
	t.Helper()
	ident := [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(class), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}
	var h any = elf.Header64{Ident: ident, Type: uint16(kind), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT)}
	if class == elf.ELFCLASS32 {
		h = elf.Header32{Ident: ident, Type: uint16(kind), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT)}
	}
	var b bytes.Buffer
	must.Do(t, binary.Write(&b, binary.LittleEndian, h))
	path = filepath.Join(dir, fmt.Sprintf("%s-%s-%s.so", class, kind, machine))
	must.Do(t, os.WriteFile(path, b.Bytes(), 0o600))
	return path
}

func linkTo(t *testing.T, path string) string {
	t.Helper()
	link := filepath.Join(t.TempDir(), "libvgpu.so")
	must.Do(t, os.Symlink(path, link))
	return link
}
