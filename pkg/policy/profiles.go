// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/gpu"
)

// UnknownProfiles are MIG profiles that a part of the policy names although none of the
// GPUs that it is for has them.
type UnknownProfiles struct {
	// Rule is empty for the default.
	Rule string
	// Missing are the names, Has are those that the GPUs have.
	Missing, Has []string
}

func (u UnknownProfiles) String() string {
	return fmt.Sprintf("The sharing policy's %s names MIG profiles that no GPU of this node has to which it applies: %s. They have %s; correct the policy, or have rules for each model",
		Effective{Rule: u.Rule}.From(), strings.Join(u.Missing, ", "), strings.Join(u.Has, ", "))
}

// UnknownProfiles finds profiles that match nothing on a node with these GPUs, in the
// order of the GPUs. The default is for all models and may name profiles of any, as long
// as one of them is there.
func (p *Policy) UnknownProfiles(gpus []gpu.GPU) []UnknownProfiles {
	var applied []Effective
	has := map[string][]string{}
	for n := range gpus {
		effective := p.For(&gpus[n])
		if gpus[n].MIG == nil || effective.Partition == nil {
			continue
		}
		if _, known := has[effective.Rule]; !known {
			applied = append(applied, effective)
		}
		for _, profile := range gpus[n].MIG.Profiles {
			has[effective.Rule] = append(has[effective.Rule], profile.Name)
		}
	}
	var found []UnknownProfiles
	for _, effective := range applied {
		named := slices.Clone(effective.Partition.Profiles)
		for _, s := range effective.Partition.Shares {
			named = append(named, s.Profiles...)
		}
		named, present := sorted(named), sorted(has[effective.Rule])
		missing := slices.DeleteFunc(slices.Clone(named), func(name string) bool { return slices.Contains(present, name) })
		if len(missing) > 0 && (effective.Rule != "" || len(missing) == len(named)) {
			found = append(found, UnknownProfiles{Rule: effective.Rule, Missing: missing, Has: present})
		}
	}
	return found
}

// sorted returns each name once.
func sorted(names []string) []string { return slices.Compact(slices.Sorted(slices.Values(names))) }
