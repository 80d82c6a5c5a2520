// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// TestKeepsTemplate: an update begins only if the file changes the pod template. Otherwise pods stay, and more of them may be added.
func TestKeepsTemplate(t *testing.T) {
	for name, c := range map[string]struct {
		// file is what it has of the spec, beside the template.
		kind, file string
		// image is that of the cluster, restarted says that it was restarted, and waits that a second pod has no node.
		image            string
		restarted, waits bool
		err              error
		gpus             int
		verdict          Verdict
		says, silent     string
	}{
		"the same":         {kind: "Deployment", gpus: 1, verdict: Allocated, says: "The file changes nothing for the 1 pod of Deployment train."},
		"restarted":        {kind: "Deployment", restarted: true, gpus: 1, verdict: Allocated, says: "changes nothing"},
		"fewer":            {kind: "Deployment", file: "replicas: 0", gpus: 1, verdict: Allocated, says: "The file keeps the pod template of Deployment train: 0 of its 1 pods stay."},
		"more that fit":    {kind: "Deployment", file: "replicas: 3", gpus: 3, verdict: Allocatable, says: "its 1 pod stays, and 2 are added.\n"},
		"more that do not": {kind: "Deployment", file: "replicas: 4", gpus: 3, verdict: Waits, says: "2 of the workload's 3 pods without a node fit at once"},
		"one too many":     {kind: "Deployment", file: "replicas: 2", gpus: 1, verdict: Waits, says: "waits: what it could use is taken"},
		"one that waits":   {kind: "Deployment", file: "replicas: 2", waits: true, gpus: 1, verdict: Waits, says: "Pod team/second waits"},
		"a StatefulSet":    {kind: "StatefulSet", gpus: 1, verdict: Allocated, says: "changes nothing", silent: "counts as free"},
		"a DaemonSet":      {kind: "DaemonSet", waits: true, gpus: 1, verdict: Waits, says: "The file changes nothing for the 2 pods of DaemonSet train."},
		"another image":    {kind: "Deployment", image: "other", gpus: 1, verdict: Waits, says: "waits for its own predecessor", silent: "stays the same"},
		"it may not be asked": {kind: "Deployment", err: errors.New("forbidden"), gpus: 1, verdict: Waits, says: "as long as its pod template stays the same",
			silent: "changes nothing"},
	} {
		f := fleettest.New(t)
		f.AddNode("n1", "h100-80-sxm", c.gpus)
		claim := f.Held("team", "old", "n1", fleettest.Request(whole))
		pods := []*corev1.Pod{f.Pods[0]}
		claim.OwnerReferences = []metav1.OwnerReference{{Kind: "Pod", Name: "old", UID: pods[0].UID, Controller: new(true)}}
		if c.waits {
			pods = append(pods, f.Pod("team", "second", fleettest.Uses(f.Claim("team", "second", fleettest.Request(whole)))))
		}
		for _, p := range pods {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: c.kind, Name: "train", Controller: new(true)}}
			if c.kind == "Deployment" {
				p.Labels = map[string]string{"pod-template-hash": "5d4"}
				p.OwnerReferences[0].Kind, p.OwnerReferences[0].Name = "ReplicaSet", "train-5d4"
			}
		}
		text1 := strings.ReplaceAll(fmt.Sprintf(manifest, "apps/v1", c.kind, "\n  "+c.file+"\n  template:\n    spec:"), "count: 9", "count: 1")
		m, err := Parse([]byte(text1), "team")
		if err != nil {
			t.Fatal(err)
		}
		is := unstructuredOf(m.workloads[m.Pods[0]].object)
		if c.image != "" {
			set(t, is, []any{map[string]any{"name": "main", "image": c.image}}, "spec", "template", "spec", "containers")
		}
		if c.restarted {
			set(t, is, map[string]any{restartedAt: "now"}, "spec", "template", "metadata", "annotations")
		}
		writer := dynamicfake.NewSimpleDynamicClient(runtime.NewScheme(), is)
		writer.PrependReactor("update", "*", func(a kubetesting.Action) (bool, runtime.Object, error) {
			update, _ := a.(kubetesting.UpdateActionImpl)
			if len(update.UpdateOptions.DryRun) != 1 {
				t.Errorf("%s is written", update.Resource)
			}
			return true, update.Object, c.err
		})
		m.Compare(t.Context(), writer, f.Pods)
		x := New(fleet.New(m.Over(f.Snapshot), fleettest.Driver), now)
		x.Refused = func(o *unstructured.Unstructured) (refused, unseen string) {
			if o.GetKind() == "Pod" && c.verdict == Allocated {
				return "exceeded quota: pods", "" // by those that stay
			}
			return "", ""
		}
		all := x.Manifest(t.Context(), m)
		got := text(t, all...)
		if all[0].Verdict != c.verdict || !strings.Contains(got, c.says) || c.silent != "" && strings.Contains(got, c.silent) ||
			strings.Contains(got, "predecessor") != (c.image != "" || c.err != nil) {
			t.Errorf("%s: %s, want %s, %q and not %q in:\n%s", name, all[0].Verdict, c.verdict, c.says, c.silent, got)
		}
	}
}

// set sets a field of an object.
func set(t *testing.T, u *unstructured.Unstructured, value any, fields ...string) {
	t.Helper()
	if err := unstructured.SetNestedField(u.Object, value, fields...); err != nil {
		t.Fatal(err)
	}
}
