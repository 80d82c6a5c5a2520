// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package release checks what makes a checkout that of a release, and what says so.
package release
