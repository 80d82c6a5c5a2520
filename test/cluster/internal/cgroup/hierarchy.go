// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cgroup makes, finds and removes the cluster's own control groups, on cgroup v1, v2 and the hybrid of both.
package cgroup

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// Hierarchy is one mounted control group tree.
type Hierarchy struct {
	Mount   string // where it is mounted
	Options string // v1: the mount option that selects it, "cpu,cpuacct" or "name=systemd"; v2: empty
	Own     string // folder of the asking process, below Mount
	V2      bool
}

// Name is the folder below /sys/fs/cgroup under which the tree is known; "." for v2 alone.
func (h Hierarchy) Name() string {
	rel, err := filepath.Rel("/sys/fs/cgroup", h.Mount)
	if err != nil || strings.HasPrefix(rel, "..") {
		return filepath.Base(h.Mount)
	}
	return rel
}

type cgroupMount struct {
	root, point string
	options     []string
	v2          bool
}

// Parse joins the text of /proc/PID/cgroup with that of /proc/PID/mountinfo (cgroups(7), proc(5)).
// Trees that are not mounted are left out.
func Parse(cgroups, mountinfo string) ([]Hierarchy, error) {
	mounts, err := parseMounts(mountinfo)
	if err != nil {
		return nil, err
	}
	var all []Hierarchy
	for line := range strings.Lines(cgroups) {
		line = strings.TrimSuffix(line, "\n")
		if line == "" {
			continue
		}
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 {
			return nil, fmt.Errorf("parse /proc/self/cgroup line %q: want id:controllers:path", line)
		}
		controllers, path := fields[1], fields[2]
		i := slices.IndexFunc(mounts, func(m cgroupMount) bool { return m.holds(controllers) })
		if i < 0 {
			continue
		}
		m := mounts[i]
		all = append(all, Hierarchy{
			Mount: m.point, Options: controllers, V2: m.v2, Own: filepath.Join(m.point, below(m.root, path)),
		})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no control group tree is mounted; mount cgroup2 on /sys/fs/cgroup")
	}
	return all, nil
}

// below returns path relative to the part of the tree that is mounted. A path outside that part
// (a process that entered another cgroup namespace) is taken as the part's root.
func below(root, path string) string {
	if strings.HasPrefix(path, "/..") {
		return "/"
	}
	rel, err := filepath.Rel(root, path)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return "/"
	}
	return rel
}

func (m cgroupMount) holds(controllers string) bool {
	if controllers == "" {
		return m.v2
	}
	if m.v2 {
		return false
	}
	for c := range strings.SplitSeq(controllers, ",") {
		if !slices.Contains(m.options, c) {
			return false
		}
	}
	return true
}

func parseMounts(mountinfo string) ([]cgroupMount, error) {
	var mounts []cgroupMount
	for line := range strings.Lines(mountinfo) {
		line = strings.TrimSuffix(line, "\n")
		left, right, ok := strings.Cut(line, " - ")
		if !ok {
			if line == "" {
				continue
			}
			return nil, fmt.Errorf("parse mountinfo line %q: no separator", line)
		}
		super, own := strings.Fields(right), strings.Fields(left)
		if len(super) < 3 || len(own) < 6 {
			return nil, fmt.Errorf("parse mountinfo line %q: too few fields", line)
		}
		if super[0] != "cgroup" && super[0] != "cgroup2" {
			continue
		}
		mounts = append(mounts, cgroupMount{
			root: unescape(own[3]), point: unescape(own[4]), options: strings.Split(super[2], ","), v2: super[0] == "cgroup2",
		})
	}
	return mounts, nil
}

var escapes = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func unescape(s string) string { return escapes.Replace(s) }
