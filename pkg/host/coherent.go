// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Parameters of the driver's module that say who manages the memory of coherent GPUs. The newer
// one, CoherentGPUMemoryMode, sets the older one. From R615 on the driver sets that by itself where the newer
// one is not given and a GPU is coherent.
const (
	coherentMode   = "CoherentGPUMemoryMode"
	userManagement = "EnableUserNUMAManagement"
)

// DriverManagesMemory reports whether the driver manages the memory of GPUs that are coherent with
// the CPU, such as GH200 and GB200, so that the kernel has no NUMA nodes of it. It means nothing for other GPUs:
// the parameter is often set on all nodes. The error wraps fs.ErrNotExist when the driver is not loaded.
func (r Roots) DriverManagesMemory() (bool, error) {
	path := filepath.Join(r.Complete().Proc, "driver/nvidia/params")
	data, err := os.ReadFile(path)
	if err != nil {
		return false, fmt.Errorf("read the parameters of the NVIDIA driver: %w", err)
	}
	managed := false
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ":")
		switch value = strings.Trim(value, ` "`); name {
		case coherentMode:
			managed = managed || value == "driver"
		case userManagement:
			managed = managed || value == "0"
		}
	}
	if err := lines.Err(); err != nil {
		return false, fmt.Errorf("read the parameters of the NVIDIA driver in %s: %w", path, err)
	}
	return managed, nil
}
