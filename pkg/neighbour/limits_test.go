// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package neighbour

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/test/flow/fakekubelet"
)

// manyClaims is a checkpoint with n claims that the API server can be asked about.
func manyClaims(t *testing.T, n int) []byte {
	t.Helper()
	claims := map[string]any{}
	for i := range n {
		name := fmt.Sprintf("batch-%03d", i)
		claims["uid-"+name] = map[string]any{"name": name, "namespace": "ml", "status": allocated("ml", name, "", false, "gpu-0").Status}
	}
	data, err := json.Marshal(map[string]any{"v2": map[string]any{"preparedClaims": claims}})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestManyClaimsAtASlowAPIServer: publishing waits for the first look, so that all questions of a
// look together have a limit. What was not answered counts, and is asked next time.
func TestManyClaimsAtASlowAPIServer(t *testing.T) {
	t.Parallel()
	const all, answered = 200, 15
	r := newRig(t)
	r.writeCheckpoint(t, manyClaims(t, all))
	var limits []time.Time
	r.cluster.onAsked = func(ctx context.Context) error {
		limit, has := ctx.Deadline()
		if !has || len(limits) > 0 && limit != limits[0] {
			t.Errorf("question %d has the limit %v, the first had %v", len(limits), limit, limits)
		}
		limits = append(limits, limit)
		if len(limits) > answered {
			return context.DeadlineExceeded
		}
		return nil
	}
	for left := all - answered; left > 0; left -= answered {
		limits = nil
		found, err := r.Find(t.Context())
		if len(found) != left || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%d claims, want %d; error %v", len(found), left, err)
		}
		if limits[0].After(time.Now().Add(lookTimeout)) {
			t.Errorf("the limit is %v", limits[0])
		}
	}
	limits = nil
	r.want(t, "")
}

// TestClaimsInAFixedOrder: which of several claims of a pod the checkpoint means is not told, but
// it stays the same.
func TestClaimsInAFixedOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	claims := map[string]any{}
	for i := range 8 {
		c := allocated("ml", "", "", false, "gpu-0").Status
		c.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "train-0", UID: trainPod}}
		claims[fmt.Sprintf("uid-%d", i)] = map[string]any{"status": c}
	}
	data, err := json.Marshal(map[string]any{"v1": map[string]any{"preparedClaims": claims}})
	if err != nil {
		t.Fatal(err)
	}
	r.writeCheckpoint(t, data)
	r.running[trainPod] = true
	r.kubelet.Set(plugin, fakekubelet.Pod("ml", "train-0", "train", of("gpu-0")))
	first, err := r.Find(t.Context())
	if err != nil || len(first) != 8 {
		t.Fatalf("%v, %v", first, err)
	}
	for range 20 {
		r.want(t, "", first...)
	}
}

// TestCheckpointIsNoFile: what is there instead is told, and waited for by nobody.
func TestCheckpointIsNoFile(t *testing.T) {
	t.Parallel()
	for name, create := range map[string]func(path string) error{
		"folder": func(path string) error { return os.Mkdir(path, 0o700) },
		"pipe":   func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"loop":   func(path string) error { return os.Symlink(path, path) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			if err := create(r.Checkpoint); err != nil {
				t.Fatal(err)
			}
			r.want(t, "read which claims NVIDIA's DRA driver has prepared")
		})
	}
}
