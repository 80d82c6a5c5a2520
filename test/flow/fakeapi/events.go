// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/scheme"
)

// Events returns what was reported, in the order in which it came. An event that
// was repeated is one with a higher Count.
func (s *Server) Events() []corev1.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.reported)
}

// ForgetEvents removes all events, as their time to live does.
func (s *Server) ForgetEvents() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reported = nil
}

func (s *Server) createEvent(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		respondError(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		respondError(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	reported, ok := object.(*corev1.Event)
	switch {
	case !ok:
		respondError(w, apierrors.NewBadRequest(fmt.Sprintf("got a %T", object)))
		return
	case reported.Namespace != r.PathValue("namespace"):
		respondError(w, apierrors.NewBadRequest("the namespace of the object is not that of the request"))
		return
	case reported.ResourceVersion != "":
		respondError(w, errVersionOfNew)
		return
	case len(reported.Name) > validation.DNS1123SubdomainMaxLength:
		respondError(w, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Event").GroupKind(), reported.Name, nil))
		return
	case len(reported.Message) > 1024: // the chart's admission policy
		respondError(w, apierrors.NewForbidden(corev1.Resource("events"), reported.Name, errors.New("its message is longer than 1024 bytes")))
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.eventIndex(reported.Namespace, reported.Name) >= 0 {
		respondError(w, apierrors.NewAlreadyExists(corev1.Resource("events"), reported.Name))
		return
	}
	reported.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Event"}
	reported.ResourceVersion = s.nextVersion()
	s.reported = append(s.reported, *reported)
	respond(w, http.StatusCreated, reported)
}

func (s *Server) patchEvent(w http.ResponseWriter, r *http.Request) {
	patch, err := io.ReadAll(r.Body)
	if err != nil {
		respondError(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.eventIndex(r.PathValue("namespace"), r.PathValue("name"))
	if at < 0 {
		respondError(w, apierrors.NewNotFound(corev1.Resource("events"), r.PathValue("name")))
		return
	}
	patched, err := patchedEvent(&s.reported[at], patch)
	if err != nil {
		respondError(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	patched.ResourceVersion = s.nextVersion()
	s.reported[at] = *patched
	respond(w, http.StatusOK, patched)
}

func patchedEvent(before *corev1.Event, patch []byte) (*corev1.Event, error) {
	old, err := json.Marshal(before)
	if err != nil {
		return nil, err
	}
	merged, err := strategicpatch.StrategicMergePatch(old, patch, corev1.Event{})
	if err != nil {
		return nil, err
	}
	after := &corev1.Event{}
	return after, json.Unmarshal(merged, after)
}

// eventIndex needs the lock; -1 means that there is none.
func (s *Server) eventIndex(namespace, name string) int {
	return slices.IndexFunc(s.reported, func(e corev1.Event) bool { return e.Namespace == namespace && e.Name == name })
}
