// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cost is the command that says what workloads cost, and what sharing saves, on the
// GPUs of a fleet: by what claims have now.
package cost
