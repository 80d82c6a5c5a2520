// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/answer"
)

// clusterTimeout bounds one question to the API server.
const clusterTimeout = 10 * time.Second

// BackgroundConfig returns the configuration of a client for what can wait: questions about claims, and events. It has a budget
// of its own, so that no pod that starts waits behind it, and its own name in audit logs.
func BackgroundConfig(config *rest.Config) *rest.Config {
	return reducedConfig(config, 25, 10, "background")
}

// StatusConfig returns the configuration of a client for the status of claims. It is apart from BackgroundConfig because people read
// the status: it should not wait for what can wait longer. By default 200 claims take 36 seconds.
func StatusConfig(config *rest.Config) *rest.Config {
	return reducedConfig(config, 10, 5, "claim status")
}

// reducedConfig returns the configuration of a client with a part of the budget, for itself.
func reducedConfig(config *rest.Config, qpsPart float32, burstPart int, name string) *rest.Config {
	reduced := rest.CopyConfig(config)
	reduced.RateLimiter = nil
	reduced.QPS /= qpsPart
	reduced.Burst = max(1, reduced.Burst/burstPart)
	reduced.Timeout = clusterTimeout // waiting for the budget does not count
	reduced.UserAgent += " (" + name + ")"
	return reduced
}

// Cluster reads claims from the API server. It may be used concurrently.
type Cluster struct{ client kubernetes.Interface }

var _ claim.Cluster = (*Cluster)(nil)

// NewCluster returns a Cluster that asks by a client.
func NewCluster(client kubernetes.Interface) *Cluster { return &Cluster{client: client} }

// Named returns the claim with a name, or nil. The API server's cache may be behind with the answer.
func (c *Cluster) Named(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	return answer.Claim(ctx, c.client, claim.Ref{Namespace: namespace, Name: name}, metav1.GetOptions{ResourceVersion: "0"})
}

// Claim returns the claim with this UID, or nil when there is none: a claim of the
// same name with another UID is another claim. An error means that this is not
// known now, because the API server is away, refuses, or something else answers
// for it.
//
// Every claim is asked for again and again, and nearly always the claim is
// there and allocated. For that answer the API server's cache, which may be behind,
// is good enough. The answers on which devices are taken away, that there is no
// such claim or that it is not allocated, never come from the cache.
func (c *Cluster) Claim(ctx context.Context, ref claim.Ref) (*resourceapi.ResourceClaim, error) {
	if ref.Namespace == "" || ref.Name == "" {
		return nil, fmt.Errorf("ask the API server for claim %s: its name is not known", ref.UID)
	}
	ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
	defer cancel()
	cached, err := answer.Claim(ctx, c.client, ref, metav1.GetOptions{ResourceVersion: "0"})
	if err != nil || cached != nil && cached.Status.Allocation != nil {
		return cached, err
	}
	return answer.Claim(ctx, c.client, ref, metav1.GetOptions{})
}
