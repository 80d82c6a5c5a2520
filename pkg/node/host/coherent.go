// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"path/filepath"
)

// userManagement is the parameter that says who manages the memory of coherent GPUs: 0 is the driver. All
// drivers have it. The newer ones set it by CoherentGPUMemoryMode, if that is given, and from R615 on
// to 0 if it is not and a GPU is coherent.
const userManagement = "EnableUserNUMAManagement"

// DriverManagesMemory reports whether the driver manages the memory of GPUs that are coherent with
// the CPU, such as GH200 and GB200, so that the kernel has no NUMA nodes of it. It means nothing for other GPUs:
// the parameter is often set on all nodes. The error wraps fs.ErrNotExist when the driver is not loaded.
func (r Roots) DriverManagesMemory() (bool, error) {
	path := filepath.Join(r.Complete().Proc, "driver/nvidia/params")
	data, err := r.driverFile("", "parameters", path)
	if err != nil {
		return false, fmt.Errorf("read the parameters of the NVIDIA driver: %w", err)
	}
	managed, found := valueOf(data, userManagement)
	if !found {
		return false, fmt.Errorf("read the parameters of the NVIDIA driver: %s has no %s", path, userManagement)
	}
	return managed == "0", nil
}
