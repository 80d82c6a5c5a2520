// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package edit

import (
	"path/filepath"
	"strconv"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
)

// MemoryLimit has the GPU's driver hold each container to a part of the memory.
type MemoryLimit struct {
	// PCIAddress and UUID are the GPU's.
	PCIAddress, UUID string
	// Hook is the path on the host of the program that has the limit set, and refuses a container that would have none.
	// Sockets is the folder on the host in which it finds the plugin.
	Hook, Sockets string
	// Owner is unique on the node: a claim and its share.
	Owner string
	// HardBytes are what a container can have, of which SoftBytes are kept for it.
	SoftBytes, HardBytes int64
}

// Edits never fails.
func (m MemoryLimit) Edits() (cdi.Edits, error) {
	bytes := func(n int64) string { return strconv.FormatInt(n, 10) }
	return cdi.Edits{
		Env: []string{hook.Marker(hook.MemoryMarkerPrefix, m.Owner) + "=" + m.PCIAddress},
		Hooks: []cdi.Hook{{Path: m.Hook, Args: []string{
			filepath.Base(m.Hook), hook.MemoryLimitCommand, "--" + hook.SocketsFlag, m.Sockets, "--" + hook.GPUFlag, m.PCIAddress,
			"--" + hook.UUIDFlag, m.UUID, "--" + hook.SoftFlag, bytes(m.SoftBytes), "--" + hook.HardFlag, bytes(m.HardBytes),
		}}},
	}, nil
}
