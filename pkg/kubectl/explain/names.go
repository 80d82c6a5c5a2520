// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// missingName finds what a selector reads that a device does not have, and the device's driver.
var missingName = regexp.MustCompile(`on device ([^/\s]+)/.*no such key: ([A-Za-z_][A-Za-z0-9_]*)`)

// instead says what serves for names that Partage publishes for some types of devices only.
var instead = map[string]string{
	"smPercent":   "a partition has the multiprocessors of its profile",
	"copyEngines": enginesUndivided,
	"decoders":    enginesUndivided,
	"encoders":    enginesUndivided,
	"jpegEngines": enginesUndivided,
	"ofaEngines":  enginesUndivided,
}

const enginesUndivided = "nothing divides engines among claims"

// whoHas says, in a sentence to add, which types of a driver's devices have an attribute or capacity where others do not. It is
// empty where none has it, or all have.
func whoHas(s *sight, driver, name string) string {
	having, lacking := sets.New[string](), sets.New[string]()
	for _, kind := range s.kinds() {
		for p := range s.x.planner.Cluster.Devices(kind[0]) {
			if p.Driver != driver {
				continue
			}
			if has(p.Device.Attributes, name) || has(p.Device.Capacity, name) {
				having.Insert(textOf(p.Device, "type"))
			} else {
				lacking.Insert(textOf(p.Device, "type"))
			}
		}
	}
	having, lacking = having.Difference(lacking).Delete(""), lacking.Delete("")
	if len(having) == 0 || len(lacking) == 0 {
		return ""
	}
	text := fmt.Sprintf(". Devices of type %s have %s, those of type %s do not", strings.Join(sets.List(having), ", "), name, strings.Join(sets.List(lacking), ", "))
	if other := instead[name]; other != "" {
		text += ": " + other
	}
	return text
}

// has reports whether something has a name, without domain.
func has[V any](all map[resourceapi.QualifiedName]V, name string) bool {
	return slices.ContainsFunc(sortedNames(all), func(n resourceapi.QualifiedName) bool { return fleet.Unqualified(string(n)) == name })
}

// nearest returns the name that was probably meant, or "".
func nearest(name string, names []string) string {
	best, least := "", max(2, len(name)/3)+1
	for _, n := range names {
		if d := distance(name, n); n != name && d < least {
			best, least = n, d
		}
	}
	return best
}

// byDistance sorts names by how much they are like a name.
func byDistance(name string, names []string) []string {
	sorted := slices.Clone(names)
	slices.SortStableFunc(sorted, func(a, b string) int { return cmp.Compare(distance(name, a), distance(name, b)) })
	return sorted
}

// distance is how many letters have to be added, taken away or replaced.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			before, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, before+cost)
		}
	}
	return row[len(b)]
}
