// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/kubernetes/pkg/apis/admissionregistration"
	"k8s.io/kubernetes/pkg/apis/admissionregistration/validation"
)

// goldenPolicies are golden files and their policies.
var goldenPolicies = map[string][]string{
	"defaults":          {"partage-cdi-annotations", "partage-device-configs", "partage-own-claim-status", "partage-own-events", "partage-own-node-resourceslices", "partage-slow-requests"},
	"scheduler-crashes": {"partage-all-devices", "partage-cdi-annotations", "partage-device-configs", "partage-own-claim-status", "partage-own-events", "partage-own-node-resourceslices", "partage-slow-requests"},
	"everything":        {"share-gpus-all-devices", "share-gpus-cdi-annotations", "share-gpus-mps-pods", "share-gpus-mps-resources", "share-gpus-namespaces", "share-gpus-slow-limits", "share-gpus-slow-requests", "share-gpus-without-profile"},
	"no-supervisor":     {"partage-cdi-annotations", "partage-device-configs", "partage-own-claim-status", "partage-own-events", "partage-own-node-resourceslices"},
	"node-labels":       {"partage-cdi-annotations", "partage-device-configs", "partage-own-claim-status", "partage-own-events", "partage-own-node-labels", "partage-own-node-resourceslices", "partage-slow-requests"},
	"mig-resources-all": {"partage-cdi-annotations", "partage-device-configs", "partage-own-claim-status", "partage-own-events", "partage-own-node-resourceslices", "partage-slow-requests"},
}

// policies are those of a golden file.
func policies(t *testing.T, golden string) (all []*admissionregistrationv1.ValidatingAdmissionPolicy) {
	t.Helper()
	for _, object := range chart(t, golden) {
		if p, is := object.(*admissionregistrationv1.ValidatingAdmissionPolicy); is {
			all = append(all, p)
		}
	}
	return all
}

// TestPoliciesAreValid: an API server takes the policies, and each is in force.
func TestPoliciesAreValid(t *testing.T) {
	for golden, want := range goldenPolicies {
		var names, bound []string
		for _, object := range chart(t, golden) {
			switch object := toInternal(t, object).(type) {
			case *admissionregistration.ValidatingAdmissionPolicy:
				names = append(names, object.Name)
				if errs := validation.ValidateValidatingAdmissionPolicy(object); len(errs) > 0 {
					t.Errorf("%s: %v", golden, errs.ToAggregate())
				}
			case *admissionregistration.ValidatingAdmissionPolicyBinding:
				bound = append(bound, object.Spec.PolicyName)
				if errs := validation.ValidateValidatingAdmissionPolicyBinding(object); len(errs) > 0 {
					t.Errorf("%s: %v", golden, errs.ToAggregate())
				}
			}
		}
		slices.Sort(names)
		slices.Sort(bound)
		if !slices.Equal(names, want) || !slices.Equal(bound, want) {
			t.Errorf("%s: policies %v, bound %v, want %v", golden, names, bound, want)
		}
	}
}

// compiled is a policy as the admission plugin compiles it.
type compiled struct{ conditions, validations, messages cel.ConditionEvaluator }

// compile compiles a policy for API servers of a version.
func compile(t *testing.T, p *admissionregistrationv1.ValidatingAdmissionPolicy, kubernetes *version.Version, mode environment.Type) compiled {
	t.Helper()
	compiler, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(kubernetes))
	if err != nil {
		t.Fatal(err)
	}
	options := cel.OptionalVariableDeclarations{HasAuthorizer: true, HasParams: p.Spec.ParamKind != nil}
	check := func(accessor cel.ExpressionAccessor) cel.ExpressionAccessor {
		if result := compiler.CompileCELExpression(accessor, options, mode); result.Error != nil {
			t.Errorf("Kubernetes %s: %s: %v: %s", kubernetes, p.Name, result.Error, accessor.GetExpression())
		}
		return accessor
	}
	for _, v := range p.Spec.Variables {
		compiler.CompileAndStoreVariable(&validating.Variable{Name: v.Name, Expression: v.Expression}, options, mode)
		check(&validating.Variable{Name: v.Name, Expression: v.Expression})
	}
	var conditions, validations, messages []cel.ExpressionAccessor
	for _, c := range p.Spec.MatchConditions {
		conditions = append(conditions, check(&validating.ValidationCondition{Expression: c.Expression}))
	}
	for _, v := range p.Spec.Validations {
		validations = append(validations, check(&validating.ValidationCondition{Expression: v.Expression}))
		if v.MessageExpression != "" {
			messages = append(messages, check(&validating.MessageExpressionCondition{MessageExpression: v.MessageExpression}))
		}
	}
	return compiled{
		conditions: compiler.CompileCondition(conditions, options, mode), validations: compiler.CompileCondition(validations, options, mode),
		messages: compiler.CompileCondition(messages, options, mode),
	}
}

