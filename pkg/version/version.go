// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package version says which build this is.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set by the linker: -X github.com/partage-dev/partage/pkg/version.version=v0.1.0
// and the same for commit. Both may stay empty.
var (
	version string
	commit  string
)

// Info identifies a build.
type Info struct {
	// Version is a release name, or "devel" where the build was given none.
	Version string
	// Commit is the source revision, with "-dirty" where files had changed;
	// empty where the build does not know.
	Commit   string
	Go       string
	Platform string
}

// Get prefers what the linker set and falls back to what the Go toolchain
// recorded.
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

// String is one line: "v0.1.0 (1a2b3c, go1.26.0, linux/amd64)".
func (i Info) String() string {
	if i.Commit == "" {
		return fmt.Sprintf("%s (%s, %s)", i.Version, i.Go, i.Platform)
	}
	return fmt.Sprintf("%s (%s, %s, %s)", i.Version, i.Commit, i.Go, i.Platform)
}
