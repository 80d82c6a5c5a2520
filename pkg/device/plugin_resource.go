// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import "strings"

// IsPluginResource reports whether an extended resource is one under which NVIDIA's device plugin
// offers GPUs or parts of them, such as nvidia.com/gpu, nvidia.com/gpu.shared and
// nvidia.com/mig-1g.10gb. The domain nvidia.com also has the network cards of NVIDIA's network operator.
func IsPluginResource(resource string) bool {
	name, ok := strings.CutPrefix(resource, "nvidia.com/")
	return ok && (name == "gpu" || strings.HasPrefix(name, "gpu.") || strings.HasPrefix(name, "mig-"))
}
