// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cordon

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/api"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/test/kubectl/fleettest"
)

// cluster is a node with two GPUs, of which the first is shared by two pods and seen by an observer, and what an API server of it was asked.
type cluster struct {
	*fleettest.Fleet
	*fake.Clientset
	forbidden string
}

func newCluster(t *testing.T, annotation string) *cluster {
	t.Helper()
	c := &cluster{Fleet: fleettest.New(t)}
	node := c.AddNode("n1", "h100-80-sxm", 2)
	node.ResourceVersion = "7"
	if annotation != "" {
		node.Annotations = map[string]string{api.CordonAnnotation: annotation}
	}
	c.Held("team", "notebook", "n1", fleettest.Share("mps.partage.dev", "10Gi", "30"))
	c.Held("other", "notebook", "n1", fleettest.Share("mps.partage.dev", "20Gi", ""))
	c.Pods[0].OwnerReferences = []metav1.OwnerReference{{Kind: "StatefulSet", Name: "notebook", Controller: new(true)}}
	c.serve()
	return c
}

func (c *cluster) serve() {
	var objects []runtime.Object
	for _, o := range c.Nodes {
		objects = append(objects, o)
	}
	for _, o := range c.Slices {
		objects = append(objects, o)
	}
	for _, o := range c.Claims {
		objects = append(objects, o)
	}
	for _, o := range c.Pods {
		objects = append(objects, o)
	}
	c.Clientset = fake.NewClientset(objects...)
	c.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if what := a.GetVerb() + " " + a.GetResource().Resource; what == c.forbidden {
			return true, nil, apierrors.NewForbidden(a.GetResource().GroupResource(), "n1", errors.New("no"))
		}
		return false, nil, nil
	})
}

func (c *cluster) run(t *testing.T, set bool, dryRun string, gpus ...string) (string, error) {
	t.Helper()
	streams, _, out, errOut := genericiooptions.NewTestIOStreams()
	err := Run(t.Context(), options.New(streams), c.Clientset, change{cordon: set, dryRun: dryRun}, gpus)
	return out.String() + errOut.String(), err
}

func (c *cluster) annotation(t *testing.T) string {
	t.Helper()
	node, err := c.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	value, has := node.Annotations[api.CordonAnnotation]
	if has && value == "" {
		t.Error("an empty annotation is left")
	}
	return value
}

func TestCordon(t *testing.T) {
	t.Parallel()
	const first, second = "0000:1b:00.0", "0000:28:00.0"
	for name, test := range map[string]struct {
		before string
		set    bool
		gpu    string
		want   string
		says   string
	}{
		"by its place":                  {"", true, "n1/1", second, "n1/28:00 cordoned"},
		"by its address":                {"", true, "n1/0000:28:00.0", second, "n1/28:00 cordoned"},
		"by its short address":          {"", true, "n1/28:00", second, "n1/28:00 cordoned"},
		"by its name":                   {"", true, "n1/gpu-0000-28-00-0", second, "n1/28:00 cordoned"},
		"beside another":                {first, true, "n1/1", first + "," + second, "n1/28:00 cordoned"},
		"again":                         {second, true, "n1/1", second, "n1/28:00 already cordoned"},
		"again, as nvidia-smi names it": {"00000000:28:00.0", true, "n1/1", "00000000:28:00.0", "n1/28:00 already cordoned"},
		"the last":                      {second, false, "n1/1", "", "n1/28:00 uncordoned"},
		"one of two":                    {first + "; 00000000:28:00.0", false, "n1/1", first, "n1/28:00 uncordoned"},
		"not cordoned":                  {first, false, "n1/1", first, "n1/28:00 already uncordoned"},
		"that is not there any more":    {first + " gpu-9", false, "n1/gpu-9", first, "n1/gpu-9 uncordoned"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, test.before)
			out, err := c.run(t, test.set, dryRunNone, test.gpu)
			if err != nil || !strings.Contains(out, test.says) {
				t.Errorf("%v, want %q:\n%s", err, test.says, out)
			}
			if got := c.annotation(t); got != test.want {
				t.Errorf("the annotation is %q, want %q", got, test.want)
			}
		})
	}
}

