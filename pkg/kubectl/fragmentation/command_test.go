// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// TestWithoutSlices: without the right to list them, nothing can be said, least of all that no GPU
// offers partitions.
func TestWithoutSlices(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset()
	client.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("no right"))
	})
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	if err := run(t.Context(), options.New(streams), client, Options{}); !apierrors.IsForbidden(err) || out.String() != "" {
		t.Errorf("%v, %s", err, out.String())
	}
}
