// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/claim"
)

// clusterTimeout bounds one question to the API server.
const clusterTimeout = 10 * time.Second

// Cluster asks the API server which claims exist. It may be used concurrently.
//
// The DRA client of Kubernetes falls back to older versions of the API on any
// "not found", so that its answer for a claim that is gone is that of a version
// which is not served. Here the two must not be mixed up: one means that devices
// are taken away, the other that nothing is known.
type Cluster struct {
	client kubernetes.Interface
	// served is the version that answered last, an index of versions.
	served atomic.Int32
}

var _ claim.Cluster = (*Cluster)(nil)

// NewCluster makes a Cluster.
func NewCluster(client kubernetes.Interface) *Cluster {
	return &Cluster{client: client}
}

// versions of the API that claims are served in, the preferred first.
var versions = []func(ctx context.Context, client kubernetes.Interface, c claim.Ref, o metav1.GetOptions) (metav1.Object, error){
	func(ctx context.Context, client kubernetes.Interface, c claim.Ref, o metav1.GetOptions) (metav1.Object, error) {
		return client.ResourceV1().ResourceClaims(c.Namespace).Get(ctx, c.Name, o)
	},
	func(ctx context.Context, client kubernetes.Interface, c claim.Ref, o metav1.GetOptions) (metav1.Object, error) {
		return client.ResourceV1beta2().ResourceClaims(c.Namespace).Get(ctx, c.Name, o)
	},
	func(ctx context.Context, client kubernetes.Interface, c claim.Ref, o metav1.GetOptions) (metav1.Object, error) {
		return client.ResourceV1beta1().ResourceClaims(c.Namespace).Get(ctx, c.Name, o)
	},
}

// Exists tells whether the claim exists with this UID. A claim of the same name
// with another UID is another claim. An error means that it is not known now:
// the API server is away, refuses, or something else answers for it.
func (c *Cluster) Exists(ctx context.Context, ref claim.Ref) (bool, error) {
	if ref.Namespace == "" || ref.Name == "" {
		return false, fmt.Errorf("claim %s: its name is not known", ref.UID)
	}
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	// This is asked for every claim again and again, and nearly always the answer is
	// yes. The API server's cache, which may be behind, is good enough for that.
	if exists, err := c.exists(ctx, ref, metav1.GetOptions{ResourceVersion: "0"}); exists || err != nil {
		return exists, err
	}
	return c.exists(ctx, ref, metav1.GetOptions{})
}

func (c *Cluster) exists(ctx context.Context, ref claim.Ref, o metav1.GetOptions) (bool, error) {
	first := int(c.served.Load())
	for i := range versions {
		version := (first + i) % len(versions)
		found, err := versions[version](ctx, c.client, ref, o)
		if notServed(err) {
			continue
		}
		c.served.Store(int32(version)) // #nosec G115 -- one of three
		switch {
		case err == nil:
			return found.GetUID() == ref.UID, nil
		case apierrors.IsNotFound(err):
			return false, nil
		}
		return false, fmt.Errorf("ask the API server for claim %s: %w", ref, err)
	}
	return false, fmt.Errorf("ask the API server for claim %s: %w", ref, errNotServed)
}

var errNotServed = errors.New("no version of the API that has claims is served there")

// notServed tells a path that nobody serves, or a proxy's "404 page not found",
// from the API server's word that an object does not exist.
func notServed(err error) bool {
	return apierrors.IsNotFound(err) && apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}
