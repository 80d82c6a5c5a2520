// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	tests := map[string][]Hierarchy{
		"hybrid": {
			{Mount: "/sys/fs/cgroup/systemd", Options: "name=systemd", Own: "/sys/fs/cgroup/systemd"},
			{Mount: "/sys/fs/cgroup/pids", Options: "pids", Own: "/sys/fs/cgroup/pids"},
			{Mount: "/sys/fs/cgroup/memory", Options: "memory", Own: "/sys/fs/cgroup/memory/jobs/7"},
			{Mount: "/sys/fs/cgroup/cpuset", Options: "cpuset", Own: "/sys/fs/cgroup/cpuset"},
			{Mount: "/sys/fs/cgroup/unified", Own: "/sys/fs/cgroup/unified", V2: true},
		},
		"v1-systemd": {
			{Mount: "/sys/fs/cgroup/cpu,cpuacct", Options: "cpu,cpuacct", Own: "/sys/fs/cgroup/cpu,cpuacct/user.slice"},
			{Mount: "/sys/fs/cgroup/systemd", Options: "name=systemd", Own: "/sys/fs/cgroup/systemd/user.slice/user-0.slice/session-1.scope"},
		},
		"v1-container": {
			{Mount: "/sys/fs/cgroup/memory", Options: "memory", Own: "/sys/fs/cgroup/memory"},
			{Mount: "/sys/fs/cgroup/pids", Options: "pids", Own: "/sys/fs/cgroup/pids/sub"},
		},
		"v2": {
			{Mount: "/sys/fs/cgroup", Own: "/sys/fs/cgroup/user.slice/user-1000.slice/session-3.scope", V2: true},
		},
		"v2-container": {
			{Mount: "/sys/fs/cgroup", Own: "/sys/fs/cgroup", V2: true},
		},
		"v2-entered": { // a process whose cgroup lies outside the namespace it looks from
			{Mount: "/sys/fs/cgroup", Own: "/sys/fs/cgroup", V2: true},
		},
	}
	for name, want := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Parse(read(t, name+".cgroup"), read(t, name+".mountinfo"))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	mounts := read(t, "v2.mountinfo")
	tests := map[string][2]string{
		"nothing mounted":     {"0::/\n", "22 27 0:21 / /proc rw,relatime - proc proc rw\n"},
		"broken cgroup line":  {"0\n", mounts},
		"broken mount line":   {"0::/\n", "22 27 0:21 / /proc rw\n"},
		"too few mount parts": {"0::/\n", "22 27 - proc\n"},
	}
	for name, in := range tests {
		t.Run(name, func(t *testing.T) {
			if got, err := Parse(in[0], in[1]); err == nil {
				t.Errorf("got %v, want an error", got)
			}
		})
	}
}

func TestName(t *testing.T) {
	for mount, want := range map[string]string{
		"/sys/fs/cgroup": ".", "/sys/fs/cgroup/cpu,cpuacct": "cpu,cpuacct", "/sys/fs/cgroup/unified": "unified", "/cg/memory": "memory",
	} {
		if got := (Hierarchy{Mount: mount}).Name(); got != want {
			t.Errorf("Name of %s = %q, want %q", mount, got, want)
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
