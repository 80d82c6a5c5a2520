// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

var nodeKind = corev1.SchemeGroupVersion.WithKind("Node")

// nodeFields merges what several managers apply to a node.
var nodeFields = sync.OnceValues(func() (*managedfields.FieldManager, error) {
	return managedfields.NewDefaultFieldManager(applyconfigurations.NewTypeConverter(scheme.Scheme), scheme.Scheme, scheme.Scheme, scheme.Scheme,
		nodeKind, nodeKind.GroupVersion(), "", nil)
})

// DeleteNode removes a node. AddNode may make another one with the same name
// afterwards.
func (s *Server) DeleteNode(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if node := s.nodes[name]; node != nil {
		delete(s.nodes, name)
		s.nextVersion()
		s.emit(watch.Deleted, node)
	}
}

// AddNode makes a node, or another one in its place. Its kubelet is as new as the server.
func (s *Server) AddNode(name string, handlers ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	node := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: uuid.NewUUID(), ResourceVersion: s.nextVersion()},
	}
	node.Status.NodeInfo.KubeletVersion = s.kubernetes
	for _, handler := range handlers {
		node.Status.RuntimeHandlers = append(node.Status.RuntimeHandlers, corev1.NodeRuntimeHandler{Name: handler})
	}
	s.nodes[name] = node
	s.emit(watch.Added, node)
}

// SetAllocatable says how much of a resource a node has.
func (s *Server) SetAllocatable(node string, name corev1.ResourceName, amount int64) {
	s.editNode(node, func(n *corev1.Node) {
		if n.Status.Allocatable == nil {
			n.Status.Allocatable = corev1.ResourceList{}
		}
		n.Status.Allocatable[name] = *resource.NewQuantity(amount, resource.DecimalSI)
	})
}

// SetKubelet says which version the kubelet of a node has.
func (s *Server) SetKubelet(node, version string) {
	s.editNode(node, func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = version })
}

// Annotate annotates a node, as kubectl annotate does.
func (s *Server) Annotate(node, key, value string) {
	s.editNode(node, func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, value) })
}

func (s *Server) editNode(name string, edit func(*corev1.Node)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := s.nodes[name].DeepCopy()
	edit(changed)
	changed.ResourceVersion = s.nextVersion()
	s.nodes[name] = changed
	s.emit(watch.Modified, changed)
}

func (s *Server) getNode(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	node, ok := s.nodes[r.PathValue("name")]
	s.mu.Unlock()
	if !ok {
		respondError(w, apierrors.NewNotFound(corev1.Resource("nodes"), r.PathValue("name")))
		return
	}
	respond(w, http.StatusOK, asRequested(r, node))
}

// listOrWatchNodes wants a field selector.
func (s *Server) listOrWatchNodes(w http.ResponseWriter, r *http.Request) {
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	if err != nil {
		respondError(w, apierrors.NewBadRequest(fmt.Sprintf("nodes are listed with a field selector: %v", err)))
		return
	}
	matches := func(o object) bool {
		node, is := o.(*corev1.Node)
		return is && selector.Matches(fields.Set{metav1.ObjectNameField: node.Name})
	}
	if r.URL.Query().Get("watch") == "true" || r.URL.Query().Get("watch") == "1" {
		s.watch(w, r, matches)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list := &corev1.NodeList{
		TypeMeta: metav1.TypeMeta{APIVersion: corev1.SchemeGroupVersion.Identifier(), Kind: "NodeList"},
		ListMeta: metav1.ListMeta{ResourceVersion: strconv.FormatInt(s.version, 10)},
	}
	for _, node := range s.nodes {
		if matches(node) {
			list.Items = append(list.Items, *node)
		}
	}
	respond(w, http.StatusOK, list)
}

// Node returns a node as it is stored, or nil if there is none.
func (s *Server) Node(name string) *corev1.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nodes[name].DeepCopy()
}

// patchNode handles server-side apply only.
func (s *Server) patchNode(w http.ResponseWriter, r *http.Request) {
	content, err := io.ReadAll(r.Body)
	patch := &unstructured.Unstructured{}
	if err == nil {
		err = yaml.Unmarshal(content, &patch.Object)
	}
	if err != nil {
		respondError(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	stored, status := s.applyNode(r.PathValue("name"), patch, r.URL.Query().Get("fieldManager"), r.URL.Query().Get("force") == "true")
	if status != nil {
		respondError(w, status)
		return
	}
	respond(w, http.StatusOK, stored)
}

func (s *Server) applyNode(name string, patch *unstructured.Unstructured, manager string, force bool) (*corev1.Node, *apierrors.StatusError) {
	fields, err := nodeFields()
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before, found := s.nodes[name]
	switch {
	case !found:
		return nil, apierrors.NewNotFound(corev1.Resource("nodes"), name)
	case patch.GetUID() != "" && patch.GetUID() != before.UID:
		return nil, apierrors.NewConflict(corev1.Resource("nodes"), name, fmt.Errorf("UID %s is not %s", patch.GetUID(), before.UID))
	}
	merged, err := fields.Apply(before.DeepCopy(), patch, manager, force)
	var conflict *apierrors.StatusError
	if errors.As(err, &conflict) {
		return nil, conflict
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	after, ok := merged.(*corev1.Node)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("a %T is no node", merged))
	}
	after.ResourceVersion = s.nextVersion()
	s.nodes[name] = after
	s.emit(watch.Modified, after)
	return after.DeepCopy(), nil
}
