// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
)

// errVersionOfNew is what etcd3/store.go of k8s.io/apiserver says.
var errVersionOfNew = apierrors.NewInternalError(errors.New("resourceVersion should not be set on objects to be created"))

// object is a slice or a node.
type object interface {
	metav1.Object
	runtime.Object
}

// event is one change of an object, as a watch sends it.
type event struct {
	version int64
	kind    watch.EventType
	object  object
}

// Slices returns the stored slices in the order of their names, which is the
// order that the scheduler tries them in.
func (s *Server) Slices() []resourceapi.ResourceSlice {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sortedSlices()
}

// EditSlice changes a slice as an administrator does. It does nothing if there is no
// slice of that name.
func (s *Server) EditSlice(name string, edit func(*resourceapi.ResourceSlice)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slice, exists := s.slices[name]
	if !exists {
		return
	}
	slice = slice.DeepCopy()
	edit(slice)
	slice.ResourceVersion = s.nextVersion()
	s.slices[name] = slice
	s.emit(watch.Modified, slice)
}

// EachDevice calls visit for the devices of all stored slices, which it must not change
// or keep. It is for tests that look very often: Slices copies everything.
func (s *Server) EachDevice(visit func(*resourceapi.Device)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slice := range s.slices {
		for i := range slice.Spec.Devices {
			visit(&slice.Spec.Devices[i])
		}
	}
}

// DeleteSlices removes all slices, as a starting kubelet does.
func (s *Server) DeleteSlices() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.slices {
		s.remove(name)
	}
}

// DeleteSlice removes one slice, as an administrator does. It does nothing if
// there is no slice of that name.
func (s *Server) DeleteSlice(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(name)
}

// remove needs the lock. It returns what was there, or nil.
func (s *Server) remove(name string) *resourceapi.ResourceSlice {
	slice, exists := s.slices[name]
	if !exists {
		return nil
	}
	delete(s.slices, name)
	slice = slice.DeepCopy()
	slice.ResourceVersion = s.nextVersion()
	s.emit(watch.Deleted, slice)
	return slice
}

