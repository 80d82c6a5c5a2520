// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	_ "k8s.io/kubernetes/pkg/apis/admissionregistration/install"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	_ "k8s.io/kubernetes/pkg/apis/batch/install"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	_ "k8s.io/kubernetes/pkg/apis/events/install"
	_ "k8s.io/kubernetes/pkg/apis/networking/install"
	_ "k8s.io/kubernetes/pkg/apis/rbac/install"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
)

const (
	demos     = "../../../demo"
	templates = "../../../templates"
	examples  = "../../../docs/examples"

	tenant       = examples + "/tenant.yaml"
	tenantsOfMPS = examples + "/tenants-of-mps.yaml"
)

// codecs refuse unknown fields.
var codecs = serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict)

// chart are the objects of a golden file.
func chart(t *testing.T, golden string) []runtime.Object {
	t.Helper()
	return objects(t, "../../../deployments/helm/testdata/"+golden+".golden.yaml")
}

// objects are those of a YAML file whose kinds are known here.
func objects(t *testing.T, file string) (all []runtime.Object) {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(data))); ; {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		object, err := decode(document)
		if err == nil {
			all = append(all, object)
		} else if !runtime.IsNotRegisteredError(err) && !runtime.IsMissingKind(err) {
			t.Fatalf("%s: %v", file, err)
		}
	}
}

// decode returns the object of a document in the document's version, with defaults.
func decode(document []byte) (runtime.Object, error) {
	object, _, err := codecs.UniversalDeserializer().Decode(document, nil, nil)
	if err != nil {
		return nil, err
	}
	legacyscheme.Scheme.Default(object)
	return object, nil
}

// mustDecode is decode for documents that are right.
func mustDecode(t *testing.T, document []byte) runtime.Object {
	t.Helper()
	object, err := decode(document)
	if err != nil {
		t.Fatalf("%v in\n%s", err, document)
	}
	return object
}

// kindOf returns the kind of an object.
func kindOf(t *testing.T, object runtime.Object) schema.GroupVersionKind {
	t.Helper()
	kinds, _, err := legacyscheme.Scheme.ObjectKinds(object)
	if err != nil {
		t.Fatal(err)
	}
	return kinds[0]
}

// toInternal returns what the API server's own code works on.
func toInternal(t *testing.T, object runtime.Object) runtime.Object {
	t.Helper()
	internal, err := legacyscheme.Scheme.ConvertToVersion(object, schema.GroupVersion{Group: kindOf(t, object).Group, Version: runtime.APIVersionInternal})
	if err != nil {
		t.Fatal(err)
	}
	return internal
}

// in returns the document of an object in another version of its API.
func in(t *testing.T, version string, object runtime.Object) []byte {
	t.Helper()
	json, _ := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	encoder := codecs.EncoderForVersion(json.Serializer, schema.GroupVersion{Group: kindOf(t, object).Group, Version: version})
	converted, err := runtime.Encode(encoder, toInternal(t, object))
	if err != nil {
		t.Fatal(err)
	}
	return converted
}
