// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

const (
	// hookPath keeps the environment of hooks from being empty.
	hookPath = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
	// hookTimeout is how long a hook may take, in seconds: much more than any needs on a
	// busy node, and less than the two minutes that the kubelet waits for a container.
	hookTimeout = 60
)

// confine gives a hook an environment and a time limit of its own. A hook without an
// environment inherits that of the runtime, and with runc up to 1.2 that of the
// container: what an image sets would reach a program that runs as root of the host.
func confine(hook *specs.Hook) {
	if !slices.ContainsFunc(hook.Env, func(v string) bool { return strings.HasPrefix(v, "PATH=") }) {
		hook.Env = append([]string{hookPath}, hook.Env...)
	}
	if hook.Timeout == nil || *hook.Timeout <= 0 {
		timeout := hookTimeout
		hook.Timeout = &timeout
	}
}
