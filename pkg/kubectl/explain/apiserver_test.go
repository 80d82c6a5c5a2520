// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestDryRun: what the API server refuses is a reason, and what it could not be asked is unknown.
func TestDryRun(t *testing.T) {
	denied := func(message string) error {
		return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden, Message: message}}
	}
	deployment := fmt.Sprintf(strings.ReplaceAll(manifest, "count: 9", "count: 1"), "apps/v1", "Deployment", "\n  template:\n    spec:")
	for name, c := range map[string]struct {
		// refuse is the resource that err is about.
		refuse       string
		err          error
		verdict      Verdict
		says, silent string
		// fill says that the GPU is taken.
		fill bool
	}{
		"accepted":          {verdict: Allocatable, says: "can be allocated now"},
		"admission":         {refuse: "resourceclaimtemplates", err: denied("spec.spec.devices.config[0]: strategy must be MPS"), verdict: Waits, says: "the API server refuses ResourceClaimTemplate huge: spec.spec.devices.config[0]: strategy must be MPS"},
		"quota of claims":   {refuse: "resourceclaims", err: denied("exceeded quota: gpus"), verdict: Waits, says: "Pod team/train waits: its claim is not there.\n\nWhy:\n  - the API server refuses the ResourceClaim that a controller would make: exceeded quota: gpus\n\nWhat would help:\n  - after something in the namespace has ended, or with a larger quota"},
		"pod":               {refuse: "pods", err: apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "x", nil), verdict: Waits, says: "refuses the Pod that a controller would make"},
		"workload":          {refuse: "deployments", err: apierrors.NewBadRequest("no selector"), verdict: Waits, says: "refuses Deployment train: no selector"},
		"exists":            {refuse: "deployments", err: apierrors.NewAlreadyExists(schema.GroupResource{Resource: "deployments"}, "train"), verdict: Allocatable},
		"may not":           {refuse: "resourceclaims", err: denied(`resourceclaims.resource.k8s.io is forbidden: User "jo" cannot create resource "resourceclaims" in API group "resource.k8s.io" in the namespace "team"`), verdict: Unknown, says: `the ResourceClaim that a controller would make: resourceclaims.resource.k8s.io is forbidden: User "jo" cannot create resource "resourceclaims"`},
		"webhook is down":   {refuse: "pods", err: apierrors.NewInternalError(errors.New("failed calling webhook")), verdict: Unknown, says: "failed calling webhook"},
		"no dry run":        {refuse: "pods", err: apierrors.NewBadRequest("admission webhook x does not support dry run"), verdict: Unknown, says: "does not support dry run"},
		"taken and refused": {refuse: "resourceclaimtemplates", err: denied("strategy must be MPS"), fill: true, verdict: Waits, says: "would be refused", silent: "it fits"},
		"connection":        {refuse: "pods", err: errors.New("connection refused"), verdict: Unknown, says: "connection refused"},
		"too many at once":  {refuse: "pods", err: apierrors.NewTooManyRequests("later", 1), verdict: Unknown, says: "later"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			writer := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme())
			wrote := 0
			writer.PrependReactor("create", "*", func(a kubetesting.Action) (bool, runtime.Object, error) {
				create, _ := a.(kubetesting.CreateActionImpl)
				if len(create.CreateOptions.DryRun) != 1 {
					t.Errorf("%s is written", create.Resource)
				}
				wrote++
				if create.Resource.Resource == c.refuse {
					return true, nil, c.err
				}
				return true, create.Object, nil
			})
			writer.PrependReactor("patch", "*", func(a kubetesting.Action) (bool, runtime.Object, error) {
				if patch, _ := a.(kubetesting.PatchActionImpl); len(patch.PatchOptions.DryRun) != 1 {
					t.Errorf("%s is written", patch.Resource)
				}
				return true, &unstructured.Unstructured{}, nil
			})
			f := fleettest.New(t)
			f.AddNode("n1", "h100-80-sxm", 1)
			if c.fill {
				f.Held("other", "has", "n1", fleettest.Request(whole))
			}
			m, err := Parse([]byte(deployment), "team")
			if err != nil {
				t.Fatal(err)
			}
			x := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now)
			x.Refused = func(o *unstructured.Unstructured) (string, string) { return dryRun(t.Context(), writer, o) }
			all := x.Manifest(t.Context(), m)
			got := text(t, all...)
			if len(all) != 1 || all[0].Verdict != c.verdict || !strings.Contains(got, c.says) || c.verdict != Allocatable && strings.Contains(got, "fits on") {
				t.Errorf("want %s, %q in:\n%s", c.verdict, c.says, got)
			}
			if strings.Contains(got, "No single change") || c.silent != "" && strings.Contains(got, c.silent) {
				t.Errorf("%q, or that nothing was found, in:\n%s", c.silent, got)
			}
			if want := 4; wrote < want-1 {
				t.Errorf("%d objects were tried, want the workload, its pod, the template and its claim", wrote)
			}
		})
	}
}
