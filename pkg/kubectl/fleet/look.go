// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// Scope is which claims a command is about.
type Scope struct {
	// Namespace is "" for all. Labels are those of claims, nil for all.
	Namespace string
	Labels    labels.Selector
}

// Has reports whether a command is about a claim.
func (s Scope) Has(c *resourceapi.ResourceClaim) bool {
	return (s.Namespace == "" || c.Namespace == s.Namespace) && (s.Labels == nil || s.Labels.Matches(labels.Set(c.Labels)))
}

// Look makes the model for a command, and returns what it is about. It fails where a resource that is needed, if one is,
// cannot be read, and warns of all others but those that the command has no use for.
func Look(ctx context.Context, o *options.Options, client kubernetes.Interface, needed string, unused ...string) (*Model, Scope, error) {
	var scope Scope
	var err error
	if scope.Labels, err = o.Labels(); err != nil {
		return nil, scope, err
	}
	if scope.Namespace, err = o.Namespace(); err != nil {
		return nil, scope, err
	}
	snapshot, err := Read(ctx, client, scope.Namespace)
	if err != nil {
		return nil, scope, err
	}
	if err := snapshot.Need(scope.Namespace, needed); err != nil {
		return nil, scope, err
	}
	snapshot.Warn(o.ErrOut, unused...)
	return New(snapshot, o.Driver), scope, nil
}