// TestOldestKubernetes: the API server of the oldest version that the chart is for takes
// the policies. For the sake of a rollback it takes only what the version before knows.
func TestOldestKubernetes(t *testing.T) {
	for golden := range goldenPolicies {
		for _, p := range policies(t, golden) {
			compile(t, p, version.MajorMinor(1, 33), environment.NewExpressions)
		}
	}
}

// largestClaim has as many requests, alternatives and selectors as a claim may have, as
// long as the API server takes the request; all of them break a rule.
func largestClaim() *resourcev1.ResourceClaim {
	const size = celconfig.MaxRequestSizeBytes
	selectors := resourcev1.DeviceRequestsMaxSize * resourcev1.FirstAvailableDeviceRequestMaxSize * resourcev1.DeviceSelectorsMaxSize
	expression := strings.Repeat("x", int(size)/selectors-len(`{"cel":{"expression":""}},`))
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "largest", Namespace: "default"}}
	for i := range resourcev1.DeviceRequestsMaxSize {
		r := resourcev1.DeviceRequest{Name: fmt.Sprintf("%063d", i)}
		for j := range resourcev1.FirstAvailableDeviceRequestMaxSize {
			s := resourcev1.DeviceSubRequest{Name: fmt.Sprintf("%063d", j), DeviceClassName: "mig.nvidia.com", Count: 30}
			if j%2 == 1 {
				s.AllocationMode, s.Count = resourcev1.DeviceAllocationModeAll, 0
			}
			for range resourcev1.DeviceSelectorsMaxSize {
				s.Selectors = append(s.Selectors, resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: expression}})
			}
			r.FirstAvailable = append(r.FirstAvailable, s)
		}
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, r)
	}
	for i := range resourcev1.DeviceConstraintsMaxSize {
		name := resourcev1.FullyQualifiedName("gpu.nvidia.com/profile")
		constraint := resourcev1.DeviceConstraint{MatchAttribute: &name}
		for j := range resourcev1.DeviceRequestsMaxSize {
			constraint.Requests = append(constraint.Requests, fmt.Sprintf("other-%d-%d", i, j))
		}
		claim.Spec.Devices.Constraints = append(claim.Spec.Devices.Constraints, constraint)
	}
	return claim
}

// isAboutClaims reports whether a policy judges claims.
func isAboutClaims(p *admissionregistrationv1.ValidatingAdmissionPolicy) bool {
	return slices.Contains(p.Spec.MatchConstraints.ResourceRules[0].Resources, "resourceclaims")
}

// cost is that of a policy for a claim.
func (c compiled) cost(t *testing.T, claim *resourcev1.ResourceClaim) int64 {
	t.Helper()
	resource := resourcev1.SchemeGroupVersion.WithResource("resourceclaims")
	attributes := admission.NewAttributesRecord(claim, nil, resourcev1.SchemeGroupVersion.WithKind("ResourceClaim"), claim.Namespace, claim.Name,
		resource, "", admission.Create, nil, false, &user.DefaultInfo{})
	versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedObject: admission.NewLazyObject(claim), VersionedKind: attributes.GetKind()}
	asked := cel.CreateAdmissionRequest(attributes, metav1.GroupVersionResource(resource), metav1.GroupVersionKind(attributes.GetKind()))
	used := int64(0)
	for part, evaluator := range map[string]cel.ConditionEvaluator{"conditions": c.conditions, "validations": c.validations, "messages": c.messages} {
		results, rest, err := evaluator.ForInput(t.Context(), versioned, asked, cel.OptionalVariableBindings{}, namespace(claim.Namespace), celconfig.RuntimeCELCostBudget)
		if err != nil {
			t.Fatalf("%s: %v", part, err)
		}
		for _, r := range results {
			if r.Error != nil {
				t.Errorf("%s: %v", part, r.Error)
			}
		}
		used += celconfig.RuntimeCELCostBudget - rest
	}
	return used
}

// TestCosts: no claim that the API allows is too expensive to look at.
func TestCosts(t *testing.T) {
	claims := map[string]*resourcev1.ResourceClaim{"requests": largestClaim(), "configurations": largestConfigs()}
	measured := 0
	for golden := range goldenPolicies {
		for _, p := range policies(t, golden) {
			if !isAboutClaims(p) {
				continue
			}
			measured++
			policy := compile(t, p, environment.DefaultCompatibilityVersion(), environment.StoredExpressions)
			for name, claim := range claims {
				used := policy.cost(t, claim)
				t.Logf("%s: %s: %s costs %d of %d", golden, name, p.Name, used, int64(celconfig.RuntimeCELCostBudget))
				if used < 50 || used > celconfig.RuntimeCELCostBudget/5 {
					t.Errorf("%s: %s: %s costs %d", golden, name, p.Name, used)
				}
			}
		}
	}
	if measured != 14 {
		t.Errorf("%d policies", measured)
	}
}
