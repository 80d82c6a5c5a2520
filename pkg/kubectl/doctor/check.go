// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package doctor examines whether a cluster is set up so that claims for GPUs work: the
// driver's pods, what it publishes, the classes, what else hands out GPUs, versions, and
// claims that are stuck. Each finding has its remedy.
//
// A check is a function over Facts, which were read before. It never asks the API server.
package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// Severity is how bad a finding is.
type Severity string

// Severities, from the worst to the best.
const (
	// Error: claims do not work, or the same GPU is given away twice.
	Error Severity = "error"
	// Warning: something works less well than it could, or may stop working.
	Warning Severity = "warning"
	// Unknown: what the check looks at may not be read.
	Unknown Severity = "unknown"
	// Note: people keep pods off devices, and nothing is wrong.
	Note Severity = "note"
	// OK: nothing was found.
	OK Severity = "ok"
)

var severities = []Severity{Error, Warning, Unknown, Note, OK}

func (s Severity) rank() int { return slices.Index(severities, s) }

// Ref is an object that a finding is about.
type Ref struct {
	// Kind is that of an object, in small letters, or gpu with the name NODE/ADDRESS.
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Label is what people call it where that is not its name.
	Label string `json:"label,omitempty"`
}

// String writes it for people.
func (r Ref) String() string {
	if r.Label != "" {
		return r.Label
	}
	if r.Namespace != "" {
		return r.Kind + " " + r.Namespace + "/" + r.Name
	}
	return r.Kind + " " + r.Name
}

func refTo(kind string, o metav1.Object) Ref {
	return Ref{Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName()}
}

func nodeRef(name string) Ref { return Ref{Kind: "node", Name: name} }

// Finding is something that a check found.
type Finding struct {
	Severity Severity `json:"severity"`
	// Objects are those with the same finding.
	Objects []Ref  `json:"objects,omitempty"`
	Message string `json:"message"`
	// Said is what the driver says in an event.
	Said string `json:"said,omitempty"`
	// Since is when it began, Until when it was over and Last when it was told last, as far as that is known.
	Since *metav1.Time `json:"since,omitempty"`
	Until *metav1.Time `json:"until,omitempty"`
	Last  *metav1.Time `json:"last,omitempty"`
	// Pods are those that it affects.
	Pods []Ref `json:"pods,omitempty"`
	// Commands come first, and then the remedy.
	Commands []string `json:"commands,omitempty"`
	Remedy   string   `json:"remedy,omitempty"`

	family *cause
	// lasts says that it is not over.
	lasts bool
}

// findings collects those of a check. What is the same of several objects is one.
type findings []Finding

func (f *findings) add(s Severity, message, remedy string, objects ...Ref) {
	f.addSince(nil, s, message, remedy, objects...)
}

// addSince adds what began at a time. Of several objects the earliest counts.
func (f *findings) addSince(since *metav1.Time, s Severity, message, remedy string, objects ...Ref) {
	same := slices.IndexFunc(*f, func(other Finding) bool {
		return other.Severity == s && other.Message == message && other.Remedy == remedy
	})
	if same < 0 {
		*f = append(*f, Finding{Severity: s, Message: message, Remedy: remedy})
		same = len(*f) - 1
	}
	(*f)[same].Since = earlier((*f)[same].Since, since)
	for _, o := range objects {
		if !slices.Contains((*f)[same].Objects, o) {
			(*f)[same].Objects = append((*f)[same].Objects, o)
		}
	}
}

// maxSaid is how much of what others said is shown, in bytes.
const maxSaid = 300

// said makes one line of what others said.
func said(text string) string { return quote.Line(strings.TrimSpace(text), maxSaid) }

// Check is one thing that can be wrong.
type Check struct {
	// ID never changes.
	ID string
	// Title says what is in order if nothing is found.
	Title string
	// needs are the resources that it looks at. It is not run if one of them could not be read.
	needs []string
	// parts are those among needs of which the objects of one namespace are enough to find
	// something.
	parts []string
	run   func(*Facts) findings
}

