// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package memory measures how much memory the ResourceSlices of many nodes take in the scheduler, without
// nodes, pods and an API server: the caches are those of the scheduler, filled from the bytes that an API
// server would send. Nothing else in a scheduler grows with what is published.
package memory

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceslice/tracker"
)

// Load reads what a machine publishes, as test/scale/slices wrote it.
func Load(dir, name string) ([]resourceapi.ResourceSlice, error) {
	data, err := os.ReadFile(filepath.Join(dir, name+".json"))
	if err != nil {
		return nil, fmt.Errorf("read the slices of %s: %w", name, err)
	}
	var published []resourceapi.ResourceSlice
	if err := json.Unmarshal(data, &published); err != nil {
		return nil, fmt.Errorf("read the slices of %s: %w", name, err)
	}
	return published, nil
}

// Sizes are those of all nodes together.
type Sizes struct {
	// Sent is what the API server sends, as protobuf, Heap by how much the heap grows.
	Sent, Heap int64
}

// Measure returns the sizes of the slices of so many nodes that publish these.
func Measure(ctx context.Context, published []resourceapi.ResourceSlice, nodes int) (Sizes, error) {
	before := heap()
	known, sent, stop, err := schedulerOf(ctx, published, nodes)
	if err != nil {
		return Sizes{}, err
	}
	defer stop()
	after := heap()
	found, err := known.ListPatchedResourceSlices()
	if err != nil {
		return Sizes{}, fmt.Errorf("list what the scheduler knows: %w", err)
	}
	if want := nodes * len(published); len(found) != want {
		return Sizes{}, fmt.Errorf("the scheduler knows %d slices, want %d", len(found), want)
	}
	return Sizes{Sent: sent, Heap: after - before}, nil
}

// schedulerOf returns what the scheduler knows its slices from. Its caches last until stop is called.
func schedulerOf(ctx context.Context, published []resourceapi.ResourceSlice, nodes int) (known *tracker.Tracker, sent int64, stop func(), err error) {
	answer, err := encode(published, nodes)
	if err != nil {
		return nil, 0, nil, err
	}
	api := &apiServer{answer: answer}
	config := &rest.Config{Host: "http://cluster", Transport: api, QPS: -1}
	config.ContentType, config.AcceptContentTypes = apiruntime.ContentTypeProtobuf, apiruntime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, 0, nil, fmt.Errorf("make a client: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	factory := informers.NewSharedInformerFactory(client, 0)
	known, err = tracker.StartTracker(ctx, tracker.Options{
		EnableDeviceTaintRules: true, EnableConsumableCapacity: true, KubeClient: client,
		SliceInformer: factory.Resource().V1().ResourceSlices(), TaintInformer: factory.Resource().V1().DeviceTaintRules(),
	})
	if err != nil {
		cancel()
		return nil, 0, nil, fmt.Errorf("start the tracker of slices: %w", err)
	}
	stop = func() {
		cancel()
		factory.Shutdown()
		known.Stop()
	}
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), known.HasSynced) {
		stop()
		return nil, 0, nil, errors.New("the caches were not filled")
	}
	sent = int64(len(answer))
	api.answer = nil // not to be measured
	return known, sent, stop, nil
}

// encode returns the list of all slices of all nodes as an API server sends it.
func encode(published []resourceapi.ResourceSlice, nodes int) ([]byte, error) {
	list := &resourceapi.ResourceSliceList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
	for n := range nodes {
		name := fmt.Sprintf("gpu-worker-%05d", n)
		for i := range published {
			s := published[i]
			s.ObjectMeta = metav1.ObjectMeta{Name: fmt.Sprintf("%05x-%s-%s", i, s.Spec.Driver, name), UID: "00000000-0000-4000-8000-000000000000", ResourceVersion: "1"}
			s.Spec.NodeName, s.Spec.Pool.Name = &name, name
			list.Items = append(list.Items, s)
		}
	}
	var out bytes.Buffer
	codec := scheme.Codecs.EncoderForVersion(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), resourceapi.SchemeGroupVersion)
	if err := codec.Encode(list, &out); err != nil {
		return nil, fmt.Errorf("encode the slices of %d nodes: %w", nodes, err)
	}
	return out.Bytes(), nil
}

// apiServer answers lists: with the slices, or with nothing. Its watches tell nothing.
type apiServer struct{ answer []byte }

// RoundTrip is part of http.RoundTripper.
func (s *apiServer) RoundTrip(r *http.Request) (*http.Response, error) {
	query := r.URL.Query()
	switch {
	case query.Has("sendInitialEvents"):
		// A client that is refused lists instead.
		refusal := apierrors.NewInvalid(resourceapi.SchemeGroupVersion.WithKind("ResourceSlice").GroupKind(), "", nil)
		data, err := json.Marshal(refusal.Status())
		if err != nil {
			return nil, err
		}
		return response(r, http.StatusUnprocessableEntity, apiruntime.ContentTypeJSON, io.NopCloser(bytes.NewReader(data))), nil
	case query.Has("watch"):
		silence, w := io.Pipe()
		context.AfterFunc(r.Context(), func() { _ = w.CloseWithError(r.Context().Err()) })
		return response(r, http.StatusOK, apiruntime.ContentTypeProtobuf+";stream=watch", silence), nil
	case strings.HasSuffix(r.URL.Path, "/resourceslices"):
		return response(r, http.StatusOK, apiruntime.ContentTypeProtobuf, io.NopCloser(bytes.NewReader(s.answer))), nil
	}
	list := `{"kind":"DeviceTaintRuleList","apiVersion":"resource.k8s.io/v1","metadata":{"resourceVersion":"1"},"items":[]}`
	return response(r, http.StatusOK, apiruntime.ContentTypeJSON, io.NopCloser(strings.NewReader(list))), nil
}

func response(r *http.Request, code int, contentType string, body io.ReadCloser) *http.Response {
	return &http.Response{StatusCode: code, Request: r, ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{"Content-Type": {contentType}}, Body: body}
}

// heap is how much of it is in use once what is not needed any more is gone, which may take more
// than one collection.
func heap() int64 {
	var m runtime.MemStats
	for last := ^uint64(0); ; last = m.HeapAlloc {
		runtime.GC()
		runtime.ReadMemStats(&m)
		if m.HeapAlloc+m.HeapAlloc/1000 >= last {
			return int64(m.HeapAlloc)
		}
		time.Sleep(wait.Jitter(50*time.Millisecond, 0.1))
	}
}