func (s *Server) sortedSlices() []resourceapi.ResourceSlice {
	sorted := make([]resourceapi.ResourceSlice, 0, len(s.slices))
	for _, slice := range s.slices {
		sorted = append(sorted, *slice.DeepCopy())
	}
	slices.SortFunc(sorted, func(a, b resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	return sorted
}

// emit needs the lock.
func (s *Server) emit(kind watch.EventType, changed object) {
	s.events = append(s.events, event{version: s.version, kind: kind, object: changed})
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Server) createSlice(w http.ResponseWriter, r *http.Request) {
	slice, err := s.decodeSlice(r)
	if err != nil {
		respondError(w, err)
		return
	}
	if slice.ResourceVersion != "" {
		respondError(w, errVersionOfNew)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if slice.Name == "" {
		slice.Name = slice.GenerateName + rand.String(5)
	}
	if _, exists := s.slices[slice.Name]; exists {
		respondError(w, apierrors.NewAlreadyExists(sliceResource(), slice.Name))
		return
	}
	slice.UID = uuid.NewUUID()
	s.drop(slice, nil)
	if err := s.invalid(slice); err != nil {
		respondError(w, err)
		return
	}
	if !dryRun(r) {
		slice.ResourceVersion = s.nextVersion()
		s.slices[slice.Name] = slice
		s.emit(watch.Added, slice)
	}
	respond(w, http.StatusCreated, slice)
}

func (s *Server) updateSlice(w http.ResponseWriter, r *http.Request) {
	slice, err := s.decodeSlice(r)
	if err != nil {
		respondError(w, err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old, exists := s.slices[r.PathValue("name")]
	switch {
	case !exists:
		respondError(w, apierrors.NewNotFound(sliceResource(), r.PathValue("name")))
		return
	case slice.UID != "" && slice.UID != old.UID:
		respondError(w, apierrors.NewConflict(sliceResource(), old.Name, fmt.Errorf("UID %s is not %s", slice.UID, old.UID)))
		return
	case slice.ResourceVersion != "" && slice.ResourceVersion != old.ResourceVersion:
		respondError(w, apierrors.NewConflict(sliceResource(), old.Name, fmt.Errorf("version %s is not %s", slice.ResourceVersion, old.ResourceVersion)))
		return
	case slice.Name != old.Name:
		respondError(w, apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", slice.Name, old.Name)))
		return
	case slice.Spec.Driver != old.Spec.Driver, slice.Spec.Pool.Name != old.Spec.Pool.Name, !ptr.Equal(slice.Spec.NodeName, old.Spec.NodeName):
		respondError(w, invalidSlice(old.Name, field.Invalid(field.NewPath("spec"), old.Name, "driver, pool and node are immutable")))
		return
	}
	s.drop(slice, old)
	if err := s.invalid(slice); err != nil {
		respondError(w, err)
		return
	}
	slice.UID, slice.ResourceVersion = old.UID, old.ResourceVersion
	if apiequality.Semantic.DeepEqual(slice, old) { // a real one writes nothing either
		respond(w, http.StatusOK, old)
		return
	}
	slice.ResourceVersion = s.nextVersion()
	s.slices[slice.Name] = slice
	s.emit(watch.Modified, slice)
	respond(w, http.StatusOK, slice)
}

func (s *Server) deleteSlice(w http.ResponseWriter, r *http.Request) {
	options, err := deleteOptions(r)
	if err != nil {
		respondError(w, err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p, old := options.Preconditions, s.slices[r.PathValue("name")]; p != nil && old != nil &&
		(p.UID != nil && *p.UID != old.UID || p.ResourceVersion != nil && *p.ResourceVersion != old.ResourceVersion) {
		respondError(w, apierrors.NewConflict(sliceResource(), old.Name, errors.New("a precondition is not met")))
		return
	}
	slice := s.remove(r.PathValue("name"))
	if slice == nil {
		respondError(w, apierrors.NewNotFound(sliceResource(), r.PathValue("name")))
		return
	}
	respond(w, http.StatusOK, slice)
}

func deleteOptions(r *http.Request) (*metav1.DeleteOptions, *apierrors.StatusError) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	options := &metav1.DeleteOptions{}
	if len(body) == 0 {
		return options, nil
	}
	// Both encodings have it; the version of its group does not matter.
	if _, _, err := metainternalversionscheme.Codecs.UniversalDeserializer().Decode(body, nil, options); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	return options, nil
}

func (s *Server) decodeSlice(r *http.Request) (*resourceapi.ResourceSlice, *apierrors.StatusError) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	object, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	slice, ok := object.(*resourceapi.ResourceSlice)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("got a %T", object))
	}
	slice.TypeMeta = metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"}
	return slice, nil
}

func dryRun(r *http.Request) bool { return r.URL.Query().Get("dryRun") == metav1.DryRunAll }

func (s *Server) listOrWatchSlices(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	selector, err := fields.ParseSelector(query.Get("fieldSelector"))
	if err != nil {
		respondError(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	if query.Get("watch") == "true" || query.Get("watch") == "1" {
		s.watch(w, r, func(o object) bool {
			slice, is := o.(*resourceapi.ResourceSlice)
			return is && matches(selector, slice)
		})
		return
	}
	s.mu.Lock()
	list := &resourceapi.ResourceSliceList{
		TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSliceList"},
		ListMeta: metav1.ListMeta{ResourceVersion: strconv.FormatInt(s.version, 10)},
	}
	for _, slice := range s.sortedSlices() {
		if matches(selector, &slice) {
			list.Items = append(list.Items, slice)
		}
	}
	s.mu.Unlock()
	if wantsMetadata(r) {
		respond(w, http.StatusOK, metadataList(list))
		return
	}
	respond(w, http.StatusOK, list)
}

func matches(selector fields.Selector, slice *resourceapi.ResourceSlice) bool {
	nodeName := ""
	if slice.Spec.NodeName != nil {
		nodeName = *slice.Spec.NodeName
	}
	return selector.Matches(fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   slice.Spec.Driver,
		resourceapi.ResourceSliceSelectorNodeName: nodeName,
		resourceapi.ResourceSliceSelectorPoolName: slice.Spec.Pool.Name,
		"metadata.name": slice.Name,
	})
}

// watch sends changes of objects until the client goes away. A client may ask to be
// told all slices that exist first, which ends with a bookmark.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, matches func(object) bool) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w).Flush
	if err := flush(); err != nil {
		return
	}
	send := func(kind watch.EventType, object runtime.Object) bool {
		frame := struct {
			Type   watch.EventType `json:"type"`
			Object runtime.Object  `json:"object"`
		}{kind, asRequested(r, object)}
		return json.NewEncoder(w).Encode(frame) == nil && flush() == nil
	}
	ctx, cancel := limited(r)
	defer cancel()
	since, _ := strconv.ParseInt(r.URL.Query().Get("resourceVersion"), 10, 64)
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		s.mu.Lock()
		existing := s.sortedSlices()
		since = s.version
		s.mu.Unlock()
		for _, slice := range existing {
			if matches(&slice) && !send(watch.Added, &slice) {
				return
			}
		}
		if !send(watch.Bookmark, initialEventsEnd(since)) {
			return
		}
	}
	for {
		pending, version, changed, restored := s.eventsSince(since, matches)
		// After a restore this is a version of the future: as from a real server, nothing comes until it is passed.
		since = max(since, version)
		for _, e := range pending {
			if !send(e.kind, e.object) {
				return
			}
		}
		select {
		case <-changed:
		case <-restored:
			return
		case <-ctx.Done():
			return
		}
	}
}

// limited returns the request's context, which ends after timeoutSeconds if there are any.
func limited(r *http.Request) (context.Context, context.CancelFunc) {
	seconds, err := strconv.Atoi(r.URL.Query().Get("timeoutSeconds"))
	if err != nil || seconds <= 0 {
		return context.WithCancel(r.Context())
	}
	return context.WithTimeout(r.Context(), time.Duration(seconds)*time.Second)
}

// eventsSince returns what has happened after a version, the version now, and channels
// that are closed when there is more and when etcd is restored.
func (s *Server) eventsSince(since int64, matches func(object) bool) (pending []event, version int64, changed, restored <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events {
		if e.version > since && matches(e.object) {
			pending = append(pending, e)
		}
	}
	return pending, s.version, s.changed, s.restored
}

func initialEventsEnd(version int64) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice"},
		ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.FormatInt(version, 10),
			Annotations:     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		},
	}
}
