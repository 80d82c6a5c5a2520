// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	isc = "Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby granted, " +
		"provided that the above copyright notice and this permission notice appear in all copies. THE SOFTWARE IS PROVIDED \"AS IS\" AND " +
		"THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE INCLUDING ALL IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS. " +
		"IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL, DIRECT, INDIRECT, OR CONSEQUENTIAL DAMAGES OR ANY DAMAGES WHATSOEVER " +
		"RESULTING FROM LOSS OF USE, DATA OR PROFITS, WHETHER IN AN ACTION OF CONTRACT, NEGLIGENCE OR OTHER TORTIOUS ACTION, ARISING OUT OF " +
		"OR IN CONNECTION WITH THE USE OR PERFORMANCE OF THIS SOFTWARE.\n"
	mpl = "This Source Code Form is subject to the terms of the Mozilla Public License, v. 2.0. If a copy of the MPL was not distributed " +
		"with this file, You can obtain one at https://mozilla.org/MPL/2.0/.\n"
	gpl = "This program is free software: you can redistribute it and/or modify it under the terms of the GNU General Public License as " +
		"published by the Free Software Foundation, either version 3 of the License, or (at your option) any later version.\n"
)

// TestCollect: what a module says of its rights is passed on, and only licences that are allowed.
func TestCollect(t *testing.T) {
	const excepted = "github.com/cyphar/filepath-securejoin"
	for name, test := range map[string]struct {
		path  string
		files map[string]string
		want  string // in the error; without one there is none
	}{
		"allowed":             {"example.com/a", map[string]string{"LICENSE": isc, "NOTICE": "Written by A."}, ""},
		"none":                {"example.com/a", map[string]string{"NOTICE": "Written by A."}, "example.com/a v1 has no licence"},
		"unknown":             {"example.com/a", map[string]string{"LICENSE": "Ask my lawyer."}, "0 % of the text is that of a known licence"},
		"one of two":          {"example.com/a", map[string]string{"LICENSE": isc, "COPYING": mpl}, "COPYING: the licence is MPL-2.0, want one of"},
		"one of a folder":     {"example.com/a", map[string]string{"LICENSE": isc, "p/LICENSE.md": gpl}, "p/LICENSE.md: the licence is GPL-3.0"},
		"excepted":            {excepted, map[string]string{"LICENSE.BSD": isc, "LICENSE.MPL-2.0": mpl}, ""},
		"another of excepted": {excepted, map[string]string{"LICENSE": gpl}, "the licence is GPL-3.0"},
		"code about licences": {"example.com/a", map[string]string{"LICENSE": isc, "license.go": "package a"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range test.files {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, file)), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.MkdirAll(filepath.Join(dir, "p"), 0o700); err != nil {
				t.Fatal(err)
			}
			texts, err := collect(map[module][]string{{Path: test.path, Version: "v1", Dir: dir}: {filepath.Join(dir, "p"), dir}})
			if test.want != "" {
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Fatalf("%v, want an error with %q", err, test.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			if err := write(texts, &out); err != nil {
				t.Fatal(err)
			}
			for file, text := range test.files {
				if has := strings.Contains(out.String(), strings.TrimSpace(text)); has == strings.HasSuffix(file, ".go") {
					t.Errorf("%s is among the notices: %t\n%s", file, has, out.String())
				}
			}
			if who := "\n" + test.path + " v1\n"; !strings.Contains(out.String(), who) {
				t.Errorf("the notices do not say whose they are:\n%s", out.String())
			}
		})
	}
}
