// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package version

import (
	"runtime/debug"
	"strings"
	"testing"
)

func TestGet(t *testing.T) {
	recorded := &debug.BuildInfo{
		Main: debug.Module{Version: "v0.2.0"},
		Settings: []debug.BuildSetting{
			{Key: "vcs.revision", Value: "abc"},
			{Key: "vcs.modified", Value: "true"},
		},
	}
	for name, test := range map[string]struct {
		version, commit string
		build           *debug.BuildInfo
		want            string
	}{
		"linker wins":     {"v1.0.0", "123", recorded, "v1.0.0 (123, "},
		"recorded":        {"", "", recorded, "v0.2.0 (abc-dirty, "},
		"nothing known":   {"", "", nil, "devel (go"},
		"a working tree":  {"", "", &debug.BuildInfo{Main: debug.Module{Version: "(devel)"}}, "devel (go"},
		"only the commit": {"", "123", &debug.BuildInfo{}, "devel (123, go"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := get(test.version, test.commit, test.build).String(); !strings.HasPrefix(got, test.want) {
				t.Errorf("got %q, want it to start with %q", got, test.want)
			}
		})
	}
}
