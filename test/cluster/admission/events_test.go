// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

const (
	driver     = "gpu.nvidia.com"
	ownNode    = "node-1"
	pluginUser = "system:serviceaccount:partage:partage-gpu-kubelet-plugin"
)

// pluginOn returns who the plugin is on a node, as its token says; an empty name stands for
// a token that is bound to no pod.
func pluginOn(node string) *user.DefaultInfo {
	info := &user.DefaultInfo{Name: pluginUser, Groups: []string{user.AllAuthenticated}}
	if node != "" {
		info.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
	}
	return info
}

// aboutNode, aboutPod and aboutClaim make events as the plugin does.
func aboutNode() *corev1.Event {
	return event("default", corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: ownNode, UID: ownNode})
}

func aboutPod() *corev1.Event {
	return event("team", corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "team", Name: "p", UID: "uid-p"})
}

func aboutClaim() *corev1.Event {
	return event("team", corev1.ObjectReference{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim", Namespace: "team", Name: "c", UID: "uid-c"})
}

func event(namespace string, about corev1.ObjectReference) *corev1.Event {
	return &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: about.Name + ".1"},
		InvolvedObject: about, Type: "Warning", Reason: "GPULost", Message: "it fell off", Count: 1,
		Source:              corev1.EventSource{Component: driver, Host: ownNode},
		ReportingController: driver, ReportingInstance: ownNode,
	}
}

// inGroup is the same event as events.k8s.io/v1 has it.
func inGroup(e *corev1.Event) *eventsv1.Event {
	return &eventsv1.Event{
		ObjectMeta: e.ObjectMeta, Regarding: e.InvolvedObject, Related: e.Related, Type: e.Type, Reason: e.Reason, Note: e.Message, Action: "Watch",
		DeprecatedSource: e.Source, ReportingController: e.ReportingController, ReportingInstance: e.ReportingInstance,
	}
}

// served are the versions in which events are served.
var served = map[string]func(*corev1.Event) runtime.Object{
	"v1":               func(e *corev1.Event) runtime.Object { return e },
	"events.k8s.io/v1": func(e *corev1.Event) runtime.Object { return inGroup(e) },
}

