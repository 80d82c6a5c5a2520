// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package packing simulates how partitions fill GPUs over time: claims arrive and end, and each
// takes a place that a rule chooses. It compares the order in which the driver publishes its
// devices with other orders, and with rules that the scheduler does not have.
//
// Nodes are what the driver would publish, and counters decide what fits, as they do in the
// scheduler. Tests hold the rule of the first device that fits against the scheduler's allocator.
package packing
