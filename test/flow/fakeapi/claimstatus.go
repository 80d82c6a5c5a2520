// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"fmt"
	"io"
	"net/http"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// claimKind is what field managers are about.
var claimKind = resourceapi.SchemeGroupVersion.WithKind("ResourceClaim")

// claimFields merges what several managers apply, as an API server does it.
var claimFields = sync.OnceValues(func() (*managedfields.FieldManager, error) {
	return managedfields.NewDefaultFieldManager(applyconfigurations.NewTypeConverter(scheme.Scheme), scheme.Scheme, scheme.Scheme, scheme.Scheme,
		claimKind, claimKind.GroupVersion(), "status", nil)
})

// DropDeviceStatus makes the server behave as with the feature gate
// DRAResourceClaimDeviceStatus off.
func (s *Server) DropDeviceStatus(drop bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropDeviceStatus = drop
}

// Claim returns a claim as it is stored, or nil if there is none.
func (s *Server) Claim(namespace, name string) *resourceapi.ResourceClaim {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claims[types.NamespacedName{Namespace: namespace, Name: name}].DeepCopy()
}

// ApplyStatus applies a claim's status for a field manager, as another driver would. It
// returns the version that is stored.
func (s *Server) ApplyStatus(patch *resourceapi.ResourceClaim, manager string) (*resourceapi.ResourceClaim, error) {
	content, err := yaml.Marshal(patch)
	if err != nil {
		return nil, err
	}
	stored, status := s.applyClaimStatus(types.NamespacedName{Namespace: patch.Namespace, Name: patch.Name}, content, manager)
	if status != nil {
		return nil, status
	}
	return stored, nil
}

// patchClaimStatus handles server-side apply only.
func (s *Server) patchClaimStatus(w http.ResponseWriter, r *http.Request) {
	key := types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")}
	if got := r.Header.Get("Content-Type"); got != string(types.ApplyYAMLPatchType) {
		respondError(w, apierrors.NewBadRequest("patches of type "+got+" are not handled"))
		return
	}
	if manager := r.URL.Query().Get("fieldManager"); manager == "" || r.URL.Query().Get("force") != "true" {
		respondError(w, apierrors.NewBadRequest(fmt.Sprintf("field manager %q does not force its fields", manager)))
		return
	}
	content, err := io.ReadAll(r.Body)
	if err != nil {
		respondError(w, apierrors.NewBadRequest(err.Error()))
		return
	}
	stored, status := s.applyClaimStatus(key, content, r.URL.Query().Get("fieldManager"))
	if status != nil {
		respondError(w, status)
		return
	}
	respond(w, http.StatusOK, stored)
}

func (s *Server) applyClaimStatus(key types.NamespacedName, content []byte, manager string) (*resourceapi.ResourceClaim, *apierrors.StatusError) {
	patch := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(content, &patch.Object); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	fields, err := claimFields()
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before, found := s.claims[key]
	switch {
	case !found:
		return nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), key.Name)
	case patch.GetUID() != "" && patch.GetUID() != before.UID:
		return nil, invalidClaim(key.Name, field.Invalid(field.NewPath("metadata", "uid"), patch.GetUID(), "field is immutable"))
	}
	merged, err := fields.Apply(before.DeepCopy(), patch, manager, true)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	claim, ok := merged.(*resourceapi.ResourceClaim)
	if !ok {
		return nil, apierrors.NewInternalError(fmt.Errorf("a %T is no claim", merged))
	}
	// Only the status counts.
	after := before.DeepCopy()
	after.Status, after.ManagedFields = claim.Status, claim.ManagedFields
	if s.dropDeviceStatus {
		after.Status.Devices = before.Status.Devices
	}
	if status := checkDevices(after); status != nil {
		return nil, status
	}
	s.statusWrites[manager]++
	after.ResourceVersion = s.nextVersion()
	s.claims[key] = after
	return after.DeepCopy(), nil
}

// StatusWrites is how many requests of a field manager to write the status of any claim were
// accepted.
func (s *Server) StatusWrites(manager string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.statusWrites[manager]
}

// checkDevices is the one check that an API server makes and a driver may run into.
func checkDevices(claim *resourceapi.ResourceClaim) *apierrors.StatusError {
	type device struct{ driver, pool, device, share string }
	allocated := map[device]bool{}
	if claim.Status.Allocation != nil {
		for _, r := range claim.Status.Allocation.Devices.Results {
			allocated[device{r.Driver, r.Pool, r.Device, string(ptr.Deref(r.ShareID, ""))}] = true
		}
	}
	for i, d := range claim.Status.Devices {
		if !allocated[device{d.Driver, d.Pool, d.Device, ptr.Deref(d.ShareID, "")}] {
			return invalidClaim(claim.Name, field.Invalid(field.NewPath("status", "devices").Index(i), d.Device, "must be an allocated device in the claim"))
		}
		if d.Data != nil && len(d.Data.Raw) > resourceapi.AllocatedDeviceStatusDataMaxLength {
			return invalidClaim(claim.Name, field.TooLong(field.NewPath("status", "devices").Index(i).Child("data"), "", resourceapi.AllocatedDeviceStatusDataMaxLength))
		}
		for j, c := range d.Conditions {
			if c.Reason == "" || c.LastTransitionTime == (metav1.Time{}) {
				return invalidClaim(claim.Name, field.Required(field.NewPath("status", "devices").Index(i).Child("conditions").Index(j), "reason and lastTransitionTime"))
			}
		}
	}
	return nil
}

func invalidClaim(name string, err *field.Error) *apierrors.StatusError {
	return apierrors.NewInvalid(claimKind.GroupKind(), name, field.ErrorList{err})
}