// TestNewEvents: what the plugin may report.
func TestNewEvents(t *testing.T) {
	server := newAPIServer(t, "defaults")
	type change = func(*corev1.Event)
	none := func(*corev1.Event) {}
	cases := 0
	for name, test := range map[string]struct {
		of   func() *corev1.Event
		edit change
		by   user.Info
		// want is a part of the refusal; nothing means that it is allowed.
		want string
	}{
		"own node":             {of: aboutNode, edit: none},
		"own node without UID": {of: aboutNode, edit: func(e *corev1.Event) { e.InvolvedObject.UID = "" }},
		"pod":                  {of: aboutPod, edit: none},
		"claim":                {of: aboutClaim, edit: none},
		"claim in an older API": {of: aboutClaim, edit: func(e *corev1.Event) {
			e.InvolvedObject.APIVersion = "resource.k8s.io/v1beta1"
		}},
		"pod in default":     {of: aboutPod, edit: func(e *corev1.Event) { e.Namespace, e.InvolvedObject.Namespace = "default", "default" }},
		"no source":          {of: aboutPod, edit: func(e *corev1.Event) { e.Source = corev1.EventSource{} }},
		"normal":             {of: aboutPod, edit: func(e *corev1.Event) { e.Type = "Normal" }},
		"long message":       {of: aboutPod, edit: func(e *corev1.Event) { e.Message = strings.Repeat("x", 1024) }},
		"somebody else's":    {of: aboutPod, edit: func(e *corev1.Event) { e.ReportingController = "kubelet" }, by: &user.DefaultInfo{Name: "system:node:" + ownNode}},
		"plugin of the node": {of: aboutPod, edit: func(e *corev1.Event) { e.ReportingInstance, e.Source.Host = "node-2", "node-2" }, by: pluginOn("node-2")},

		"token without a pod":    {of: aboutPod, edit: none, by: pluginOn(""), want: "not bound to a pod"},
		"token of another node":  {of: aboutPod, edit: none, by: pluginOn("node-2"), want: "reportingInstance"},
		"other reporter":         {of: aboutPod, edit: func(e *corev1.Event) { e.ReportingController = "kubelet" }, want: "is the reporter"},
		"no reporter":            {of: aboutPod, edit: func(e *corev1.Event) { e.ReportingController = "" }, want: "is the reporter"},
		"other component":        {of: aboutPod, edit: func(e *corev1.Event) { e.Source.Component = "kubelet" }, want: "is the reporter"},
		"other instance":         {of: aboutPod, edit: func(e *corev1.Event) { e.ReportingInstance = "node-2" }, want: "reportingInstance"},
		"no instance":            {of: aboutPod, edit: func(e *corev1.Event) { e.ReportingInstance = "" }, want: "reportingInstance"},
		"other host":             {of: aboutPod, edit: func(e *corev1.Event) { e.Source.Host = "node-2" }, want: "reportingInstance"},
		"other node":             {of: aboutNode, edit: func(e *corev1.Event) { e.InvolvedObject.Name = "node-2" }, want: "may write events about"},
		"UID of another node":    {of: aboutNode, edit: func(e *corev1.Event) { e.InvolvedObject.UID = "node-2" }, want: "may write events about"},
		"node elsewhere":         {of: aboutNode, edit: func(e *corev1.Event) { e.Namespace = "team" }, want: "may write events about"},
		"node in a namespace":    {of: aboutNode, edit: func(e *corev1.Event) { e.InvolvedObject.Namespace = "default" }, want: "may write events about"},
		"node of another API":    {of: aboutNode, edit: func(e *corev1.Event) { e.InvolvedObject.APIVersion = "example.com/v1" }, want: "may write events about"},
		"pod of another API":     {of: aboutPod, edit: func(e *corev1.Event) { e.InvolvedObject.APIVersion = "example.com/v1" }, want: "may write events about"},
		"claim of another API":   {of: aboutClaim, edit: func(e *corev1.Event) { e.InvolvedObject.APIVersion = "resource.k8s.io.example.com/v1" }, want: "may write events about"},
		"pod of other namespace": {of: aboutPod, edit: func(e *corev1.Event) { e.InvolvedObject.Namespace = "kube-system" }, want: "may write events about"},
		"pod of no namespace":    {of: aboutPod, edit: func(e *corev1.Event) { e.Namespace, e.InvolvedObject.Namespace = "default", "" }, want: "may write events about"},
		"claim elsewhere":        {of: aboutClaim, edit: func(e *corev1.Event) { e.Namespace = "default" }, want: "may write events about"},
		"an escape":              {of: aboutPod, edit: func(e *corev1.Event) { e.Message = "all is well\x1b[2J" }, want: "control characters"},
		"lines":                  {of: aboutNode, edit: func(e *corev1.Event) { e.Message = "all is well\nuntil" }, want: "control characters"},
		"another direction":      {of: aboutPod, edit: func(e *corev1.Event) { e.Message = "\u202ellew si lla" }, want: "control characters"},
		"a hidden character":     {of: aboutPod, edit: func(e *corev1.Event) { e.Reason = "GPU\u200bLost" }, want: "control characters"},
		"no name":                {of: aboutPod, edit: func(e *corev1.Event) { e.InvolvedObject.Name = "" }, want: "may write events about"},
		"nothing":                {of: aboutPod, edit: func(e *corev1.Event) { e.InvolvedObject = corev1.ObjectReference{} }, want: "may write events about"},
		"deployment":             {of: aboutPod, edit: func(e *corev1.Event) { e.InvolvedObject.APIVersion, e.InvolvedObject.Kind = "apps/v1", "Deployment" }, want: "may write events about"},
		"secret":                 {of: aboutPod, edit: func(e *corev1.Event) { e.InvolvedObject.Kind = "Secret" }, want: "may write events about"},
		"namespace":              {of: aboutNode, edit: func(e *corev1.Event) { e.InvolvedObject.Kind = "Namespace" }, want: "may write events about"},
		"related":                {of: aboutPod, edit: func(e *corev1.Event) { e.Related = &corev1.ObjectReference{Kind: "Node", Name: "node-2"} }, want: "related object"},
		"annotations":            {of: aboutPod, edit: func(e *corev1.Event) { e.Annotations = map[string]string{"x": strings.Repeat("x", 200_000)} }, want: "annotations"},
		"labels":                 {of: aboutPod, edit: func(e *corev1.Event) { e.Labels = map[string]string{"x": "y"} }, want: "annotations"},
		"finalizers":             {of: aboutPod, edit: func(e *corev1.Event) { e.Finalizers = []string{"example.com/stays"} }, want: "annotations"},
		"owners": {of: aboutPod, edit: func(e *corev1.Event) {
			e.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "uid-p"}}
		}, want: "annotations"},
		"message without end":     {of: aboutPod, edit: func(e *corev1.Event) { e.Message = strings.Repeat("x", 1025) }, want: "1024"},
		"everything of a kubelet": {of: aboutPod, edit: func(e *corev1.Event) { e.ReportingController, e.Source.Component = "kubelet", "kubelet" }, want: "is the reporter"},
	} {
		for version, as := range served {
			cases++
			t.Run(version+" "+name, func(t *testing.T) {
				e := test.of()
				test.edit(e)
				by := test.by
				if by == nil {
					by = pluginOn(ownNode)
				}
				_, err := server.ask(t, request{by: by, operation: admission.Create, namespace: e.Namespace, object: as(e)})
				check(t, err, test.want)
			})
		}
	}
	if t.Logf("%d cases", cases); cases != 90 {
		t.Errorf("%d cases", cases)
	}
}

