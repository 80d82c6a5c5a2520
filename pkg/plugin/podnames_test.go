// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
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
