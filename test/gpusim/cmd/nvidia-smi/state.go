// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/partage-dev/partage/test/gpusim/state"

// withState opens the state of the machine that this program is on.
func withState(use func(*state.File) error) error {
	at, err := state.Find()
	if err != nil {
		return err
	}
	f, err := state.Open(at.State)
	if err != nil {
		return err
	}
	defer f.Close()
	return use(f)
}
