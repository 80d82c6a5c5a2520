// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"

	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// Look makes the model for a command, and returns the namespace that it is about, "" for all. It fails where a resource that is needed
// cannot be read, and warns of all others but those that the command has no use for.
func Look(ctx context.Context, o *options.Options, client kubernetes.Interface, needed string, unused ...string) (m *Model, namespace string, err error) {
	if namespace, err = o.Namespace(); err != nil {
		return nil, "", err
	}
	snapshot, err := Read(ctx, client, namespace)
	if err != nil {
		return nil, "", err
	}
	if err := snapshot.Need(namespace, needed); err != nil {
		return nil, "", err
	}
	snapshot.Warn(o.ErrOut, unused...)
	return New(snapshot, o.Driver), namespace, nil
}
