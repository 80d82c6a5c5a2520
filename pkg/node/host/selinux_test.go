// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestFileContext(t *testing.T) {
	const enabled, none = "nodev\tsysfs\nnodev\tselinuxfs\n\text4\n", "nodev\tsysfs\n\text4\n"
	for name, test := range map[string]struct {
		setting, filesystems, current string
		want                          string
	}{
		"with SELinux":         {SELinuxAuto, enabled, "system_u:system_r:spc_t:s0\x00", containerFiles},
		"by default":           {"", enabled, "system_u:system_r:spc_t:s0-s0:c0.c1023", containerFiles},
		"without a policy":     {SELinuxAuto, enabled, "kernel", ""},
		"with AppArmor":        {SELinuxAuto, none, "unconfined\n", ""},
		"on a simulated node":  {SELinuxAuto, "", "", ""},
		"not wanted":           {SELinuxNone, enabled, "system_u:system_r:spc_t:s0", ""},
		"another one":          {"system_u:object_r:gpu_t:s0:c1,c2", none, "", "system_u:object_r:gpu_t:s0:c1,c2"},
		"another with SELinux": {"system_u:object_r:gpu_t", enabled, "system_u:system_r:spc_t:s0", "system_u:object_r:gpu_t"},
	} {
		t.Run(name, func(t *testing.T) {
			root, roots := tree(t)
			for path, content := range map[string]string{"proc/filesystems": test.filesystems, "proc/self/attr/current": test.current} {
				if content != "" {
					write(t, root, path, content)
				}
			}
			if got, err := roots.FileContext(test.setting); err != nil || got != test.want || !ValidSELinux(got) && got != "" {
				t.Errorf("got %q, %v, want %q", got, err, test.want)
			}
		})
	}
	for _, setting := range []string{"", "Auto", "container_file_t", `system_u:object_r:t:s0",size=1`, "a:b:c d", "a::c:s0"} {
		if ValidSELinux(setting) {
			t.Errorf("%q is valid", setting)
		}
	}
}

// TestContextThatDoesNotExist: neither a kernel without SELinux nor a policy knows it.
func TestContextThatDoesNotExist(t *testing.T) {
	path := filepath.Join(memoryFolder(t, manyFiles), "labelled")
	err := MountTmpfs("test", path, 1<<20, "nobody_u:nothing_r:nowhere_t:s0")
	if errors.Is(err, os.ErrPermission) {
		t.Skip("mounts need root")
	}
	if !errors.Is(err, unix.EINVAL) || !strings.Contains(err.Error(), `the SELinux context "nobody_u:nothing_r:nowhere_t:s0"`) || !strings.Contains(err.Error(), "SELINUX_CONTEXT") {
		t.Errorf("got %v", err)
	}
}
