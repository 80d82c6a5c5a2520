// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metawatch

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

// server has nodes, and the watches of them that were begun.
type server struct {
	nodes   []corev1.Node
	watches []*watch.FakeWatcher
}

func (s *server) List(context.Context, metav1.ListOptions) (*corev1.NodeList, error) {
	return &corev1.NodeList{Items: s.nodes}, nil
}

func (s *server) Watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	s.watches = append(s.watches, watch.NewFake())
	return s.watches[len(s.watches)-1], nil
}

// TestWatch: all objects are told that there are, after each event and at the beginning of each watch.
func TestWatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		node := func(uid types.UID) *corev1.Node { return &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: uid}} }
		s := &server{nodes: []corev1.Node{*node("a"), *node("b")}}
		var told []types.UID
		w := Watch[*corev1.NodeList]{Client: s, What: "nodes", Changed: func(objects map[types.UID]metav1.Object) {
			told = slices.Sorted(maps.Keys(objects))
		}}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			w.Run(ctx)
		}()
		for _, step := range []struct {
			name    string
			happens func(now *watch.FakeWatcher)
			want    []types.UID
		}{
			{"changed", func(now *watch.FakeWatcher) { now.Modify(node("a")) }, []types.UID{"a", "b"}},
			{"deleted", func(now *watch.FakeWatcher) { now.Delete(node("a")) }, []types.UID{"b"}},
			{"made", func(now *watch.FakeWatcher) { now.Add(node("c")) }, []types.UID{"b", "c"}},
			{"another watch", func(now *watch.FakeWatcher) {
				s.nodes = []corev1.Node{*node("d")}
				now.Stop()
				time.Sleep(maxWatchPause)
			}, []types.UID{"d"}},
			{"a watch that fails", func(now *watch.FakeWatcher) {
				s.nodes = nil
				now.Error(&metav1.Status{})
				time.Sleep(maxWatchPause)
			}, nil},
		} {
			synctest.Wait()
			told = []types.UID{"nothing"}
			step.happens(s.watches[len(s.watches)-1])
			synctest.Wait()
			if !slices.Equal(told, step.want) {
				t.Errorf("%s: told %v, want %v", step.name, told, step.want)
			}
		}
		cancel()
		<-ended
	})
}
