// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// ResourceOf is what a command calls the kind of a claim's user.
func ResourceOf(u resourceapi.ResourceClaimConsumerReference) string {
	if u.APIGroup == "" && u.Resource == "pods" {
		return "pod"
	}
	return strings.TrimRight(u.Resource+"."+u.APIGroup, ".")
}

// DeleteCommand returns the command that deletes objects of a namespace. Whom a claim is reserved for its status says, and nobody checks
// there that a name is one: what no object can be called becomes a comment, and nothing that a shell would obey.
func DeleteCommand(resource, namespace string, names ...string) string {
	all := append([]string{resource, namespace}, names...)
	if slices.ContainsFunc(all, func(name string) bool { return len(validation.IsDNS1123Subdomain(name)) > 0 }) {
		return fmt.Sprintf("# no object is called so: %q", all)
	}
	return fmt.Sprintf("kubectl delete %s -n %s %s", resource, namespace, strings.Join(names, " "))
}
