// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package scrape reads the metrics of the driver's pods through the API server, which connects
// to them: it takes the rights to list pods and to get pods/proxy, and no Prometheus.
package scrape

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// What the chart gives to the pods of the driver.
const (
	selector = fleet.ComponentLabel + "=" + fleet.PluginComponent
	portName = "metrics"
	path     = "/metrics"
)

const (
	// parallel is how many pods are asked at the same time: the API server holds a connection
	// for each.
	parallel = 32
	// maxBytes is a hundred times what the busiest node answers.
	maxBytes = 16 << 20
)

// DefaultTimeout is for one pod.
const DefaultTimeout = 5 * time.Second

// Options say where to look.
type Options struct {
	// Namespace is that of the driver, "" for the one that the chart has written down.
	Namespace string
	// Timeout is for one pod.
	Timeout time.Duration
}

// AddFlags adds the flags of commands that ask the driver's pods.
func (o *Options) AddFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.Namespace, "driver-namespace", o.Namespace, "Namespace of the driver; by default the one that the chart has written down")
	flags.DurationVar(&o.Timeout, "node-timeout", o.Timeout, "How long the driver's pod on a node may take to answer")
}

// Result is what the driver's pods told.
type Result struct {
	Claims map[ID]*Claim
	GPUs   []GPU
	// Failures are those of pods that did not answer, by node.
	Failures []Failure
}

// Failure is a pod that did not answer.
type Failure struct {
	Node, Namespace, Pod string
	Err                  error
}

// Error says which node is not known.
func (f Failure) Error() string {
	return fmt.Sprintf("node %s: read the metrics of pod %s/%s: %v", f.Node, f.Namespace, f.Pod, f.Err)
}

// Unwrap returns the cause.
func (f Failure) Unwrap() error { return f.Err }

// Warn writes a line for each pod that did not answer; one for all where the right is missing.
func (r *Result) Warn(w io.Writer) {
	forbidden := false
	for _, f := range r.Failures {
		// Nobody reads what cannot be written.
		switch is := apierrors.IsForbidden(f); {
		case !is:
			_, _ = fmt.Fprintln(w, "warning:", f.Error())
		case !forbidden:
			forbidden = true
			_, _ = fmt.Fprintf(w, "warning: cannot get pods/proxy in namespace %s: %v; without it is unknown what claims use\n", f.Namespace, f.Err)
		}
	}
}

// Silence returns an error if pods did not answer and the others told of nothing: then nothing is
// known, which is not the same as nothing being there.
func (r *Result) Silence() error {
	if len(r.Failures) == 0 || len(r.GPUs) > 0 || len(r.Claims) > 0 {
		return nil
	}
	if len(r.Failures) == 1 {
		return fmt.Errorf("the driver's pod did not answer: %w", r.Failures[0])
	}
	return fmt.Errorf("%d of the driver's pods did not answer, and no other tells of a GPU; the first: %w", len(r.Failures), r.Failures[0])
}

// Pods asks the pods of the driver, one on each node. It fails if it is not known which these are, or if there are none.
func Pods(ctx context.Context, client kubernetes.Interface, o Options) (*Result, error) {
	pods, err := driverPods(ctx, client, o.Namespace)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var group errgroup.Group
	group.SetLimit(parallel)
	r := &Result{Claims: map[ID]*Claim{}}
	for _, pod := range pods {
		group.Go(func() error {
			told, err := ask(ctx, client, pod, cmp.Or(o.Timeout, DefaultTimeout))
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				r.Failures = append(r.Failures, Failure{Node: pod.Spec.NodeName, Namespace: pod.Namespace, Pod: pod.Name, Err: err})
				return nil
			}
			maps.Copy(r.Claims, told.Claims)
			r.GPUs = append(r.GPUs, told.GPUs...)
			return nil
		})
	}
	// They return no errors: a pod that does not answer is a Failure.
	_ = group.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read the metrics of the driver's pods: %w", err)
	}
	slices.SortFunc(r.GPUs, func(a, b GPU) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.PCIBusID, b.PCIBusID)) })
	slices.SortFunc(r.Failures, func(a, b Failure) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Pod, b.Pod)) })
	return r, nil
}

// driverPods lists the pods of the driver. While it is upgraded two pods of a node know the same claims: the one that has run for longer
// knows more, as long as it is not about to end.
func driverPods(ctx context.Context, client kubernetes.Interface, namespace string) ([]*corev1.Pod, error) {
	if namespace == "" {
		var err error
		if namespace, err = fleet.DriverNamespace(ctx, client); err != nil {
			return nil, fmt.Errorf("what claims use is unknown: %w; --driver-namespace says it", err)
		}
	}
	list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector, ResourceVersion: "0"})
	if err != nil {
		return nil, fmt.Errorf("list the driver's pods (%s): %w", selector, err)
	}
	better := func(p, other *corev1.Pod) bool {
		runs := func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil }
		if runs(p) != runs(other) {
			return runs(p)
		}
		return p.CreationTimestamp.Before(&other.CreationTimestamp)
	}
	byNode := map[string]*corev1.Pod{}
	for i := range list.Items {
		p := &list.Items[i]
		if other := byNode[p.Spec.NodeName]; fleet.IsDriverPod(p, namespace, fleet.PluginComponent) && (other == nil || better(p, other)) {
			byNode[p.Spec.NodeName] = p
		}
	}
	if len(byNode) == 0 {
		return nil, fmt.Errorf("there are no pods of the driver (%s, of a DaemonSet) in namespace %s", selector, namespace)
	}
	return slices.Collect(maps.Values(byNode)), nil
}

// ask reads the metrics of a pod.
func ask(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, timeout time.Duration) (*Result, error) {
	port, err := portOf(pod)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	body, err := client.CoreV1().Pods(pod.Namespace).ProxyGet("http", pod.Name, strconv.Itoa(int(port)), path, nil).Stream(ctx)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("no answer in %s: %w", timeout, err)
		}
		return nil, err
	}
	told, err := parse(&io.LimitedReader{R: body, N: maxBytes}, pod.Spec.NodeName)
	return told, errors.Join(err, body.Close())
}

func portOf(pod *corev1.Pod) (int32, error) {
	if pod.Status.Phase != corev1.PodRunning {
		return 0, fmt.Errorf("it does not run: its phase is %q", pod.Status.Phase)
	}
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.Name == portName {
				return p.ContainerPort, nil
			}
		}
	}
	return 0, fmt.Errorf("it has no port named %q: metrics.enabled is false in the chart's values", portName)
}

// IDOf returns the identity under which the driver tells of a holding.
func IDOf(h *fleet.Holding) ID {
	id := ID{Namespace: h.Claim.Namespace, Name: h.Claim.Name, Node: h.Result.Pool, Device: h.Result.Device}
	if h.Device != nil {
		id.Node = h.Device.GPU.Node.Name
	}
	return id
}

// Of returns what was told of a holding, or nil and why nothing was.
func (r *Result) Of(h *fleet.Holding) (*Claim, string) {
	id := IDOf(h)
	if c := r.Claims[id]; c != nil {
		return c, ""
	}
	_, failed := slices.BinarySearchFunc(r.Failures, id.Node, func(f Failure, node string) int { return cmp.Compare(f.Node, node) })
	switch {
	case h.Admin():
		return nil, "a claim with admin access has nothing of its own, so its use is not measured"
	case failed:
		return nil, "the driver's pod on node " + id.Node + " does not answer"
	}
	return nil, "the driver on node " + id.Node + " has not prepared it, or has no pod there"
}
