// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
)

// object is an ELF file with nothing but what the dynamic loader reads.
type object struct {
	machine elf.Machine
	interp  string
	needed  []string
	runPath string
}

// write makes the file: header, program headers, interpreter, string table, dynamic section, section headers.
func (o object) write(t *testing.T, path string) {
	t.Helper()
	strs := []byte{0}
	str := func(s string) uint64 {
		at := len(strs)
		strs = append(append(strs, s...), 0)
		return uint64(at)
	}
	var dyn []elf.Dyn64
	for _, n := range o.needed {
		dyn = append(dyn, elf.Dyn64{Tag: int64(elf.DT_NEEDED), Val: str(n)})
	}
	if o.runPath != "" {
		dyn = append(dyn, elf.Dyn64{Tag: int64(elf.DT_RUNPATH), Val: str(o.runPath)})
	}
	dyn = append(dyn, elf.Dyn64{Tag: int64(elf.DT_NULL)})
	interp := append([]byte(o.interp), 0)
	const header, prog, section = 64, 56, 64
	at := uint64(header + prog)
	interpAt := at
	strAt := interpAt + uint64(len(interp))
	dynAt := strAt + uint64(len(strs))
	dynLen := uint64(len(dyn) * 16)
	kind := elf.PT_NULL
	if o.interp != "" {
		kind = elf.PT_INTERP
	}
	h := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(o.machine), Version: uint32(elf.EV_CURRENT), Phoff: header, Shoff: dynAt + dynLen,
		Ehsize: header, Phentsize: prog, Phnum: 1, Shentsize: section, Shnum: 3, Shstrndx: 1,
	}
	copy(h.Ident[:], []byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)})
	var out bytes.Buffer
	for _, part := range []any{
		h, elf.Prog64{Type: uint32(kind), Off: interpAt, Filesz: uint64(len(interp)), Memsz: uint64(len(interp))}, interp, strs, dyn,
		elf.Section64{}, elf.Section64{Type: uint32(elf.SHT_STRTAB), Off: strAt, Size: uint64(len(strs))},
		elf.Section64{Type: uint32(elf.SHT_DYNAMIC), Off: dynAt, Size: dynLen, Link: 1, Entsize: 16},
	} {
		if err := binary.Write(&out, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	put(t, path, out.Bytes())
}

func put(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}
