// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Settings for the SELinux context of file systems that containers use, beside a context
// itself.
const (
	// SELinuxAuto is the context of containers' files where SELinux is enabled, and none
	// elsewhere.
	SELinuxAuto = "auto"
	// SELinuxNone leaves the context to the node's policy, by which containers may not use
	// such a file system (tmpfs_t).
	SELinuxNone = "none"
)

// containerFiles is the context of files that every container may use, in the policy of
// container-selinux, which Fedora, RHEL and OpenShift have. It has no categories (MCS), since
// a session has clients in several pods.
const containerFiles = "system_u:object_r:container_file_t:s0"

var seLinuxContext = regexp.MustCompile(`^[A-Za-z0-9_.-]+:[A-Za-z0-9_.-]+:[A-Za-z0-9_.-]+(:[A-Za-z0-9_.,:-]+)?$`)

// ValidSELinux reports whether a text is a setting for FileContext.
func ValidSELinux(setting string) bool {
	return setting == SELinuxAuto || setting == SELinuxNone || seLinuxContext.MatchString(setting)
}

// FileContext returns the SELinux context with which file systems that containers use are
// to be mounted, empty for none. An empty setting is SELinuxAuto.
func (r Roots) FileContext(setting string) (string, error) {
	switch setting {
	case SELinuxNone:
		return "", nil
	case SELinuxAuto, "":
		enabled, err := r.usesSELinux()
		if !enabled || err != nil {
			return "", err
		}
		return containerFiles, nil
	}
	return setting, nil
}

// usesSELinux reports whether SELinux is enabled and has a policy, be it enforced or not.
// A container does not see /sys/fs/selinux, but the kernel has that file system only if
// SELinux was enabled at boot, and a process has a context of several parts only with a
// policy: it is "kernel" before.
func (r Roots) usesSELinux() (bool, error) {
	proc := r.Complete().Proc
	systems, err := os.ReadFile(filepath.Join(proc, "filesystems"))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !slices.Contains(strings.Fields(string(systems)), "selinuxfs") {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find out whether SELinux is enabled: %w", err)
	}
	context, err := os.ReadFile(filepath.Join(proc, "self/attr/current"))
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("find out whether SELinux has a policy: %w", err)
	}
	return strings.Count(string(context), ":") >= 2, nil
}
