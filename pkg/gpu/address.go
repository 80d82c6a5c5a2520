// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"cmp"
	"slices"
)

// SortPCIAddresses sorts PCI addresses in place and returns each once.
func SortPCIAddresses(addresses []string) []string {
	slices.SortFunc(addresses, ComparePCIAddresses)
	return slices.Compact(addresses)
}

// ComparePCIAddresses orders PCI addresses by number: one with a longer PCI domain
// comes later.
func ComparePCIAddresses(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}
