//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// gpuPool lends the GPUs of the node to tests, so that tests that run in parallel never wait for
// one another's devices and each can check that its own GPUs are left as they were.
type gpuPool struct {
	mu    sync.Mutex
	freed *sync.Cond
	total int
	free  []simulatedGPU
}

func newGPUPool(gpus []simulatedGPU) *gpuPool {
	p := &gpuPool{total: len(gpus), free: gpus}
	p.freed = sync.NewCond(&p.mu)
	return p
}

// take waits until n GPUs are free. A test that takes GPUs twice could wait forever.
func (p *gpuPool) take(n int) []simulatedGPU {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.free) < n {
		p.freed.Wait()
	}
	taken := p.free[:n:n]
	p.free = p.free[n:]
	return taken
}

func (p *gpuPool) giveBack(gpus []simulatedGPU) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, gpus...)
	p.freed.Broadcast()
}

// reserve makes a namespace for the test and reserves n GPUs for it: the test must narrow its
// requests to them (request.on). When the test ends, its pods are deleted, and nothing may be left
// of its claims or on its GPUs.
func reserve(t *testing.T, n int) (ns string, gpus []simulatedGPU) {
	t.Helper()
	if n > pool.total {
		t.Fatalf("the test needs %d GPUs; the node has %d", n, pool.total)
	}
	gpus = pool.take(n)
	t.Cleanup(func() { pool.giveBack(gpus) })
	ns = makeNamespace(t)
	t.Cleanup(func() {
		claims := claimUIDs(t, ns)
		removeNamespace(t, ns)
		untilDeallocated(t, ns)
		if n == pool.total {
			checkNothingLeft(t)
			return
		}
		eventually(t, "nothing left of the claims of namespace "+ns, func(ctx context.Context) (bool, string) {
			return nothing(leftBy(ctx, gpus, claims))
		})
	})
	return ns, gpus
}

// makeNamespace makes a namespace and waits for its service account, which pods and tokens need and a controller makes.
func makeNamespace(t *testing.T) string {
	t.Helper()
	created, err := client.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating a namespace: %v", err)
	}
	eventually(t, "the service account of namespace "+created.Name, func(ctx context.Context) (bool, string) {
		_, err := client.CoreV1().ServiceAccounts(created.Name).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, fmt.Sprint(err)
	})
	return created.Name
}

// reserveNode reserves all GPUs, so requests need not be narrowed.
func reserveNode(t *testing.T) (ns string) {
	t.Helper()
	ns, _ = reserve(t, pool.total)
	return ns
}

func claimUIDs(t *testing.T, ns string) []string {
	t.Helper()
	list, err := client.ResourceV1().ResourceClaims(ns).List(context.WithoutCancel(t.Context()), metav1.ListOptions{})
	if err != nil {
		t.Errorf("listing the claims of namespace %s: %v", ns, err)
		return nil
	}
	var uids []string
	for _, c := range list.Items {
		uids = append(uids, string(c.UID))
	}
	return uids
}

// removeNamespace deletes a namespace and waits only for its pods; the rest goes in its own time.
func removeNamespace(t *testing.T, ns string) {
	t.Helper()
	removePods(t, ns)
	if err := client.CoreV1().Namespaces().Delete(context.WithoutCancel(t.Context()), ns, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		t.Errorf("deleting namespace %s: %v", ns, err)
	}
}

// untilDeallocated waits until the scheduler can give the devices of a namespace to others: that the
// node has them back is not enough.
func untilDeallocated(t *testing.T, ns string) {
	t.Helper()
	eventually(t, "no allocated claim in namespace "+ns, func(ctx context.Context) (bool, string) {
		list, err := client.ResourceV1().ResourceClaims(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		for _, c := range list.Items {
			if c.Status.Allocation != nil {
				return false, "claim " + c.Name + " is allocated"
			}
		}
		return true, ""
	})
}

// removePods deletes the pods of a namespace and waits until they are gone, that is until their claims have been unprepared.
func removePods(t *testing.T, ns string) {
	t.Helper()
	if err := client.CoreV1().Pods(ns).DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Errorf("deleting the pods of namespace %s: %v", ns, err)
	}
	eventually(t, "no pods in namespace "+ns, func(ctx context.Context) (bool, string) {
		pods, err := client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		return len(pods.Items) == 0, fmt.Sprintf("%d pods", len(pods.Items))
	})
}
