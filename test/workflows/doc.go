// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package workflows checks what actionlint does not know of the workflows: the targets of make
// that they call, and how far they can be trusted.
package workflows
