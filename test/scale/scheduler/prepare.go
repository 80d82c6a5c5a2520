// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	perf "k8s.io/kubernetes/test/integration/scheduler_perf"
	"k8s.io/kubernetes/test/utils/client-go/ktesting"
)

const (
	inUseNamespace = "in-use"
	// requestsAtOnce is how many objects are created at the same time.
	requestsAtOnce = 16
)

// preparer makes a cluster what a case needs, before there are pods.
type preparer struct {
	dir     string
	cases   []scenario
	classes classes
	// heap is by how many bytes the slices of a case let the heap grow.
	heap map[string]int64
	// began is when the first case was prepared.
	began time.Time
}

// prepare is called by scheduler_perf after it has created the nodes.
func (p *preparer) prepare(tCtx ktesting.TContext, sched *scheduler.Scheduler, w *perf.Workload, nodes *corev1.NodeList) error {
	n, err := w.GetParam(caseParam)
	if err != nil {
		return fmt.Errorf("find the case: %w", err)
	}
	c := &p.cases[n]
	// On a line of its own: the name of the benchmark has none.
	fmt.Printf("\n%5.0fs  %s, %s\n", time.Since(p.began).Seconds(), c.load.name, c.fleet)
	machines, err := p.machines(tCtx, c)
	if err != nil {
		return fmt.Errorf("prepare %s: %w", c.name(), err)
	}
	manager := sched.Profiles[corev1.DefaultSchedulerName].SharedDRAManager()
	client := tCtx.Client()
	before := heap()
	if err := publish(tCtx, client, manager, machines, nodes.Items); err != nil {
		return err
	}
	p.heap[c.name()] = heap() - before
	if err := p.createClasses(tCtx, client); err != nil {
		return err
	}
	return allocate(tCtx, client, manager, c, machines, nodes.Items)
}

func (p *preparer) machines(ctx context.Context, c *scenario) ([]*machine, error) {
	var machines []*machine
	for _, name := range c.machines {
		m, err := loadMachine(p.dir, name)
		if err != nil {
			return nil, err
		}
		if err := m.use(ctx, c.inUse, p.classes); err != nil {
			return nil, err
		}
		machines = append(machines, m)
	}
	return machines, nil
}

// publish creates the slices of all nodes, and waits until the scheduler knows them.
func publish(ctx context.Context, client kubernetes.Interface, manager fwk.SharedDRAManager, machines []*machine, nodes []corev1.Node) error {
	var all []*resourceapi.ResourceSlice
	for i := range nodes {
		all = append(all, machines[i%len(machines)].slicesOn(nodes[i].Name)...)
	}
	err := atOnce(ctx, len(all), func(ctx context.Context, i int) error {
		_, err := client.ResourceV1().ResourceSlices().Create(ctx, all[i], metav1.CreateOptions{})
		all[i] = nil // not to be measured
		return err
	})
	if err != nil {
		return fmt.Errorf("create ResourceSlices: %w", err)
	}
	return until(ctx, "the scheduler knows all slices", func() (bool, error) {
		known, err := manager.ResourceSlices().ListWithDeviceTaintRules()
		return len(known) == len(all), err
	})
}

func (p *preparer) createClasses(ctx context.Context, client kubernetes.Interface) error {
	for _, class := range p.classes {
		if _, err := client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create DeviceClass %s: %w", class.Name, err)
		}
	}
	return nil
}

// emptyNodes is of how many nodes one is empty, where some are.
const emptyNodes = 50

// allocate creates claims that have devices already, and waits until the scheduler knows them.
func allocate(ctx context.Context, client kubernetes.Interface, manager fwk.SharedDRAManager, c *scenario, machines []*machine, nodes []corev1.Node) error {
	if len(c.inUse) == 0 {
		return nil
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: inUseNamespace}}
	if _, err := client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create namespace %s: %w", inUseNamespace, err)
	}
	var claims []*resourceapi.ResourceClaim
	devices := 0
	for i := range nodes {
		if c.someEmpty && i%emptyNodes == 0 {
			continue
		}
		for _, claim := range machines[i%len(machines)].inUseOn(nodes[i].Name) {
			claims = append(claims, claim)
			devices += len(claim.Status.Allocation.Devices.Results)
		}
	}
	api := client.ResourceV1().ResourceClaims(inUseNamespace)
	err := atOnce(ctx, len(claims), func(ctx context.Context, i int) error {
		created, err := api.Create(ctx, claims[i], metav1.CreateOptions{})
		if err != nil {
			return err
		}
		created.Status = claims[i].Status
		_, err = api.UpdateStatus(ctx, created, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("create allocated claims: %w", err)
	}
	return until(ctx, "the scheduler knows what is in use", func() (bool, error) {
		state, err := manager.ResourceClaims().GatherAllocatedState()
		if err != nil {
			return false, nil //nolint:nilerr // it was being changed
		}
		return len(state.AllocatedDevices)+len(state.AllocatedSharedDeviceIDs) == devices, nil
	})
}

func atOnce(ctx context.Context, count int, do func(context.Context, int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(requestsAtOnce)
	for i := range count {
		group.Go(func() error { return do(ctx, i) })
	}
	return group.Wait()
}

func until(ctx context.Context, what string, done func() (bool, error)) error {
	const limit = 5 * time.Minute
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, limit, true, func(context.Context) (bool, error) { return done() })
	if err != nil {
		return fmt.Errorf("wait until %s: %w", what, err)
	}
	return nil
}

// heap is how much of it is in use. The second collection frees what finalizers kept.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
