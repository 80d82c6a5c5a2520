// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/allocation"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// foreseen finds what keeps containers from starting with the devices that they have, or would have.
func foreseen(s *sight, planned []*resourceapi.ResourceClaim) []stuck.Cause {
	if s.pod == nil {
		return nil
	}
	var out []stuck.Cause
	claims := slices.Concat(planned, s.own)
	for _, c := range claims {
		if slices.ContainsFunc(fleet.Results(c, s.x.model.Driver), fleet.IsMPS) && !ptr.Deref(s.pod.Spec.HostUsers, true) {
			out = append(out, stuck.Cause{
				Kind: stuck.UserNamespace, Text: "the pod has hostUsers: false, and containers with MPS shares do not start in a user namespace",
				Remedy: "leave hostUsers: false out, or ask for another class",
			})
			break
		}
	}
	for _, container := range slices.Concat(s.pod.Spec.InitContainers, s.pod.Spec.Containers) {
		shares, others := devicesOf(s, &container, claims)
		text := fmt.Sprintf("container %s would have %d MPS shares", container.Name, shares)
		if shares == 1 {
			text = fmt.Sprintf("container %s would have an MPS share and other devices", container.Name)
		}
		if shares > 0 && shares+others > 1 {
			out = append(out, stuck.Cause{
				Kind: stuck.SharesTogether, Text: text + ": a process can be a client of one share only",
				Remedy: "ask for one share of the sum, or for one share for each container",
			})
		}
	}
	return out
}

// devicesOf counts the MPS shares and the other devices that a container uses of claims.
func devicesOf(s *sight, container *corev1.Container, claims []*resourceapi.ResourceClaim) (shares, others int) {
	for _, use := range container.Resources.Claims {
		at := slices.IndexFunc(s.references, func(c allocation.PodClaim) bool { return c.Name == use.Name && c.Claim != nil })
		if at < 0 {
			continue
		}
		c := fleet.Named(claims, s.pod.Namespace, s.references[at].Claim.Name)
		if c == nil {
			continue
		}
		for _, r := range fleet.Results(c, s.x.model.Driver) {
			switch request, _, _ := strings.Cut(r.Request, "/"); {
			case use.Request != "" && use.Request != request || ptr.Deref(r.AdminAccess, false):
			case fleet.IsMPS(r):
				shares++
			default:
				others++
			}
		}
	}
	return shares, others
}

// unstarted returns the claims as they would be allocated if nothing were taken and no node excluded, if containers start with them on
// none of the nodes. Which of different alternatives they would get is open.
func (s *sight) unstarted(ctx context.Context, empty *allocation.Planner) (planned []*resourceapi.ResourceClaim) {
	nodes := s.places()
	for _, e := range s.excluded {
		nodes = append(nodes, e.node)
	}
	for _, n := range nodes[:min(len(nodes), mostKinds)] {
		claims := s.wanted(n)
		if a := s.x.hasty(empty).OnNode(ctx, n, claims); a.Verdict == allocation.Fits {
			planned = allocation.Allocated(claims, a.Results)
			if slices.ContainsFunc(claims, isOpen) || len(foreseen(s, planned)) == 0 {
				return nil
			}
		}
	}
	return planned
}

// isOpen reports whether a claim has alternatives of different classes, or of different numbers of devices.
func isOpen(c *resourceapi.ResourceClaim) bool {
	return slices.ContainsFunc(c.Spec.Devices.Requests, func(r resourceapi.DeviceRequest) bool {
		return slices.ContainsFunc(r.FirstAvailable, func(a resourceapi.DeviceSubRequest) bool {
			return a.DeviceClassName != r.FirstAvailable[0].DeviceClassName || a.Count != r.FirstAvailable[0].Count
		})
	})
}
