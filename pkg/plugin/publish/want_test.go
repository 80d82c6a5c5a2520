// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

// TestSliceNames: in the order of the slices, and never too long.
func TestSliceNames(t *testing.T) {
	t.Parallel()
	for _, node := range []string{testNode, strings.Repeat("n", validation.DNS1123SubdomainMaxLength)} {
		p := pool{driverName: testDriver, nodeName: node}
		for i := range 300 {
			name := p.sliceName(i)
			if problems := validation.IsDNS1123Subdomain(name); problems != nil {
				t.Fatalf("%s: %v", name, problems)
			}
			if i > 0 && name <= p.sliceName(i-1) {
				t.Fatalf("%s comes before the one before it", name)
			}
		}
	}
	long := strings.Repeat("n", validation.DNS1123SubdomainMaxLength-1)
	a, b := pool{driverName: testDriver, nodeName: long + "a"}, pool{driverName: testDriver, nodeName: long + "b"}
	if a.sliceName(0) == b.sliceName(0) {
		t.Error("slices of two nodes with the same name")
	}
}
