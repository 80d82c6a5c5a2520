// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fakeapi

import (
	"net/http"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// wantsMetadata reports whether the client asked for nothing else.
func wantsMetadata(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata")
}

// asRequested is the object, or its metadata where the client asked for that.
func asRequested(r *http.Request, object runtime.Object) runtime.Object {
	accessor, err := meta.Accessor(object)
	if err != nil || !wantsMetadata(r) {
		return object
	}
	partial := meta.AsPartialObjectMetadata(accessor)
	partial.TypeMeta = metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.Identifier(), Kind: "PartialObjectMetadata"}
	return partial
}

func metadataList(list *resourceapi.ResourceSliceList) *metav1.PartialObjectMetadataList {
	partial := &metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.Identifier(), Kind: "PartialObjectMetadataList"},
		ListMeta: list.ListMeta,
	}
	for i := range list.Items {
		item := meta.AsPartialObjectMetadata(&list.Items[i])
		item.TypeMeta = metav1.TypeMeta{APIVersion: metav1.SchemeGroupVersion.Identifier(), Kind: "PartialObjectMetadata"}
		partial.Items = append(partial.Items, *item)
	}
	return partial
}
