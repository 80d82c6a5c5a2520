// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package advise is the command that says which mechanism suits a workload on a fleet, and
// gives the manifest. The rules are those of package economics; this package knows what a
// fleet has for them.
package advise
