// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// nodeChecks are about the kernel and the container runtime.
var nodeChecks = []Check{
	{
		ID:         "node.kernel",
		Assumption: "the kernel has pidfd_open and mounts that forbid symbolic links, which the MPS supervisor uses",
		Code:       "pkg/mps/supervisor",
		Run:        checkKernel,
	},
}

// Of Linux, where MPS_NOSYMFOLLOW came last of what the driver uses.
const kernelMajor, kernelMinor = 5, 10

func checkKernel(ctx context.Context, n *Node) []Finding {
	expected := fmt.Sprintf("Linux %d.%d or newer", kernelMajor, kernelMinor)
	release, err := Ask(ctx, n, File, "kernel release", func(context.Context) (string, error) {
		var name unix.Utsname
		err := unix.Uname(&name)
		return unix.ByteSliceToString(name.Release[:]), err
	})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	major, minor, ok := kernelVersion(release)
	if !ok {
		return []Finding{Cannot("", expected, "the release %q is no version", release)}
	}
	return []Finding{Expect("", major > kernelMajor || major == kernelMajor && minor >= kernelMinor, expected, release)}
}

// kernelVersion returns the first two numbers of a release such as "6.8.0-45-generic".
func kernelVersion(release string) (major, minor int, ok bool) {
	first, rest, _ := strings.Cut(release, ".")
	second, _, _ := strings.Cut(rest, ".")
	second, _, _ = strings.Cut(second, "-")
	major, err := strconv.Atoi(first)
	if err != nil {
		return 0, 0, false
	}
	minor, err = strconv.Atoi(second)
	return major, minor, err == nil
}
