// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package claim turns an allocated ResourceClaim into devices on this node, and
// back.
//
//	claim --Plan--> steps --journal: preparing--> apply --> CDI spec --> journal: prepared
//
// A claim is prepared completely or not at all, whatever dies in between. The
// journal is one file per claim. It says what will be done before it is done,
// by physical address, so that another process finds it by that address after a
// crash; and it is all that Unprepare needs.
//
// GPUs are independent: a claim holds the locks of its own GPUs only, in the
// order of their PCI addresses. The locks are file locks, because two instances
// of the plugin run side by side during an upgrade.
package claim
