// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/gpu"
)

const nodeName = "node-1"

// world is a cluster with one node, and a writer of its labels.
type world struct {
	client *fake.Clientset
	*Writer

	// node and gpus are what the writer was told last.
	node  *corev1.Node
	gpus  []*gpu.GPU
	known bool

	mu       sync.Mutex
	warnings []string
	// fail is the error of all writes.
	fail error
}

func newWorld(t *testing.T, mode Mode) *world {
	t.Helper()
	w := &world{client: fake.NewClientset()}
	w.use(mode)
	w.client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.fail != nil, nil, w.fail
	})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "uid-1", Labels: map[string]string{"kubernetes.io/os": "linux"}}}
	if _, err := w.client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{FieldManager: "kubelet"}); err != nil {
		t.Fatal(err)
	}
	return w
}

// use replaces the writer by one of a later process.
func (w *world) use(mode Mode) {
	w.node, w.gpus, w.known = nil, nil, false
	w.Writer = New(Options{NodeName: nodeName, Client: w.client, Mode: mode, Say: func(_ context.Context, message string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if message != "" && (len(w.warnings) == 0 || w.warnings[len(w.warnings)-1] != message) {
			w.warnings = append(w.warnings, message)
		}
	}})
}

// labels are those of the node, without the one that it always has.
func (w *world) labels(t *testing.T) map[string]string {
	t.Helper()
	node, err := w.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	labels := maps.Clone(node.Labels)
	if labels["kubernetes.io/os"] != "linux" {
		t.Errorf("the node lost a label: %v", labels)
	}
	delete(labels, "kubernetes.io/os")
	return labels
}

// patch changes labels as NFD does, which GPU feature discovery tells what to write.
func (w *world) patch(t *testing.T, labels string) {
	t.Helper()
	_, err := w.client.CoreV1().Nodes().Patch(t.Context(), nodeName, types.MergePatchType, fmt.Appendf(nil, `{"metadata": {"labels": %s}}`, labels),
		metav1.PatchOptions{FieldManager: "nfd-master"})
	if err != nil {
		t.Fatal(err)
	}
}

// writes counts the requests of the writer that change something.
func (w *world) writes() (n int) {
	for _, action := range w.client.Actions() {
		if patch, is := action.(clienttesting.PatchAction); is && patch.GetPatchType() == types.ApplyPatchType {
			n++
		}
	}
	return n
}

// tellNode is what a watch of the node does.
func (w *world) tellNode(t *testing.T) {
	t.Helper()
	node, err := w.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.ResourceVersion = fmt.Sprint(len(w.client.Actions())) // the fake has none
	w.node = node
	w.Set(w.node, w.gpus, w.known)
}

// SetGPUs is what happens after a survey.
func (w *world) SetGPUs(gpus []*gpu.GPU) {
	if w.gpus, w.known = gpus, true; w.node != nil {
		w.Set(w.node, w.gpus, true)
	}
}

func (w *world) mustUpdate(t *testing.T) {
	t.Helper()
	w.tellNode(t)
	if err := w.update(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (w *world) want(t *testing.T, want map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, w.labels(t)); diff != "" {
		t.Errorf("labels, -want +got:\n%s", diff)
	}
}

// TestWriter: the labels follow the GPUs, and nothing is written that is there.
func TestWriter(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Write)
	w.mustUpdate(t)
	w.want(t, map[string]string{})
	four := board(t, "h100", 4)
	for range 3 {
		w.SetGPUs(four)
		w.mustUpdate(t)
		w.want(t, Of(four))
	}
	if n := w.writes(); n != 1 {
		t.Errorf("%d writes", n)
	}
	w.patch(t, `{"`+Count+`": null}`)
	w.mustUpdate(t)
	w.want(t, Of(four))
	w.use(Write) // another process, which knows nothing of the one before
	w.mustUpdate(t)
	w.want(t, Of(four))
	w.SetGPUs(nil)
	w.mustUpdate(t)
	w.want(t, map[string]string{})
	if len(w.warnings) > 0 {
		t.Errorf("%q", w.warnings)
	}
}

// TestRemove: what was written is removed, by a process that did not write it.
func TestRemove(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Write)
	w.patch(t, `{"`+Family+`": "hopper", "example.com/pool": "a"}`)
	w.SetGPUs(board(t, "h100", 4))
	w.mustUpdate(t)
	w.use(Remove)
	w.SetGPUs(board(t, "h100", 4))
	w.mustUpdate(t)
	w.want(t, map[string]string{Family: "hopper", "example.com/pool": "a"})
	w.mustUpdate(t)
	if n := w.writes(); n != 2 {
		t.Errorf("%d writes", n)
	}
}

