// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/driver/users"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/node/host"
)

// users finds the processes on GPUs that no claim explains, of those that NVML lists.
func (c *config) users(
	ctx context.Context, holders *holder.Finder, list func(ctx context.Context, pciAddress string) ([]gpu.Process, error),
	sessions func(context.Context) ([]mps.Status, error),
) *users.Users {
	if _, err := c.roots().PodNames(); err != nil {
		klog.FromContext(ctx).Error(err, "Pods without a claim that have a GPU open are taken for users of it, whatever their namespace, while their names are not known")
	}
	return &users.Users{
		Finder: holders, List: list, Ignored: c.isIgnored,
		Servers: func(ctx context.Context) ([]int, error) {
			all, err := sessions(ctx)
			var servers []int
			for i := range all {
				servers = append(servers, all[i].Servers...)
			}
			return servers, err
		},
		Clock: host.SinceBoot,
	}
}

// isIgnored reports whether pods of a namespace may use GPUs without a claim. The MPS servers are in the driver's own.
func (c *config) isIgnored(namespace string) bool {
	return namespace == c.podNamespace || slices.Contains(strings.Split(c.ignoredNamespaces, ","), namespace)
}
