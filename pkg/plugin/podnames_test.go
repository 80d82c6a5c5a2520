// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/claim"
)

// reserved are claims, each reserved for one consumer; nil is a claim that is gone.
type reserved struct {
	claims map[string]*resourceapi.ResourceClaimConsumerReference
	asked  []string
	err    error
}

func (r *reserved) Claims(string) ([]claim.Ref, error) {
	return []claim.Ref{{UID: "no-name"}, {Namespace: "a", Name: "gone"}, {Namespace: "a", Name: "job"}, {Namespace: "b", Name: "train"}}, nil
}

func (r *reserved) Claim(_ context.Context, ref claim.Ref) (*resourceapi.ResourceClaim, error) {
	r.asked = append(r.asked, ref.Name)
	user := r.claims[ref.Name]
	if user == nil || r.err != nil {
		return nil, r.err
	}
	return &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{ReservedFor: []resourceapi.ResourceClaimConsumerReference{*user}}}, nil
}

func TestPodNames(t *testing.T) {
	t.Parallel()
	user := func(resource, name, uid string) *resourceapi.ResourceClaimConsumerReference {
		return &resourceapi.ResourceClaimConsumerReference{Resource: resource, Name: name, UID: types.UID(uid)}
	}
	r := &reserved{claims: map[string]*resourceapi.ResourceClaimConsumerReference{"job": user("jobs", "x", "uid-1"), "train": user("pods", "train-0", "uid-1")}}
	names := NewPodNames(r, r)
	check := func(uid, want string, asked int) {
		t.Helper()
		r.asked = nil
		if got := names.Name(t.Context(), "0000:1b:00.0", uid); got != want || len(r.asked) != asked {
			t.Errorf("%s: got %q after asking for %v, want %q and %d questions", uid, got, r.asked, want, asked)
		}
	}
	check("uid-1", "b/train-0", 3)
	check("uid-1", "b/train-0", 0)
	check("uid-2", "", 3)
	check("uid-2", "", 0)
	r.err = errors.New("the API server is away")
	check("uid-3", "", 1)
	check("uid-3", "", 1)
	r.err = nil
	check("uid-3", "", 3)
}

// TestPodsOf shows which pods a claim is reserved for, and that a claim that is gone has none.
func TestPodsOf(t *testing.T) {
	t.Parallel()
	api := newAPIServer(t)
	api.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "one", UID: "uid-1"},
		Status: resourceapi.ResourceClaimStatus{
			Allocation: &resourceapi.AllocationResult{Devices: allocated},
			ReservedFor: []resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", Name: "a", UID: "pod-a"}, {APIGroup: "example.com", Resource: "pods", UID: "other"}, {Resource: "pods", Name: "b", UID: "pod-b"},
			},
		},
	})
	cluster := clusterAt(t, api.URL())
	got, err := cluster.PodsOf(t.Context(), claim.Ref{Namespace: "default", Name: "one", UID: "uid-1"})
	if err != nil || !slices.Equal(got, []string{"pod-a", "pod-b"}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := cluster.PodsOf(t.Context(), claim.Ref{Namespace: "default", Name: "one", UID: "uid-2"}); err != nil || len(got) > 0 {
		t.Errorf("a claim that is gone: got %v, %v", got, err)
	}
	if _, err := cluster.PodsOf(t.Context(), claim.Ref{UID: "uid-1"}); err == nil {
		t.Error("a claim without a name: got no error")
	}
}