// TestPredecessor: the plugin that is being replaced writes its labels again after they were removed, and only then is the new one
// told of the node, which looks as it did before.
func TestPredecessor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Write)
	w.tellNode(t)
	w.SetGPUs(board(t, "h100", 4))
	w.mustUpdate(t)
	before, labels := w.Writer, w.labels(t)
	w.use(Remove)
	w.mustUpdate(t)
	w.want(t, map[string]string{})
	<-w.changed
	now, err := w.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	now.ResourceVersion = "now"
	before.Set(now, board(t, "h100", 4), true)
	if err := before.update(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.want(t, labels)
	w.tellNode(t)
	select {
	case <-w.changed:
	default:
		t.Error("nobody is told that the labels are back")
	}
	w.mustUpdate(t)
	w.want(t, map[string]string{})
}

// TestToldDuringWrite: the labels come back while they are being removed, and look as they did when the writer was told last.
func TestToldDuringWrite(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Write)
	w.tellNode(t)
	w.SetGPUs(board(t, "h100", 4))
	w.mustUpdate(t)
	w.use(Remove)
	w.tellNode(t)
	<-w.changed
	back := w.node.DeepCopy()
	back.ResourceVersion = "during the write"
	w.client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		w.Set(back, nil, false)
		return false, nil, nil
	})
	if err := w.update(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.changed:
	default:
		t.Error("nobody is told that the labels are back")
	}
	writes := w.writes()
	if err := w.update(t.Context()); err != nil || w.writes() != writes+1 {
		t.Errorf("%d writes more, %v, want one", w.writes()-writes, err)
	}
}

// TestLabelsOfOthers: what others have written stays, which is told once where it differs,
// also if it was ours before. It is ours again when they have removed it.
func TestLabelsOfOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Write)
	w.patch(t, `{"`+Product+`": "NVIDIA-H100-80GB-HBM3-SHARED", "`+Family+`": "hopper"}`)
	four := board(t, "h100", 4)
	w.SetGPUs(four)
	want := Of(four)
	want[Product] = "NVIDIA-H100-80GB-HBM3-SHARED"
	for range 3 {
		w.mustUpdate(t)
		w.want(t, want)
	}
	if len(w.warnings) != 1 || !strings.Contains(w.warnings[0], "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3-SHARED of nfd-master instead of NVIDIA-H100-80GB-HBM3.") {
		t.Errorf("%q", w.warnings)
	}

	w.patch(t, `{"`+Count+`": "16"}`)
	want[Count] = "16"
	w.mustUpdate(t)
	w.want(t, want)
	if len(w.warnings) != 2 || !strings.Contains(w.warnings[1], "nvidia.com/gpu.count=16 of nfd-master instead of 4, nvidia.com/gpu.product=") {
		t.Errorf("%q", w.warnings)
	}

	w.patch(t, `{"`+Product+`": null, "`+Family+`": null, "`+Count+`": null}`)
	w.mustUpdate(t)
	w.want(t, Of(four))
	if len(w.warnings) != 2 {
		t.Errorf("%q", w.warnings)
	}
}

// TestRun: a failure is repeated, and labels that somebody has removed come back.
func TestRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, Write)
		w.fail = errors.New("forbidden")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); w.Run(ctx) }()
		until := func(what string, done func() bool) {
			t.Helper()
			for range 1000 {
				synctest.Wait()
				if done() {
					return
				}
				time.Sleep(retryInterval) // in a bubble
			}
			t.Fatalf("never: %s", what)
		}
		gpus := board(t, "h100", 4)
		w.SetGPUs(gpus)
		synctest.Wait()
		if n := w.writes(); n > 0 {
			t.Errorf("%d writes before the node is known", n)
		}
		w.tellNode(t)
		until("a second try", func() bool { return w.writes() > 1 })
		before := w.writes()
		for range 60 { // the same GPUs are found every ten seconds
			w.SetGPUs(gpus)
			w.tellNode(t)
			time.Sleep(retryInterval / 6)
		}
		if n := w.writes() - before; n < 9 || n > 11 {
			t.Errorf("%d tries in ten minutes, want one a minute", n)
		}
		w.mu.Lock()
		w.fail = nil
		w.mu.Unlock()
		until("labels", func() bool { return maps.Equal(w.labels(t), Of(gpus)) })
		w.patch(t, `{"`+Count+`": null}`)
		w.tellNode(t)
		until("labels that were removed", func() bool { return maps.Equal(w.labels(t), Of(gpus)) })
		cancel()
		<-ended
		if !maps.Equal(w.labels(t), Of(gpus)) {
			t.Error("the labels went with the process")
		}
	})
}
