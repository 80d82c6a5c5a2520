// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

// TestRecordsOfOldBuilds checks that what a build before the first release has written guards the GPUs, is
// refused with what to do, and blocks nothing once it was removed, or the machine was started anew.
func TestRecordsOfOldBuilds(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, n *harness.Node, folder string){
		"removed": func(t *testing.T, _ *harness.Node, folder string) {
			if err := os.RemoveAll(folder); err != nil {
				t.Fatal(err)
			}
		},
		"reboot": func(t *testing.T, n *harness.Node, _ string) {
			n.Reboot(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "h100x1")
			folder := filepath.Join(n.PluginsDir, harness.DriverName, "claims")
			if err := os.MkdirAll(folder, 0o750); err != nil {
				t.Fatal(err)
			}
			for name, text := range map[string]string{"claims/0af2.json": `{"apiVersion": "journal.partage.dev/v1"}`, "boot": n.Machine(t).BootID} {
				if err := os.WriteFile(filepath.Join(filepath.Dir(folder), name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			p := n.Start(t, harness.Frequent...)
			p.Ready(t)
			guarded := n.AllocateNamed(n.DeviceNames(t, []harness.Device{{GPU: 0}}))
			if _, err := p.TryPrepare(t.Context(), guarded, harness.KubeletTimeout); err == nil || !strings.Contains(err.Error(), "drain the node, then remove "+folder) {
				t.Errorf("a GPU that a claim of an old build may have: %v", err)
			}
			p.Kill()
			end(t, n, folder)
			p = n.Start(t, harness.Frequent...)
			p.Ready(t)
			p.MustPrepare(t, guarded)
			p.MustUnprepare(t, guarded)
			n.WantClean(t)
		})
	}
}
