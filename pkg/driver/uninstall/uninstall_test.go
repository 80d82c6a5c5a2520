// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package uninstall

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const driver = "gpu.nvidia.com"

// fakeLister answers with one claim a page.
type fakeLister struct {
	claims []resourceapi.ResourceClaim
	// fail is called before each page.
	fail func(ctx context.Context) error
}

func (f *fakeLister) List(ctx context.Context, options metav1.ListOptions) (*resourceapi.ResourceClaimList, error) {
	if f.fail != nil {
		if err := f.fail(ctx); err != nil {
			return nil, err
		}
	}
	at := 0
	if options.Continue != "" {
		if _, err := fmt.Sscan(options.Continue, &at); err != nil {
			return nil, err
		}
	}
	list := &resourceapi.ResourceClaimList{}
	if at < len(f.claims) {
		list.Items = f.claims[at : at+1]
	}
	if at+1 < len(f.claims) {
		list.Continue = fmt.Sprint(at + 1)
	}
	return list, nil
}

func claim(name, of, node string, pods ...string) resourceapi.ResourceClaim {
	c := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
	if node != "" {
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Driver: of, Pool: node, Device: "gpu-0000-1b-00-0"}},
		}}
	}
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod})
	}
	return c
}

// TestCheck: of the cluster's claims those count that pods use, by node.
func TestCheck(t *testing.T) {
	idle := []resourceapi.ResourceClaim{
		claim("pending", driver, ""), claim("unused", driver, "n1"), claim("other", "tpu.example.com", "n1", "pod-0"),
	}
	if err := Check(t.Context(), &fakeLister{claims: idle}, driver); err != nil {
		t.Errorf("nothing is in use: %v", err)
	}
	if err := Check(t.Context(), &fakeLister{}, driver); err != nil {
		t.Errorf("no claims: %v", err)
	}
	busy := append(idle, claim("b", driver, "n2", "pod-1", "pod-2"), claim("a", driver, "n2", "pod-3"), claim("z", driver, "n1", "pod-4"))
	var inUse *InUseError
	err := Check(t.Context(), &fakeLister{claims: busy}, driver)
	if !errors.As(err, &inUse) {
		t.Fatalf("got %v", err)
	}
	lines := strings.Split(err.Error(), "\n")[1:]
	for i, want := range []string{"node n1: claim team/z ", "node n2: claim team/a ", "node n2: claim team/b "} {
		if len(lines) != 3 || !strings.Contains(lines[i], want) || i == 2 && !strings.Contains(lines[i], "pod-1, pod pod-2") {
			t.Errorf("line %d of %q, want %q", i, lines, want)
		}
	}
}

func TestCheckListsNotTooMany(t *testing.T) {
	var many []resourceapi.ResourceClaim
	for n := range maxListed + 7 {
		many = append(many, claim(fmt.Sprintf("c%03d", n), driver, "n1", "pod"))
	}
	err := Check(t.Context(), &fakeLister{claims: many}, driver)
	if err == nil || !strings.HasSuffix(err.Error(), "\n  and 7 more") || strings.Count(err.Error(), "\n") != maxListed+1 {
		t.Errorf("got %v", err)
	}
}

// TestCheckSlowAPI: an API server that is slow, or knows the role too late, is asked
// again; one that never answers is an error.
func TestCheckSlowAPI(t *testing.T) {
	for name, test := range map[string]struct {
		// answers come before the failures.
		answers, failures int
		hangs             bool
		err               error
		// slow is how long each of 1,000 answers takes.
		slow time.Duration
	}{
		"at once":                {},
		"a large cluster":        {slow: 100 * time.Millisecond},
		"a page expires":         {answers: 1, failures: 1, err: apierrors.NewResourceExpired("too old")},
		"role not known yet":     {failures: 3, err: apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "", errors.New("no"))},
		"request without answer": {failures: 1, hangs: true},
		"never":                  {failures: 1000, err: apierrors.NewServiceUnavailable("overloaded")},
		"never an answer":        {failures: 1000, hangs: true},
		// They are not read again without a pause.
		"pages always expire": {failures: 1000, err: apierrors.NewResourceExpired("too old")},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
				defer cancel()
				calls := 0
				all := []resourceapi.ResourceClaim{claim("a", driver, "n1", "pod"), claim("b", driver, "n2", "pod")}
				for test.slow > 0 && len(all) < 1000 {
					all = append(all, all[0])
				}
				lister := &fakeLister{claims: all, fail: func(ctx context.Context) error {
					time.Sleep(test.slow)
					if calls++; calls <= test.answers || calls > test.answers+test.failures {
						return nil
					}
					if test.hangs {
						<-ctx.Done()
						return ctx.Err()
					}
					return test.err
				}}
				err := Check(ctx, lister, driver)
				var inUse *InUseError
				if never := test.failures > 100; errors.As(err, &inUse) == never || err == nil || never && calls > 200 {
					t.Fatalf("after %d calls: %v", calls, err)
				}
			})
		})
	}
}

// TestLostRequests: in a large cluster a lost request costs one page, not all that were read before.
func TestLostRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		requests := 0
		lister := &fakeLister{claims: make([]resourceapi.ResourceClaim, 20), fail: func(context.Context) error {
			if requests++; requests%10 == 0 {
				return errors.New("etcdserver: request timed out")
			}
			return nil
		}}
		if err := Check(t.Context(), lister, driver); err != nil || requests != 22 {
			t.Errorf("%d requests: %v", requests, err)
		}
	})
}
