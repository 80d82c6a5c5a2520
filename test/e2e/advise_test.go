//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/kubectl/economics"
	kubectlfleet "github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// TestAdvice applies the manifests that are advised for this cluster, and asks what their pods cost.
func TestAdvice(t *testing.T) {
	ns := reserveNode(t)
	before, err := kubectlfleet.Read(t.Context(), client, ns)
	if err != nil {
		t.Fatal(err)
	}
	// Shares that come while the supervisor has just started go to whichever GPU is not tainted any more.
	eventually(t, "MPS on all GPUs", func(ctx context.Context) (bool, string) {
		published, err := publishedSlices(ctx)
		for _, slice := range published {
			for _, d := range slice.Spec.Devices {
				for _, taint := range d.Taints {
					if taint.Key == driverName+"/mps-unavailable" || taint.Key == driverName+"/release-pending" {
						return false, d.Name + " is tainted " + taint.Key
					}
				}
			}
		}
		return err == nil, fmt.Sprint(err)
	})
	offered := kubectlfleet.New(before, driverName)
	pods := 0
	for _, q := range []struct {
		workload  economics.Workload
		billions  float64
		mechanism economics.Mechanism
	}{
		{economics.Workload{Kind: economics.Inference, Trust: economics.OtherTenants, Traffic: economics.Steady, Count: 3}, 7, economics.Partition},
		{economics.Workload{Kind: economics.Inference, Trust: economics.SameTeam, Traffic: economics.Steady, Count: 4}, 1.5, economics.MPS},
		{economics.Workload{Kind: economics.Notebook, Trust: economics.SameTeam, Traffic: economics.Bursty, Memory: 4 << 30, Count: 4}, 0, economics.TimeSlice},
	} {
		a, err := economics.Advise(economics.Query{Workload: q.workload, Billions: q.billions}, offered)
		if err != nil {
			t.Fatal(err)
		}
		if a.Mechanism != q.mechanism {
			t.Errorf("%+v: %s, want %s", q.workload, a.Mechanism, q.mechanism)
		}
		// What makes pods goes before the pods, which it would make again.
		t.Cleanup(func() { deleteManifest(t, ns, a.Manifest) })
		apply(t, ns, a.Manifest)
		pods += q.workload.Count
	}
	waitTemplatePods(t, "what was advised", ns, pods)

	after, err := kubectlfleet.Read(t.Context(), client, ns)
	if err != nil {
		t.Fatal(err)
	}
	// Three partitions 2g.20gb, four MPS shares and four time slices have one GPU each. The scheduler counts a share twice
	// while it is bound, so that shares of a kind may get two.
	const least, most = 3, 5
	r := economics.NewReport(kubectlfleet.New(after, driverName), new(3.25))
	if n := r.Fleet.InUse; n < least || n > most || r.Fleet.Claims != pods || r.Fleet.Unshared != pods || *r.Fleet.PerHour != float64(n)*3.25 {
		t.Errorf("%d claims on %d GPUs instead of %d for %g, want %d on %d instead of %d for %g",
			r.Fleet.Claims, r.Fleet.InUse, r.Fleet.Unshared, *r.Fleet.PerHour, pods, least, pods, least*3.25)
	}
}

func deleteManifest(t *testing.T, ns, manifest string) {
	t.Helper()
	cmd := exec.Command("kubectl", "delete", "-n", ns, "-f", "-", "--ignore-not-found", "--timeout="+waitLimit.String())
	cmd.Stdin = strings.NewReader(manifest)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("kubectl delete: %v\n%s", err, out)
	}
}
