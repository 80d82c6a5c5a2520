// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

func TestPodNames(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for _, name := range []string{
		"team-a_train-0_3f2a1b4c-0000-4000-8000-0123456789ab",
		"kube-system_etcd-node.example.com_2f0c5c5d4e1a4f6c8b7a9d0e1f2a3b4c", // static
		"a_twice_u2", "b_twice_u2", "same_twice_u3",
		"_name_u4", "namespace__u5", "namespace_name_", "two_parts", "more_than_three_parts", "lost+found",
	} {
		must(t, os.Mkdir(filepath.Join(folder, name), 0o755))
	}
	must(t, os.WriteFile(filepath.Join(folder, "a_file_u6"), nil, 0o600))
	got, err := Roots{PodLogs: folder}.PodNames()
	want := map[string]string{
		"3f2a1b4c-0000-4000-8000-0123456789ab": "team-a/train-0",
		"2f0c5c5d4e1a4f6c8b7a9d0e1f2a3b4c":     "kube-system/etcd-node.example.com",
		"u2":                                   "",
		"u3":                                   "same/twice",
	}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	if _, err := (Roots{PodLogs: filepath.Join(folder, "none")}).PodNames(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the folder: %v", err)
	}
}
