// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command slicecontroller shows on a cluster, without any driver, what the slice controller of k8s.io/dynamic-resource-allocation does
// where two of its processes overlap, where writes are refused for a while, and where a Node is deleted and made again. It takes two
// minutes, and is the reproducer of docs/contributing/upstream/slice-controller.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	err := run(ctx)
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "slicecontroller:", err)
		os.Exit(1)
	}
}

// run tries all three at the same time, each with a driver of its own.
func run(ctx context.Context) error {
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return fmt.Errorf("read the kubeconfig: %w", err)
	}
	var wg sync.WaitGroup
	errs := make([]error, 3)
	for i, try := range []func(context.Context, *rest.Config) error{overlap, refuse, recreate} {
		wg.Go(func() { errs[i] = try(ctx, rest.CopyConfig(config)) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// start starts a controller for a node of this name, which publishes one device.
func start(ctx context.Context, client kubernetes.Interface, driver, node, device string) (*resourceslice.Controller, error) {
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{{Name: device}}}}}
	c, err := resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: driver, KubeClient: client, Owner: &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: node},
		Resources: &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: pool}},
	})
	if err != nil {
		return nil, fmt.Errorf("start the controller of %s: %w", driver, err)
	}
	return c, nil
}

// atLeast fails where what this program shows is not so any more.
func atLeast(want, got int) error {
	if got < want {
		return fmt.Errorf("got %d, want at least %d: this has been mended", got, want)
	}
	return nil
}

// makeNode makes a Node without a machine. The returned function deletes it.
func makeNode(ctx context.Context, client kubernetes.Interface, name string) (remove func() error, err error) {
	_, err = client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	return func() error { return client.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{}) }, err
}

// count returns how often something happens to the slices of a driver in some time.
func count(ctx context.Context, client kubernetes.Interface, driver string, what watch.EventType, d time.Duration) (n int, err error) {
	w, err := client.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + driver})
	if err != nil {
		return 0, err
	}
	defer w.Stop()
	for end := time.After(d); ; {
		select {
		case e := <-w.ResultChan():
			if e.Type == what {
				n++
			}
		case <-end:
			return n, nil
		}
	}
}

// overlap is an upgrade: two processes of one node, the newer of which has another device.
func overlap(ctx context.Context, config *rest.Config) error {
	const driver, node = "overlap.example.com", "overlap"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	remove, err := makeNode(ctx, client, node)
	if err != nil {
		return err
	}
	for _, device := range []string{"old", "new"} {
		c, err := start(ctx, client, driver, node, device)
		if err != nil {
			return err
		}
		defer c.Stop()
	}
	n, err := count(ctx, client, driver, watch.Modified, 110*time.Second)
	fmt.Printf("two processes with different devices: %d updates of one slice in 110 s\n", n)
	return errors.Join(err, remove(), atLeast(2, n))
}

// refuse is an API server that refuses writes for a while, as a webhook does that is away.
func refuse(ctx context.Context, config *rest.Config) error {
	const driver, node, refused = "refused.example.com", "refused", 45 * time.Second
	var refusing atomic.Bool
	refusing.Store(true)
	own, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodPost && refusing.Load() {
				return nil, errors.New("refused")
			}
			return next.RoundTrip(r)
		})
	})
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	remove, err := makeNode(ctx, own, node)
	if err != nil {
		return err
	}
	c, err := start(ctx, client, driver, node, "device")
	if err != nil {
		return err
	}
	defer c.Stop()
	time.AfterFunc(refused, func() { refusing.Store(false) })
	began := time.Now()
	for {
		list, err := own.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.driver=" + driver})
		if err != nil {
			return err
		}
		if len(list.Items) > 0 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	late := int((time.Since(began) - refused).Seconds())
	fmt.Printf("writes were refused for %.0f s: the slice was stored %d s after that\n", refused.Seconds(), late)
	return errors.Join(remove(), atLeast(20, late))
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// recreate is `kubectl delete node`, after which the kubelet makes the Node anew.
func recreate(ctx context.Context, config *rest.Config) error {
	const driver, node = "recreated.example.com", "recreated"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	remove, err := makeNode(ctx, client, node)
	if err != nil {
		return err
	}
	c, err := start(ctx, client, driver, node, "device")
	if err != nil {
		return err
	}
	defer c.Stop()
	if _, err := count(ctx, client, driver, watch.Added, 5*time.Second); err != nil {
		return err
	}
	if err := remove(); err != nil {
		return err
	}
	if remove, err = makeNode(ctx, client, node); err != nil {
		return err
	}
	n, err := count(ctx, client, driver, watch.Added, 100*time.Second)
	fmt.Printf("the Node was deleted and made again: its slice was made %d times in 100 s\n", n)
	return errors.Join(err, remove(), atLeast(2, n))
}
