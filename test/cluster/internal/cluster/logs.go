// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

const logSuffix = ".log"

// Components returns the names of the logs that there are: COMPONENT of the control plane, NODE/COMPONENT of a node.
func Components(c layout.Cluster) ([]string, error) {
	var names []string
	err := fs.WalkDir(os.DirFS(c.Logs()), ".", func(file string, _ fs.DirEntry, err error) error {
		if name, ok := strings.CutSuffix(file, logSuffix); ok && err == nil {
			names = append(names, name)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list logs: %w", err)
	}
	return names, nil
}

// FindLog returns the log of a component. Its node need not be named where only one has such a component.
func FindLog(c layout.Cluster, node, component string) (string, error) {
	names, err := Components(c)
	if err != nil {
		return "", err
	}
	found := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		if node != "" {
			return name != path.Join(node, component)
		}
		return name != component && path.Base(name) != component
	})
	switch len(found) {
	case 0:
		return "", fmt.Errorf("no log of %q; there are %s", path.Join(node, component), strings.Join(names, ", "))
	case 1:
		return filepath.Join(c.Logs(), found[0]+logSuffix), nil
	}
	return "", fmt.Errorf("several logs of %q: choose one of %s", component, strings.Join(found, ", "))
}
