// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
)

// podNameFor is how long an answer is good for. A UID never has another name, but claims
// come and go.
const podNameFor = 10 * time.Minute

// ClaimLister knows which claims have something on this node.
type ClaimLister interface {
	// Claims lists them, those on the GPU first.
	Claims(pciAddress string) ([]claim.Ref, error)
}

// PodNames finds the names of pods by their UIDs: those for which a claim on this node is
// reserved. This driver may not read pods.
type PodNames struct {
	cluster claim.Cluster
	claims  ClaimLister

	mu    sync.Mutex
	known map[string]podName
}

type podName struct {
	name  string // "" if no claim is reserved for the pod
	until time.Time
}

func isPod(user *resourceapi.ResourceClaimConsumerReference) bool {
	return user.APIGroup == "" && user.Resource == "pods"
}

// NewPodNames makes PodNames.
func NewPodNames(cluster claim.Cluster, claims ClaimLister) *PodNames {
	return &PodNames{cluster: cluster, claims: claims, known: map[string]podName{}}
}

// Name returns "namespace/name" of the pod with this UID, which uses something of the GPU,
// or "" if that cannot be found before ctx ends.
func (n *PodNames) Name(ctx context.Context, pciAddress, uid string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	for known, one := range n.known {
		if now.After(one.until) {
			delete(n.known, known)
		}
	}
	if one, known := n.known[uid]; known {
		return one.name
	}
	name, err := n.find(ctx, pciAddress, types.UID(uid))
	if err != nil {
		klog.FromContext(ctx).V(2).Info("The name of a pod is not known", "podUID", uid, "reason", err)
		return ""
	}
	n.known[uid] = podName{name: name, until: now.Add(podNameFor)}
	return name
}

func (n *PodNames) find(ctx context.Context, pciAddress string, uid types.UID) (string, error) {
	claims, err := n.claims.Claims(pciAddress)
	if err != nil {
		return "", err
	}
	for _, ref := range claims {
		if ref.Name == "" {
			continue // a damaged record
		}
		found, err := n.cluster.Claim(ctx, ref)
		if err != nil {
			return "", err
		}
		if found == nil {
			continue
		}
		for _, user := range found.Status.ReservedFor {
			if user.UID == uid && isPod(&user) {
				return ref.Namespace + "/" + user.Name, nil
			}
		}
	}
	return "", nil
}
