// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"math"
	"regexp"

	"k8s.io/apimachinery/pkg/api/resource"
)

// MemoryLimit is an amount of memory as a Kubernetes quantity, "10Gi". It is the text
// that the user wrote; Validate checks it.
type MemoryLimit string

// minMemoryLimit is the granularity of MPS memory limits.
const minMemoryLimit = 1 << 20

// memoryText matches an amount of memory. It keeps exponents short because
// resource.ParseQuantity expands them: a tenant's "1e999999999" would cost gigabytes.
var memoryText = regexp.MustCompile(`^\+?[0-9]{1,20}(\.[0-9]{0,9})?([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?$`)

// Bytes returns the amount in bytes, at least 1Mi, rounded up to whole bytes.
func (m MemoryLimit) Bytes() (int64, error) {
	if !memoryText.MatchString(string(m)) {
		return 0, fmt.Errorf("must be a quantity of memory such as \"512Mi\" or \"10Gi\"")
	}
	quantity, err := resource.ParseQuantity(string(m))
	if err != nil {
		return 0, fmt.Errorf("must be a quantity of memory such as \"512Mi\" or \"10Gi\": %w", err)
	}
	return MemoryBytes(quantity)
}

// MemoryBytes returns an amount of memory in bytes, rounded up to whole bytes. It is an error
// unless MPS can be told it.
func MemoryBytes(quantity resource.Quantity) (int64, error) {
	if quantity.CmpInt64(minMemoryLimit) < 0 {
		return 0, fmt.Errorf("must be at least 1Mi, MPS counts in mebibytes")
	}
	// What has a binary suffix and is more is cut down to this when it is parsed.
	if quantity.CmpInt64(math.MaxInt64) >= 0 {
		return 0, fmt.Errorf("must be less than 8Ei")
	}
	return quantity.Value(), nil
}
