// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// serve answers lists with what a fleet has. Events may not be read.
func serve(t *testing.T, f *fleettest.Fleet) string {
	t.Helper()
	lists := map[string]any{
		"/api/v1/nodes": &corev1.NodeList{Items: values(f.Nodes)},
		"/api/v1/pods":  &corev1.PodList{Items: values(f.Pods)},
		"/apis/resource.k8s.io/v1/resourceslices":         &resourceapi.ResourceSliceList{Items: values(f.Slices)},
		"/apis/resource.k8s.io/v1/deviceclasses":          &resourceapi.DeviceClassList{Items: values(f.Classes)},
		"/apis/resource.k8s.io/v1/devicetaintrules":       &resourceapi.DeviceTaintRuleList{},
		"/apis/resource.k8s.io/v1/resourceclaims":         &resourceapi.ResourceClaimList{Items: values(f.Claims)},
		"/apis/resource.k8s.io/v1/resourceclaimtemplates": &resourceapi.ResourceClaimTemplateList{},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		list, has := lists[r.URL.Path]
		if strings.HasSuffix(r.URL.Path, "/nowhere") {
			w.WriteHeader(http.StatusNotFound)
			list = metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound}
		} else if !has {
			w.WriteHeader(http.StatusForbidden)
			list = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": http.StatusForbidden}
		}
		if err := json.NewEncoder(w).Encode(list); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func values[T any](all []*T) []T {
	var out []T
	for _, one := range all {
		out = append(out, *one)
	}
	return out
}

// TestCommand: arguments, formats and exit codes.
func TestCommand(t *testing.T) {
	f := fleettest.New(t)
	f.AddNode("n1", "h100-80-sxm", 1)
	f.Held("team", "has", "n1", fleettest.Request(whole))
	waits := f.Pod("team", "waits", fleettest.Uses(f.Claim("team", "waits", fleettest.Request(whole))))
	waits.Labels = map[string]string{"pod-template-hash": "5d4"}
	waits.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-5d4", Controller: new(true)}}
	for kind, name := range map[string]string{"StatefulSet": "db", "Job": "train"} {
		f.Pod("team", name+"-0", fleettest.Uses(f.Claim("team", name, fleettest.Request(whole)))).OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: kind, Name: name, Controller: new(true)}}
	}
	f.Pod("other", "more", fleettest.Uses(f.Claim("other", "more", fleettest.Request(whole))))
	server := serve(t, f)
	for name, c := range map[string]struct {
		arguments []string
		in, out   string
		namespace string
		silent    string
		found     bool
		err       string
	}{
		"a pod that waits":     {arguments: []string{"waits"}, out: "when team/has ends", found: true},
		"a pod that has":       {arguments: []string{"pod/has"}, out: "Pod team/has has its devices."},
		"JSON":                 {arguments: []string{"claim/waits", "-o", "json"}, out: `"cause": "DeviceHeld"`, found: true},
		"YAML":                 {arguments: []string{"claim/has", "-o", "yaml"}, out: "apiVersion: kubectl.partage.dev/v1alpha1"},
		"name":                 {arguments: []string{"waits", "-o", "name"}, out: "pod/waits", found: true},
		"wide":                 {arguments: []string{"waits", "-o", "wide"}, out: "Assumed:", found: true},
		"standard input":       {arguments: []string{"-f", "-"}, in: "apiVersion: v1\nkind: Pod\nmetadata: {name: new}\nspec: {containers: [], resourceClaims: [{name: gpu, resourceClaimName: wait}]}", out: "refer to claim waits", found: true},
		"a Secret of nothing":  {arguments: []string{"-f", "-"}, in: "apiVersion: v1\nkind: Pod\nmetadata: {name: new}\nspec: {containers: [{name: main, envFrom: [{secretRef: {name: nowhere}}, {configMapRef: {name: hidden}}]}], resourceClaims: [{name: gpu, resourceClaimName: waits}]}", out: "the pod refers to Secret nowhere, which does not exist", found: true},
		"nothing to explain":   {arguments: []string{"-f", "-"}, in: "apiVersion: v1\nkind: Secret\nmetadata: {name: new}", err: "has no pod, claim or claim template"},
		"unknown field":        {arguments: []string{"-f", "-"}, in: "apiVersion: v1\nkind: Pod\nspec: {resourceClaim: []}", err: "unknown field"},
		"no file":              {arguments: []string{"-f", "/does/not/exist"}, err: "/does/not/exist"},
		"what waits":           {out: "Pod team/waits waits", silent: "more", found: true},
		"no such namespace":    {namespace: "nowhere", err: "there is no namespace nowhere"},
		"nothing waits":        {namespace: "quiet", out: "No pod that can be read waits"},
		"what waits anywhere":  {arguments: []string{"-A"}, out: "Pod other/more waits", found: true},
		"two words":            {arguments: []string{"pod", "waits"}, out: "Pod team/waits waits", found: true},
		"a workload":           {arguments: []string{"deploy/web"}, out: "Pod team/waits waits", found: true},
		"a StatefulSet":        {arguments: []string{"sts/db"}, out: "Pod team/db-0 waits", silent: "train", found: true},
		"a Job":                {arguments: []string{"job/train"}, out: "Pod team/train-0 waits", silent: "db-0", found: true},
		"a workload of none":   {arguments: []string{"sts/web"}, err: "kubectl events -n team says why none was made"},
		"a kind that is not":   {arguments: []string{"node/n1"}, err: "the kind must be pod, claim"},
		"a name and a file":    {arguments: []string{"waits", "-f", "-"}, err: "name one object"},
		"a pod that is not":    {arguments: []string{"other"}, err: "there is no pod or claim other in namespace team"},
		"a format that is not": {arguments: []string{"waits", "-o", "xml"}, err: "xml"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			streams, in, out, _ := genericiooptions.NewTestIOStreams()
			in.WriteString(c.in)
			o := options.New(streams)
			o.Config.APIServer, o.Config.Namespace = &server, new(cmp.Or(c.namespace, "team"))
			cmd := NewCommand(o)
			cmd.SetArgs(append([]string{}, c.arguments...)) // with nil it would take those of the test
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			err := cmd.ExecuteContext(t.Context())
			switch {
			case c.err != "":
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("%v, want %s", err, c.err)
				}
			case c.found != errors.Is(err, options.ErrFound) || err != nil && !c.found:
				t.Errorf("%v, found %t", err, c.found)
			case !strings.Contains(out.String(), c.out) || c.silent != "" && strings.Contains(out.String(), c.silent):
				t.Errorf("want %s, and not %q, in:\n%s", c.out, c.silent, out)
			}
		})
	}
}
