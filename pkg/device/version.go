// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/gpu"
)

// Nine digits are more than any version has and always fit an integer.
var leadingVersion = regexp.MustCompile(`^[vV]?([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,9}))?(.*)$`)

// semanticVersion converts any version of the driver into one that the API accepts
// (semver 2.0.0, at most 64 bytes): "580.95.05" becomes "580.95.5".
//
// The text after the first three numbers becomes build metadata, not a
// pre-release, because comparisons ignore the former: "535.104.05-open" becomes
// "535.104.5+open", which is not older than "535.104.5". A text that does not begin
// with a number becomes 0.0.0 with build metadata; it is never left out, because a
// selector that reads a missing attribute fails.
func semanticVersion(version string) string {
	core, rest := "0.0.0", version
	if m := leadingVersion.FindStringSubmatch(version); m != nil {
		core, rest = fmt.Sprintf("%d.%d.%d", number(m[1]), number(m[2]), number(m[3])), m[4]
	}
	if build := buildMetadata(rest); build != "" {
		core += "+" + build
	}
	if len(core) > resourceapi.DeviceAttributeMaxValueLength {
		core = strings.TrimRight(core[:resourceapi.DeviceAttributeMaxValueLength], ".+")
	}
	return core
}

// twoPartVersion converts a CUDA version or a compute capability to semver.
func twoPartVersion(v gpu.Version) string {
	return fmt.Sprintf("%d.%d.0", max(0, v.Major), max(0, v.Minor))
}

// number parses digits with leading zeros; an absent part is 0.
func number(digits string) int {
	n, _ := strconv.Atoi(digits)
	return n
}

// buildMetadata keeps what semver allows there: dot-separated words of
// letters, digits and hyphens, none of them empty.
func buildMetadata(text string) string {
	words := strings.FieldsFunc(text, func(r rune) bool {
		allowed := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-'
		return !allowed
	})
	var kept []string
	for _, word := range words {
		if word = strings.Trim(word, "-"); word != "" {
			kept = append(kept, word)
		}
	}
	return strings.Join(kept, ".")
}
