// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

// TestSliceNames: they are legal, and in the order of the slices. A kubelet cannot register a node with a longer name than
// the value of a label.
func TestSliceNames(t *testing.T) {
	t.Parallel()
	for _, node := range []string{testNode, strings.Repeat("n", validation.LabelValueMaxLength)} {
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
}