// Result is what came of a check.
type Result struct {
	ID    string `json:"id"`
	Title string `json:"title"`
	// Severity is that of the worst finding.
	Severity Severity  `json:"severity"`
	Findings []Finding `json:"findings,omitempty"`
}

// Report is what came of all checks.
type Report struct {
	metav1.TypeMeta `json:",inline"`

	// Checks are in the order of Checks.
	Checks []Result `json:"checks"`
	// History is what the driver warned of within an hour and is over. The newest comes first.
	History []Finding `json:"history,omitempty"`

	now time.Time
}

// Examine runs all checks.
func Examine(f *Facts) *Report {
	r := &Report{TypeMeta: printer.TypeMeta("DoctorReport"), now: f.Now}
	checks := Checks
	if f.uninstalled() {
		checks = checksWithoutDriver
	} else {
		r.History = f.investigate().past
	}
	for _, c := range checks {
		r.Checks = append(r.Checks, c.examine(f))
	}
	return r
}

// Count returns how many checks ended with a severity.
func (r *Report) Count(s Severity) int {
	n := 0
	for _, c := range r.Checks {
		if c.Severity == s {
			n++
		}
	}
	return n
}

func (c Check) examine(f *Facts) Result {
	result := Result{ID: c.ID, Title: c.Title, Severity: OK}
	var unknown findings
	run := true
	for _, m := range f.Missing {
		if !slices.Contains(c.needs, m.Resource) {
			continue
		}
		unknown.add(Unknown, fmt.Sprintf("Unknown because %s could not be read%s: %v", m.Resource, where(m), m.Err), remedyOf(m))
		run = run && m.Namespace == "" && slices.Contains(c.parts, m.Resource)
	}
	if run {
		result.Findings = c.run(f)
	}
	result.Findings = append(result.Findings, unknown...)
	slices.SortStableFunc(result.Findings, func(a, b Finding) int { return cmp.Compare(a.Severity.rank(), b.Severity.rank()) })
	if len(result.Findings) > 0 {
		result.Severity = result.Findings[0].Severity
	}
	return result
}

func where(m fleet.Missing) string {
	if m.Namespace == "" {
		return ""
	}
	return " in namespace " + m.Namespace
}

// remedyOf says which right is missing.
func remedyOf(m fleet.Missing) string {
	resource, _, _ := strings.Cut(m.Resource, ".")
	switch {
	case m.Resource == driverPlace:
		return "Ask for the right to list all deviceclasses; if you have it, install or upgrade the chart, which writes the annotation"
	case strings.Contains(resource, " "):
		return "Ask for the right to get the path /version"
	case m.Resource == configMaps:
		return "Ask for the right to get configmaps in namespace " + m.Namespace
	case m.Namespace != "":
		return "Ask for the right to list " + resource + " in namespace " + m.Namespace
	}
	return "Ask for the right to list all " + resource
}

// Resources that checks need, as in fleet.Missing.
const (
	nodes      = fleet.ResourceNodes
	pods       = fleet.ResourcePods
	slicesOf   = fleet.ResourceSlices
	classes    = fleet.ResourceClasses
	claims     = fleet.ResourceClaims
	templates  = fleet.ResourceTemplates
	taintRules = fleet.ResourceTaintRules
	events     = "events"
	configMaps = "configmaps"
	daemonSets = "daemonsets.apps"
	apiVersion = "the version of the API server"
	// driverPlace is needed by all that look at the driver's own objects.
	driverPlace = "the driver's namespace"
)