// TestWho: cordon lists who must end before the GPU can be reset, in all namespaces, with the commands.
func TestWho(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	out, err := c.run(t, true, dryRunNone, "n1/0")
	want, readErr := os.ReadFile("testdata/cordon.txt")
	if err != nil || readErr != nil || out != string(want) {
		t.Errorf("%v, %v, got:\n%s\nwant:\n%s", err, readErr, out, want)
	}
	if out, err = c.run(t, true, dryRunNone, "n1/1"); err != nil || !strings.Contains(out, "No claim has a device of GPU 1 (28:00)") {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

// TestClaimWithoutPod: it keeps its device, and a partition of it.
func TestClaimWithoutPod(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	for _, claim := range c.Claims {
		claim.Status.ReservedFor = nil
	}
	c.serve()
	if out, err := c.run(t, true, dryRunNone, "n1/0"); err != nil || !strings.Contains(out, "kubectl delete resourceclaim -n team notebook") {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

func TestUnseenClaims(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.forbidden = "list resourceclaims"
	out, err := c.run(t, true, dryRunNone, "n1/0")
	if err != nil || !strings.Contains(out, "Who uses GPU 0 (1b:00) is unknown") || strings.Contains(out, "No claim") || c.annotation(t) == "" {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

// TestRefused: what may not be done names the right, and what does not exist what does.
func TestRefused(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ forbidden, gpu, want string }{
		{"patch nodes", "n1/0", "it takes the right to get and patch nodes"},
		{"get nodes", "n1/0", "it takes the right to get and patch nodes"},
		{"list resourceslices", "n1/0", "cannot list resourceslices"},
		{"", "n1/2", "n1 has no such GPU; it has n1/1b:00, n1/28:00"},
		{"", "n2/0", `node "n2" has no devices`},
		{"", "n1", "n1 has no such GPU"},
		{"", "0000:1b:00.0", "has no devices"},
	} {
		c := newCluster(t, "")
		c.forbidden = test.forbidden
		if out, err := c.run(t, true, dryRunNone, test.gpu); err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(out, "cordoned") {
			t.Errorf("%+v: %v\n%s", test, err, out)
		}
	}
}

// TestConcurrent: what another administrator writes between reading and writing stays.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	patches := 0
	c.PrependReactor("patch", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
		patch, is := a.(clienttesting.PatchAction)
		var sent corev1.Node
		if !is || json.Unmarshal(patch.GetPatch(), &sent) != nil || sent.ResourceVersion == "" {
			t.Errorf("the patch is not bound to what was read: %+v", a)
		}
		if patches++; patches > 1 {
			return false, nil, nil
		}
		node := c.Nodes[0].DeepCopy()
		node.ResourceVersion, node.Annotations = "8", map[string]string{api.CordonAnnotation: "0000:28:00.0"}
		if err := c.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node, ""); err != nil {
			t.Error(err)
		}
		return true, nil, apierrors.NewConflict(a.GetResource().GroupResource(), "n1", errors.New("another was faster"))
	})
	if out, err := c.run(t, true, dryRunNone, "n1/0"); err != nil || c.annotation(t) != "0000:28:00.0,0000:1b:00.0" || patches != 2 {
		t.Errorf("%v, %q after %d patches:\n%s", err, c.annotation(t), patches, out)
	}
}

func TestDryRun(t *testing.T) {
	t.Parallel()
	for _, dryRun := range []string{"client", "server"} {
		c := newCluster(t, "")
		asked := false
		c.PrependReactor("patch", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
			patch, is := a.(clienttesting.PatchActionImpl)
			asked = is && len(patch.PatchOptions.DryRun) == 1
			return true, &corev1.Node{}, nil
		})
		out, err := c.run(t, true, dryRun, "n1/0")
		if err != nil || !strings.Contains(out, "n1/1b:00 cordoned ("+map[string]string{"client": "dry run", "server": "server dry run"}[dryRun]+")") || asked != (dryRun == "server") || c.annotation(t) != "" {
			t.Errorf("%s: %v, asked %v:\n%s", dryRun, err, asked, out)
		}
		if !strings.Contains(out, "kubectl delete pod -n team notebook") {
			t.Errorf("%s: it does not say who must end:\n%s", dryRun, out)
		}
	}
	c := NewCommand(options.New(genericiooptions.NewTestIOStreamsDiscard()))
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetArgs([]string{"--dry-run=maybe", "n1/0"})
	if err := c.Execute(); err == nil || !strings.HasSuffix(err.Error(), "it must be one of none, client, server") {
		t.Error(err)
	}
}

// TestObservers: a program with admin access has the GPU open, too.
func TestObservers(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	claim := c.Claim("watch", "exporter")
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
		{Driver: fleettest.Driver, Pool: "n1", Device: "gpu-0000-28-00-0-observer", AdminAccess: new(true)},
	}}}
	c.Run(claim, "n1")
	c.serve()
	if out, err := c.run(t, true, dryRunNone, "n1/1"); err != nil || !strings.Contains(out, "kubectl delete pod -n watch exporter") {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

// TestUnpublishedDevice: a partition that no slice has any more is of its GPU all the same, and its pod must end.
func TestUnpublishedDevice(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	claim := c.Claim("team", "old")
	claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
		{Driver: fleettest.Driver, Pool: "n1", Device: "gpu-0000-28-00-0-mig-1g5gb-3"},
	}}}
	c.Run(claim, "n1")
	c.serve()
	if out, err := c.run(t, true, dryRunNone, "n1/1"); err != nil || !strings.Contains(out, "kubectl delete pod -n team old") || strings.Contains(out, "No claim") {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

// TestOtherUsers: a claim can be reserved for what is no pod.
func TestOtherUsers(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	for _, claim := range c.Claims {
		claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "workers", UID: "x"}}
	}
	c.serve()
	if out, err := c.run(t, true, dryRunNone, "n1/0"); err != nil || !strings.Contains(out, "kubectl delete podgroups.scheduling.k8s.io -n team workers") || strings.Contains(out, "delete pod ") {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

// TestUncordonLost: a GPU that no slice has any more is uncordoned by the name that cordon gave it.
func TestUncordonLost(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "0000:99:00.0, 0000:1b:00.0")
	for _, name := range []string{"n1/99:00", "n1/0000:99:00.0"} {
		if out, err := c.run(t, false, dryRunClient, name); err != nil || !strings.Contains(out, "n1/99:00 uncordoned (dry run)") {
			t.Errorf("%v, got:\n%s", err, out)
		}
	}
	if _, err := c.run(t, false, dryRunNone, "n1/99:00"); err != nil || c.annotation(t) != "0000:1b:00.0" {
		t.Errorf("%v, %q", err, c.annotation(t))
	}
	// The driver takes no short addresses, so that nothing is cordoned.
	c = newCluster(t, "28:00")
	if out, err := c.run(t, true, dryRunNone, "n1/28:00"); err != nil || strings.Contains(out, "already") || !strings.Contains(c.annotation(t), "0000:28:00.0") {
		t.Errorf("%v, %q, got:\n%s", err, c.annotation(t), out)
	}
}

