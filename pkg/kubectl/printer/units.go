// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package printer

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/duration"
)

// Unknown is written for what is not known, or does not exist.
const Unknown = "-"

func orUnknown[T any](value *T, text func(T) string) string {
	if value == nil {
		return Unknown
	}
	return text(*value)
}

// BytesOrUnknown writes a size that may not be known.
func BytesOrUnknown(n *int64) string { return orUnknown(n, Bytes) }

// PercentOrUnknown writes a ratio that may not be known.
func PercentOrUnknown(ratio *float64) string {
	return orUnknown(ratio, func(ratio float64) string { return fmt.Sprintf("%.0f%%", ratio*100) })
}

// SecondsOrUnknown writes a duration that may not be known.
func SecondsOrUnknown(seconds *float64) string { return orUnknown(seconds, Seconds) }

// Seconds writes a duration, as kubectl writes ages.
func Seconds(n float64) string {
	return duration.HumanDuration(time.Duration(n * float64(time.Second)))
}

// Bytes writes a size as manifests do, in the largest unit that shows it with a decimal at most.
func Bytes(n int64) string {
	const gi = 1 << 30
	if n >= gi {
		return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/gi), ".0") + "Gi"
	}
	return resource.NewQuantity((n+1<<20-1)>>20<<20, resource.BinarySI).String()
}

// Age returns how long something has been, as kubectl prints it. What another clock dates later than now has just been.
func Age(d time.Duration) string { return duration.HumanDuration(max(d, 0)) }

// Some writes the first of some names, and how many there are beside.
func Some(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
