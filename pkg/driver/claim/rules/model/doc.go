// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package model explores package rules together with a world that goes wrong: processes die, GPUs hang or are lost, disks
// fill up, records become unreadable, the machine is started again, and strangers make and destroy instances. It visits
// the states that small configurations can come to, up to a number of each, and asserts what must hold in them. It has tests only.
package model