// TestNoAddress: what the annotation cannot name cannot be cordoned.
func TestNoAddress(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "")
	c.Slices = []*resourceapi.ResourceSlice{{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: fleettest.Driver, NodeName: new("n1"), Pool: resourceapi.ResourcePool{Name: "n1", Generation: 1, ResourceSliceCount: 1},
		Devices: []resourceapi.Device{{Name: "gpu-0"}},
	}}}
	c.serve()
	if out, err := c.run(t, true, dryRunNone, "n1/0"); err == nil || strings.Contains(out, "cordoned") {
		t.Errorf("%v, got:\n%s", err, out)
	}
}

// TestNotFollowed: that the annotation has a GPU does not say that the driver keeps pods away from it.
func TestNotFollowed(t *testing.T) {
	t.Parallel()
	c := newCluster(t, "0000:1b:00.0")
	const not = "Its devices have no taint yet"
	if out, err := c.run(t, true, dryRunNone, "n1/0"); err != nil || !strings.Contains(out, not) {
		t.Errorf("%v, got:\n%s", err, out)
	}
	for _, s := range c.Slices {
		for i := range s.Spec.Devices {
			s.Spec.Devices[i].Taints = append(s.Spec.Devices[i].Taints, resourceapi.DeviceTaint{Key: fleettest.Driver + "/cordoned", Effect: resourceapi.DeviceTaintEffectNoSchedule})
		}
	}
	c.serve()
	if out, err := c.run(t, true, dryRunNone, "n1/0"); err != nil || strings.Contains(out, not) {
		t.Errorf("%v, got:\n%s", err, out)
	}
}
