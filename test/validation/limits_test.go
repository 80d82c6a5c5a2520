// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package validation

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/knownfailures"
)

// denying is what helm makes of the chart with requestPolicy.slow=Deny.
const denying = "../../deployments/helm/testdata/everything.golden.yaml"

// policiesOfChart are those of a rendered chart, with their bindings.
func policiesOfChart(t *testing.T) (all []runtime.Object) {
	t.Helper()
	content, err := os.ReadFile(denying)
	if err != nil {
		t.Fatal(err)
	}
	reader := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), 4096)
	for {
		var raw runtime.RawExtension
		err := reader.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(raw.Raw, nil, nil)
		if err != nil {
			continue // of a kind that this scheme does not have
		}
		switch object := object.(type) {
		case *admissionregistrationv1.ValidatingAdmissionPolicy:
			all = append(all, object)
			setDefaults(object.Spec.MatchConstraints)
		case *admissionregistrationv1.ValidatingAdmissionPolicyBinding:
			all = append(all, object)
			setDefaults(object.Spec.MatchResources)
		}
	}
}

// setDefaults fills in what the API server does for policies when it stores them.
func setDefaults(matched *admissionregistrationv1.MatchResources) {
	if matched == nil {
		return
	}
	matched.NamespaceSelector = cmp.Or(matched.NamespaceSelector, &metav1.LabelSelector{})
	matched.ObjectSelector = cmp.Or(matched.ObjectSelector, &metav1.LabelSelector{})
	matched.MatchPolicy = cmp.Or(matched.MatchPolicy, ptr.To(admissionregistrationv1.Equivalent))
}

// admitter is the part of an API server that asks policies.
func admitter(t *testing.T) *validating.Plugin {
	t.Helper()
	objects := policiesOfChart(t)
	if len(objects) < 6 {
		t.Fatalf("the chart has %d policies and bindings", len(objects))
	}
	client := fake.NewClientset(append(objects, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}})...)
	factory := informers.NewSharedInformerFactory(client, 0)
	plugin, err := validating.NewPlugin(nil)
	if err != nil {
		t.Fatal(err)
	}
	nobody := authorizer.AuthorizerFunc(func(context.Context, authorizer.Attributes) (authorizer.Decision, string, error) {
		return authorizer.DecisionNoOpinion, "", nil
	})
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(schema.GroupVersionKind{Group: "resource.k8s.io", Version: "v1", Kind: "ResourceClaimTemplate"}, meta.RESTScopeNamespace)
	initializer.New(client, dynamicfake.NewSimpleDynamicClient(runtime.NewScheme()), factory, nobody, nil, nil, t.Context().Done(), mapper).Initialize(plugin)
	plugin.SetRESTMapper(mapper)
	if err := plugin.ValidateInitialization(); err != nil {
		t.Fatal(err)
	}
	factory.Start(t.Context().Done())
	if !plugin.WaitForReady() {
		t.Fatal("the policies are not read")
	}
	return plugin
}

// created is a request of somebody who creates an object.
func created(object runtime.Object, kind schema.GroupVersionKind, plural string) admission.Attributes {
	return admission.NewAttributesRecord(object, nil, kind, "default", "slow", kind.GroupVersion().WithResource(plural), "",
		admission.Create, &metav1.CreateOptions{}, false, &user.DefaultInfo{Name: "somebody"})
}

// claimWith asks for so many partitions of any profile.
func claimWith(partitions int64) admission.Attributes {
	kind := resourceapi.SchemeGroupVersion.WithKind("ResourceClaim")
	return created(&resourceapi.ResourceClaim{
		TypeMeta:   metav1.TypeMeta{APIVersion: kind.GroupVersion().String(), Kind: kind.Kind},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "slow"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "r", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "mig.nvidia.com", Count: partitions},
		}}}},
	}, kind, "resourceclaims")
}

// podWith is a pod whose limits ask for so many partitions of any profile.
func podWith(partitions string) admission.Attributes {
	kind := corev1.SchemeGroupVersion.WithKind("Pod")
	return created(&corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "slow"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "c", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{"deviceclass.resource.kubernetes.io/mig.nvidia.com": resource.MustParse(partitions)},
		}}}},
	}, kind, "pods")
}

// TestSlowLimitsAreDenied: what requestPolicy.slow=Deny keeps out of claims it keeps out of pods, whose limits may name a
// class: many partitions of any profile hold up the scheduler.
func TestSlowLimitsAreDenied(t *testing.T) {
	knownfailures.Expect(t)
	server, interfaces := admitter(t), &admission.RuntimeObjectInterfaces{
		ObjectCreater: scheme.Scheme, ObjectTyper: scheme.Scheme, ObjectDefaulter: scheme.Scheme, ObjectConvertor: scheme.Scheme,
		EquivalentResourceMapper: runtime.NewEquivalentResourceRegistry(),
	}
	if err := server.Validate(t.Context(), claimWith(16), interfaces); err == nil {
		t.Fatal("a claim for 16 partitions of any profile is taken")
	}
	if err := server.Validate(t.Context(), podWith("1"), interfaces); err != nil {
		t.Fatalf("a pod whose limits ask for one partition: %v", err)
	}
	if err := server.Validate(t.Context(), podWith("16"), interfaces); err == nil {
		t.Error("a pod whose limits ask for 16 partitions of any profile is taken where slow requests are denied")
	}
}
