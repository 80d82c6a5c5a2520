// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package template makes ResourceSlices of nodes that do not exist yet. An autoscaler needs
// them to know what a new node of a group would offer, as long as the group has no node.
//
// They are made by the driver's own code, from what is known of a model of GPU, or from the
// slices of a node that is like the new ones. What differs between nodes is a placeholder:
// names, PCI addresses and UUIDs, which are different for each GPU, so that claims can ask for
// two devices of one GPU.
package template
