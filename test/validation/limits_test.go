// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package validation

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
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

// asking are limits for one resource.
func asking(resourceName, amount string) corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(resourceName): resource.MustParse(amount)}}
}

// times are so many containers.
func times(n int, of corev1.ResourceRequirements) []corev1.ResourceRequirements {
	return slices.Repeat([]corev1.ResourceRequirements{of}, n)
}

// podWith is a pod with containers that ask for resources.
func podWith(initial, containers []corev1.ResourceRequirements) admission.Attributes {
	kind := corev1.SchemeGroupVersion.WithKind("Pod")
	pod := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "slow"},
		Spec:       corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true)}},
	}
	// Another policy asks that containers with MPS cannot be root. Of two policies that deny, either may answer.
	never := &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false)}
	for i, r := range initial {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, corev1.Container{Name: fmt.Sprint("i", i), Image: "c", Resources: r, SecurityContext: never})
	}
	for i, r := range containers {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: fmt.Sprint("c", i), Image: "c", Resources: r, SecurityContext: never})
	}
	return created(pod, kind, "pods")
}

// padded are limits with so many more resources, of others, or of this driver but none of it.
func padded(limits corev1.ResourceRequirements, n int) corev1.ResourceRequirements {
	for i := range n {
		limits.Limits[corev1.ResourceName(fmt.Sprintf("example.com/%060d", i))] = resource.MustParse("0")
	}
	return limits
}

const (
	anyProfile = "deviceclass.resource.kubernetes.io/mig.nvidia.com"
	oneProfile = "nvidia.com/mig-1g.10gb"
)

// TestSlowLimitsAreDenied: what requestPolicy.slow=Deny keeps out of claims it keeps out of pods, whose limits may name a
// class: many partitions of any profile hold up the scheduler. However large the pod is, the policy gets to its end.
func TestSlowLimitsAreDenied(t *testing.T) {
	server, interfaces := admitter(t), &admission.RuntimeObjectInterfaces{
		ObjectCreater: scheme.Scheme, ObjectTyper: scheme.Scheme, ObjectDefaulter: scheme.Scheme, ObjectConvertor: scheme.Scheme,
		EquivalentResourceMapper: runtime.NewEquivalentResourceRegistry(),
	}
	if err := server.Validate(t.Context(), claimWith(16), interfaces); err == nil {
		t.Fatal("a claim for 16 partitions of any profile is taken")
	}
	none := corev1.ResourceRequirements{}
	requests := corev1.ResourceRequirements{Requests: corev1.ResourceList{anyProfile: resource.MustParse("5")}}
	for name, c := range map[string]struct {
		initial, containers []corev1.ResourceRequirements
		want                string
	}{
		"none":                        {containers: times(3, none)},
		"CPU":                         {containers: times(1, asking("cpu", "64"))},
		"one":                         {containers: times(1, asking(anyProfile, "1"))},
		"four":                        {containers: times(1, asking(anyProfile, "4"))},
		"five":                        {containers: times(1, asking(anyProfile, "5")), want: "container c0 asks for more than 4 partitions of any profile"},
		"sixteen":                     {containers: times(1, asking(anyProfile, "16")), want: "more than 4 partitions of any profile"},
		"a thousand":                  {containers: times(1, asking(anyProfile, "1k")), want: "more than 4 partitions of any profile"},
		"five, in requests":           {containers: times(1, requests), want: "more than 4 partitions of any profile"},
		"five, at first":              {initial: times(1, asking(anyProfile, "5")), containers: times(1, none), want: "container i0 asks for more than 4"},
		"twelve of a profile":         {containers: times(1, asking(oneProfile, "12"))},
		"thirteen of a profile":       {containers: times(1, asking(oneProfile, "13")), want: "more than 12 devices"},
		"thirteen shares":             {containers: times(1, asking("nvidia.com/gpu.mps", "13")), want: "more than 12 devices"},
		"of an administrator's class": {containers: times(1, asking("deviceclass.resource.kubernetes.io/small-gpus.example.com", "13")), want: "more than 12 devices"},
		"of another driver":           {containers: times(6, asking("deviceclass.resource.kubernetes.io/nic.example.com", "30"))},
		"five containers":             {containers: times(5, asking(oneProfile, "1"))},
		"six containers":              {containers: times(6, asking(oneProfile, "1")), want: "more than 5 containers ask for class mig-1g.10gb.nvidia.com"},
		"six containers for none":     {containers: times(6, asking(oneProfile, "0"))},
		"33 containers":               {initial: times(4, asking(anyProfile, "1")), containers: times(29, asking(oneProfile, "1")), want: "more than 32 containers"},
		"the largest":                 {containers: append(times(2000, none), times(300, padded(asking(oneProfile, "1"), 30))...), want: "more than 32 containers"},
		"the longest":                 {containers: times(1, padded(asking(anyProfile, "5"), 10000)), want: "more than 4 partitions of any profile"},
		"the largest without":         {containers: times(3000, none)},
	} {
		err := server.Validate(t.Context(), podWith(c.initial, c.containers), interfaces)
		if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("a pod whose limits ask for %s: %v, want %q", name, err, c.want)
		}
	}
}
