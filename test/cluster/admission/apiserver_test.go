// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"maps"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	resourcev1beta1 "k8s.io/api/resource/v1beta1"
	resourcev1beta2 "k8s.io/api/resource/v1beta2"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/warning"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
)

// namespaces are those of the API server, and which Pod Security Standard they enforce.
var namespaces = map[string]string{"default": "", "team": "", "kube-system": "", "baseline": "baseline", "restricted": "restricted", "team-a": "restricted", "unlabelled": "restricted", "gpu-operator": "", "partage": ""}

// mpsClasses are the labels of namespaces in docs/examples/tenants-of-mps.yaml.
var mpsClasses = map[string]string{"team-a": "team-a.mps.example.com"}

// namespaceLabels are those of all namespaces but "unlabelled", for the values of
// namespacePolicy in everything.yaml.
var namespaceLabels = map[string]string{"example.com/gpu": "mps", "example.com/time-slicing": "true", "example.com/observes": ""}

// resources are those of the kinds that policies are about.
var resources = map[string]string{"ResourceClaim": "resourceclaims", "ResourceClaimTemplate": "resourceclaimtemplates", "Event": "events", "DeviceClass": "deviceclasses", "Node": "nodes", "Pod": "pods", "Binding": "pods"}

// apiServer is the part of an API server that asks policies.
type apiServer struct {
	plugin     *validating.Plugin
	interfaces admission.ObjectInterfaces
}

// newAPIServer starts an apiServer with all policies of a golden file, and with objects that
// they look up.
func newAPIServer(t *testing.T, golden string, stored ...runtime.Object) *apiServer {
	t.Helper()
	return startAPIServer(t, append(enforced(t, golden, ""), stored...)...)
}

// enforced are the policies of a golden file whose names end like that, with their bindings. Of several
// that refuse an object, the API server names any one.
func enforced(t *testing.T, golden, suffix string) (all []runtime.Object) {
	t.Helper()
	for _, object := range chart(t, golden) {
		switch policy := object.(type) {
		case *admissionregistrationv1.ValidatingAdmissionPolicy:
			if strings.HasSuffix(policy.Name, suffix) {
				all = append(all, policy)
			}
		case *admissionregistrationv1.ValidatingAdmissionPolicyBinding:
			if strings.HasSuffix(policy.Name, suffix) {
				all = append(all, policy)
			}
		}
	}
	return all
}

// startAPIServer starts an apiServer with some policies, and objects that they look up.
func startAPIServer(t *testing.T, stored ...runtime.Object) *apiServer {
	t.Helper()
	for name := range namespaces {
		stored = append(stored, namespace(name))
	}
	client := fake.NewClientset(stored...)
	factory := informers.NewSharedInformerFactory(client, 0)
	plugin, err := validating.NewPlugin(nil)
	if err != nil {
		t.Fatal(err)
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	// The only parameters of policies.
	mapper.Add(resourcev1.SchemeGroupVersion.WithKind("ResourceClaimTemplate"), meta.RESTScopeNamespace)
	initializer.New(client, dynamicfake.NewSimpleDynamicClient(runtime.NewScheme()), factory, schedulerMayBind, nil, nil, t.Context().Done(), mapper).Initialize(plugin)
	plugin.SetRESTMapper(mapper)
	if err := plugin.ValidateInitialization(); err != nil {
		t.Fatal(err)
	}
	factory.Start(t.Context().Done())
	for !plugin.WaitForReady() {
		if t.Context().Err() != nil {
			t.Fatal("the admission plugin does not become ready")
		}
	}

	// As an API server that serves all versions of claims.
	equivalent := runtime.NewEquivalentResourceRegistry()
	for _, version := range []schema.GroupVersion{resourcev1.SchemeGroupVersion, resourcev1beta2.SchemeGroupVersion, resourcev1beta1.SchemeGroupVersion} {
		for _, kind := range []string{"ResourceClaim", "ResourceClaimTemplate", "DeviceClass"} {
			equivalent.RegisterKindFor(version.WithResource(resources[kind]), "", version.WithKind(kind))
		}
	}
	scheme := legacyscheme.Scheme
	return &apiServer{plugin: plugin, interfaces: &admission.RuntimeObjectInterfaces{
		ObjectCreater: scheme, ObjectTyper: scheme, ObjectDefaulter: scheme, ObjectConvertor: scheme, EquivalentResourceMapper: equivalent,
	}}
}

// namespace returns one of namespaces.
func namespace(name string) *corev1.Namespace {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	if name != "unlabelled" {
		maps.Copy(n.Labels, namespaceLabels)
	}
	if level := namespaces[name]; level != "" {
		n.Labels["pod-security.kubernetes.io/enforce"] = level
	}
	if class := mpsClasses[name]; class != "" {
		n.Labels["example.com/mps-class"] = class
	}
	return n
}

// request is one to the API server.
type request struct {
	by        user.Info
	operation admission.Operation
	namespace string
	// object is the new one, old the stored one, in the version of the request.
	object, old runtime.Object
	subresource string
}

// ask returns the warnings that a client gets, and the refusal.
func (s *apiServer) ask(t *testing.T, r request) (warnings []string, refused error) {
	t.Helper()
	var kind schema.GroupVersionKind
	var name string
	internal := func(object runtime.Object) runtime.Object {
		if object == nil {
			return nil
		}
		about, err := meta.Accessor(object)
		if err != nil {
			t.Fatal(err)
		}
		kind, name = kindOf(t, object), about.GetName()
		return toInternal(t, object)
	}
	object, old := internal(r.object), internal(r.old)
	attributes := admission.NewAttributesRecord(object, old, kind, r.namespace, name,
		kind.GroupVersion().WithResource(resources[kind.Kind]), r.subresource, r.operation, nil, false, r.by)
	var recorder warningRecorder
	refused = s.plugin.Validate(warning.WithWarningRecorder(t.Context(), &recorder), attributes, s.interfaces)
	return recorder.warnings, refused
}

// create asks for somebody who creates the object of a document.
func (s *apiServer) create(t *testing.T, namespace string, document []byte) (warnings []string, refused error) {
	t.Helper()
	return s.ask(t, request{by: somebody, operation: admission.Create, namespace: namespace, object: mustDecode(t, document)})
}

// scheduler is who binds pods.
var scheduler = &user.DefaultInfo{Name: user.KubeScheduler}

// schedulerMayBind allows what only schedulers may.
var schedulerMayBind = authorizer.AuthorizerFunc(func(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser() == scheduler && a.GetVerb() == "create" && a.GetResource() == "pods" && a.GetSubresource() == "binding" && a.GetNamespace() == "restricted" {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
})

// somebody is a user whom no policy names.
var somebody = &user.DefaultInfo{Name: "somebody"}

type warningRecorder struct{ warnings []string }

func (r *warningRecorder) AddWarning(_, text string) { r.warnings = append(r.warnings, text) }
