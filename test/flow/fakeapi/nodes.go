// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// DeleteNode removes a node. AddNode may make another one with the same name
// afterwards.
func (s *Server) DeleteNode(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.nodes, name)
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