// Checks are all, in the order in which they are shown.
var Checks = []Check{
	{ID: "driver-daemonset", Title: "the driver is installed", needs: []string{driverPlace, daemonSets}, run: driverInstalled},
	{ID: "driver-pods", Title: "every node with GPUs has a pod of the driver", needs: []string{driverPlace, nodes, pods, daemonSets}, run: driverOnEveryNode},
	{ID: "driver-pods-ready", Title: "the pods of the driver are ready", needs: []string{driverPlace, pods}, parts: []string{pods}, run: pluginsReady},
	{ID: "driver-restarts", Title: "the pods of the driver do not restart", needs: []string{driverPlace, pods}, parts: []string{pods}, run: driverRestarts},
	{ID: "mps-supervisor", Title: "every node with MPS shares has a supervisor that is ready", needs: []string{driverPlace, pods, slicesOf}, run: supervisorsReady},
	{ID: "gpus", Title: "nothing is wrong with a GPU", needs: []string{slicesOf}, run: func(f *Facts) findings { return f.investigate().gpus }},
	{ID: "pools-complete", Title: "the pools of ResourceSlices are complete", needs: []string{slicesOf}, run: poolsComplete},
	{ID: "nodes-publish", Title: "every node with GPUs and a pod of the driver has ResourceSlices", needs: []string{driverPlace, slicesOf, nodes, pods}, run: nodesPublish},
	{ID: "nodes-offer", Title: "every node with ResourceSlices has devices that can be allocated", needs: []string{slicesOf, taintRules}, parts: []string{taintRules}, run: nodesOffer},
	{ID: "taint-rules", Title: "no DeviceTaintRule keeps pods off devices", needs: []string{slicesOf, taintRules}, run: taintRulesThatApply},
	{ID: "device-classes", Title: "the chart's classes are there", needs: []string{classes, slicesOf}, run: classesExist},
	{ID: "class-selectors", Title: "the chart's classes select the driver's devices", needs: []string{classes, slicesOf}, run: classesSelect},
	{ID: "extended-resources", Title: "no two classes have the same extended resource", needs: []string{classes}, run: extendedResources},
	{ID: "claimed-classes", Title: "claims and templates ask for classes that exist", needs: []string{classes, claims, templates}, parts: []string{claims, templates}, run: claimedClasses},
	{ID: "sharing-policy", Title: "the sharing policy is valid", needs: []string{driverPlace, daemonSets, configMaps}, parts: []string{daemonSets}, run: policyValid},
	{ID: "one-driver", Title: "every node has one driver with this name", needs: []string{driverPlace, pods}, parts: []string{pods}, run: oneDriver},
	{ID: "foreign-slices", Title: "all ResourceSlices of the driver's name are this driver's", needs: []string{slicesOf}, run: foreignSlices},
	{ID: "device-plugin", Title: "no device plugin gives away the GPUs of the driver's nodes", needs: []string{nodes, slicesOf}, run: devicePlugin},
	{ID: "mig-manager", Title: "no MIG manager partitions the GPUs of the driver's nodes", needs: []string{nodes, pods, slicesOf}, parts: []string{pods}, run: migManager},
	{ID: "gpu-operator", Title: "the GPU Operator stops Partage before it replaces NVIDIA's driver", needs: []string{driverPlace, nodes, pods, daemonSets}, parts: []string{pods}, run: gpuOperator},
	{ID: "gpus-by-annotation", Title: "no pod names GPUs in an annotation", needs: []string{pods}, parts: []string{pods}, run: gpusByAnnotation},
	{ID: "node-labels", Title: "the labels of nodes agree with what the driver publishes", needs: []string{nodes, slicesOf}, run: nodeLabels},
	{ID: "apiserver-version", Title: "the version of the API server has no known holes", needs: []string{apiVersion}, run: apiServerVersion},
	{ID: "kubelet-versions", Title: "the versions of the kubelets have no known holes", needs: []string{apiVersion, nodes, slicesOf, classes, claims}, parts: []string{claims}, run: kubeletVersions},
	{ID: "feature-gates", Title: "the API server stores what the driver publishes", needs: []string{slicesOf}, run: featureGates},
	{ID: "cdi", Title: "no container has failed because of CDI within an hour", needs: []string{events}, parts: []string{events}, run: cdiFailures},
	{ID: "claims-deleting", Title: "no claim is stuck in its deletion", needs: []string{claims}, parts: []string{claims}, run: claimsDeleting},
	{ID: "claims-devices", Title: "claims have devices that are published", needs: []string{claims, slicesOf}, parts: []string{claims}, run: claimsDevices},
	{
		ID: "driver-events", Title: "the driver warns of nothing that lasts", needs: []string{events, slicesOf, claims}, parts: []string{events, claims},
		run: func(f *Facts) findings { return f.investigate().others },
	},
}
