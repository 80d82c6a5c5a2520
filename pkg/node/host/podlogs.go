// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"
	"strings"
)

// DefaultPodLogs is where kubelets have the logs of pods, unless their configuration says otherwise (podLogsDir).
const DefaultPodLogs = "/var/log/pods"

// PodNames returns "namespace/name" of the pods of this node by their UIDs. The kubelet makes a folder for the logs of each,
// NAMESPACE_NAME_UID, before it starts a container, and removes it after the last has gone. No part of the name may have
// an underscore.
func (r Roots) PodNames() (map[string]string, error) {
	entries, err := os.ReadDir(r.Complete().PodLogs)
	if err != nil {
		return nil, fmt.Errorf("find the names of the pods of this node: %w", err)
	}
	names := make(map[string]string, len(entries))
	for _, entry := range entries {
		parts := strings.Split(entry.Name(), "_")
		if len(parts) != 3 || parts[0] == "" || parts[1] == "" || parts[2] == "" || !entry.IsDir() {
			continue
		}
		name := parts[0] + "/" + parts[1]
		if other, found := names[parts[2]]; found && other != name {
			name = "" // one of them is not the kubelet's
		}
		names[parts[2]] = name
	}
	return names, nil
}
