// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package krew checks what a release has of kubectl-gpu by the rules of krew.
package krew