// TestEventsOfOthers: the plugin may count on its own events, and neither change nor
// delete those of others.
func TestEventsOfOthers(t *testing.T) {
	server := newAPIServer(t, "defaults")
	counted := func(e *corev1.Event) *corev1.Event {
		e = e.DeepCopy()
		e.Count++
		e.Message = "it has fallen off"
		return e
	}
	of := func(edit func(*corev1.Event)) *corev1.Event {
		e := aboutPod()
		edit(e)
		return e
	}
	kubelets := of(func(e *corev1.Event) {
		e.ReportingController, e.Source.Component = "kubelet", "kubelet"
	})
	otherNodes := of(func(e *corev1.Event) { e.ReportingInstance, e.Source.Host = "node-2", "node-2" })
	aboutDeployment := of(func(e *corev1.Event) { e.InvolvedObject.APIVersion, e.InvolvedObject.Kind = "apps/v1", "Deployment" })
	annotated := of(func(e *corev1.Event) { e.Annotations = map[string]string{"x": "y"} })
	cases := 0
	for name, test := range map[string]struct {
		operation admission.Operation
		old, new  *corev1.Event
		want      string
	}{
		"own":                         {admission.Update, aboutPod(), counted(aboutPod()), ""},
		"own, of the node":            {admission.Update, aboutNode(), counted(aboutNode()), ""},
		"own, of a claim":             {admission.Update, aboutClaim(), counted(aboutClaim()), ""},
		"the kubelet's":               {admission.Update, kubelets, counted(kubelets), "is the reporter"},
		"the kubelet's made own":      {admission.Update, kubelets, aboutPod(), "is the reporter"},
		"own made the kubelet's":      {admission.Update, aboutPod(), kubelets, "is the reporter"},
		"of another node":             {admission.Update, otherNodes, counted(otherNodes), "reportingInstance"},
		"of another node made own":    {admission.Update, otherNodes, aboutPod(), "reportingInstance"},
		"own made another node's":     {admission.Update, aboutPod(), otherNodes, "reportingInstance"},
		"about something else":        {admission.Update, aboutDeployment, aboutPod(), "may write events about"},
		"own made about another":      {admission.Update, aboutPod(), aboutDeployment, "may write events about"},
		"own that others annotated":   {admission.Update, annotated, counted(annotated), ""},
		"own annotated":               {admission.Update, aboutPod(), annotated, "annotations"},
		"deletes own":                 {admission.Delete, aboutPod(), nil, "may not delete"},
		"deletes the kubelet's":       {admission.Delete, kubelets, nil, "may not delete"},
		"deletes that of other nodes": {admission.Delete, otherNodes, nil, "may not delete"},
	} {
		for version, as := range served {
			cases++
			t.Run(version+" "+name, func(t *testing.T) {
				r := request{by: pluginOn(ownNode), operation: test.operation, namespace: test.old.Namespace, old: as(test.old)}
				if test.new != nil {
					r.object = as(test.new)
				}
				_, err := server.ask(t, r)
				check(t, err, test.want)
			})
		}
	}
	if t.Logf("%d cases", cases); cases != 32 {
		t.Errorf("%d cases", cases)
	}
}

// check compares a refusal with what is wanted of it.
func check(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("refused: %v", err)
	case want != "" && err == nil:
		t.Error("allowed")
	case want != "" && !strings.Contains(err.Error(), want):
		t.Errorf("refused, but not because of %q: %v", want, err)
	}
}
