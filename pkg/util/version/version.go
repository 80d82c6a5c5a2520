// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package version identifies the build.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set by the linker: -X github.com/partage-dev/partage/pkg/util/version.version=v0.1.0
// and the same for commit. Both may stay empty.
var (
	version string
	commit  string
)

// Info identifies a build.
type Info struct {
	// Version is the name of a release, or "devel" for a build without one.
	Version string
	// Commit is the source revision, with "-dirty" if files had changed, or empty if it
	// is not known.
	Commit   string
	Go       string
	Platform string
}

// Get returns what the linker set, and otherwise what the Go toolchain recorded.
func Get() Info {
	build, _ := debug.ReadBuildInfo()
	return get(version, commit, build)
}

func get(version, commit string, build *debug.BuildInfo) Info {
	info := Info{
		Version:  version,
		Commit:   commit,
		Go:       runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	if build != nil {
		if info.Version == "" && build.Main.Version != "(devel)" {
			info.Version = build.Main.Version
		}
		if info.Commit == "" {
			info.Commit = recordedCommit(build)
		}
	}
	if info.Version == "" {
		info.Version = "devel"
	}
	return info
}

func recordedCommit(build *debug.BuildInfo) string {
	revision, dirty := "", false
	for _, s := range build.Settings {
		switch s.Key {
		case "vcs.revision":
			revision = s.Value
		case "vcs.modified":
			dirty = s.Value == "true"
		}
	}
	if revision != "" && dirty {
		revision += "-dirty"
	}
	return revision
}

// String returns one line: "v0.1.0 (1a2b3c, go1.26.0, linux/amd64)".
func (i Info) String() string {
	if i.Commit == "" {
		return fmt.Sprintf("%s (%s, %s)", i.Version, i.Go, i.Platform)
	}
	return fmt.Sprintf("%s (%s, %s, %s)", i.Version, i.Commit, i.Go, i.Platform)
}
