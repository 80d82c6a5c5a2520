// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package neighbour

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/test/flow/fakekubelet"
)

// Pods of testdata/checkpoint.json, which the code of NVIDIA's driver has written.
const (
	trainPod    = types.UID("aaaaaaaa-0000-4000-8000-000000000001")
	inferPod    = types.UID("aaaaaaaa-0000-4000-8000-000000000002")
	observerPod = types.UID("aaaaaaaa-0000-4000-8000-000000000004")

	trainClaim = types.UID("11111111-1111-4111-8111-111111111111")
	inferClaim = types.UID("22222222-2222-4222-8222-222222222222")
	batchClaim = types.UID("33333333-3333-4333-8333-333333333333")
)

var testPool = Pool{Driver: "gpu.nvidia.com", Name: "node-1"}

// cluster has claims by "namespace/name".
type cluster struct {
	claims map[string]*resourceapi.ResourceClaim
	err    error
	asked  int
	// onAsked runs before a question is answered.
	onAsked func(ctx context.Context) error
}

func (c *cluster) Named(ctx context.Context, namespace, name string, uid types.UID) (*resourceapi.ResourceClaim, error) {
	c.asked++
	if c.onAsked != nil {
		if err := c.onAsked(ctx); err != nil {
			return nil, err
		}
	}
	found := c.claims[namespace+"/"+name]
	if c.err != nil || found == nil || uid != "" && found.UID != uid {
		return nil, c.err
	}
	return found, nil
}

// allocated is a claim with devices of the pool.
func allocated(namespace, name string, uid types.UID, admin bool, devices ...string) *resourceapi.ResourceClaim {
	allocation := &resourceapi.AllocationResult{}
	for _, d := range devices {
		r := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: testPool.Driver, Pool: testPool.Name, Device: d}
		if admin {
			r.AdminAccess = ptr.To(true)
		}
		allocation.Devices.Results = append(allocation.Devices.Results, r)
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uid},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	}
}

// rig is a finder on a node with a kubelet that answers.
type rig struct {
	*Finder
	kubelet *fakekubelet.PodResources
	cluster *cluster
	running map[types.UID]bool
	// processes is why those of pods cannot be seen.
	processes error
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "n")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "k.sock")
	r := &rig{kubelet: fakekubelet.Serve(t, socket), cluster: &cluster{claims: map[string]*resourceapi.ResourceClaim{}}, running: map[types.UID]bool{}}
	r.kubelet.Set(fakekubelet.Pod("partage", "plugin-x", ""))
	r.Finder = &Finder{
		Pool: testPool, Kubelet: &Kubelet{Socket: socket, PodName: "plugin-x"}, Cluster: r.cluster, Checkpoint: filepath.Join(dir, CheckpointName),
		RunningPods: func() (map[types.UID]bool, error) { return r.running, r.processes },
	}
	return r
}

// want fails unless these claims are found, and the error has this text.
func (r *rig) want(t *testing.T, wantErr string, want ...Claim) {
	t.Helper()
	got, err := r.Find(t.Context())
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	switch {
	case err == nil && wantErr != "", err != nil && wantErr == "", err != nil && !strings.Contains(err.Error(), wantErr):
		t.Errorf("error %v, want one with %q", err, wantErr)
	}
}

func (r *rig) writeCheckpoint(t *testing.T, data []byte) {
	t.Helper()
	if err := os.WriteFile(r.Checkpoint, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) writeRealCheckpoint(t *testing.T) {
	t.Helper()
	data, err := os.ReadFile("testdata/checkpoint.json")
	if err != nil {
		t.Fatal(err)
	}
	r.writeCheckpoint(t, data)
}

// of is a device of NVIDIA's driver.
func of(name string) fakekubelet.Device {
	return fakekubelet.Device{Driver: testPool.Driver, Pool: testPool.Name, Name: name}
}

// plugin is this driver's own pod.
var plugin = fakekubelet.Pod("partage", "plugin-x", "")

func TestClaimsOfPods(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.want(t, "")
	r.kubelet.Set(plugin,
		fakekubelet.Pod("ml", "train-0", "train", of("gpu-0"), of("gpu-1")),
		fakekubelet.Pod("ml", "train-1", "train", of("gpu-0"), of("gpu-1")),
		fakekubelet.Pod("ml", "own", "own", of("gpu-0000-1b-00-0-mig-1g10gb-0")),
		fakekubelet.Pod("ml", "withdrawn", "withdrawn", of("gpu-0000-ff-00-0-timeslice")),
		fakekubelet.Pod("ml", "channel", "channel", fakekubelet.Device{Driver: "compute-domain.nvidia.com", Pool: testPool.Name, Name: "channel-0"}),
		fakekubelet.Pod("ml", "elsewhere", "elsewhere", fakekubelet.Device{Driver: testPool.Driver, Pool: "rack", Name: "gpu-0"}),
		fakekubelet.Pod("ops", "exporter", "exporter", of("gpu-2")),
		fakekubelet.Pod("ops", "unknown", "unknown", of("gpu-3")),
	)
	r.cluster.claims["ml/train"] = allocated("ml", "train", trainClaim, false, "gpu-0", "gpu-1")
	r.cluster.claims["ops/exporter"] = allocated("ops", "exporter", "x", true, "gpu-2")
	train := Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0", "gpu-1"}, Pods: []string{"train-0", "train-1"}}
	unknown := Claim{Namespace: "ops", Name: "unknown", Devices: []string{"gpu-3"}, Pods: []string{"unknown"}}
	r.want(t, "", train, unknown)

	// The API server is asked once about each pod and claim.
	asked := r.cluster.asked
	r.want(t, "", train, unknown)
	if r.cluster.asked != asked || asked != 4 {
		t.Errorf("the API server was asked %d times, and %d times before", r.cluster.asked, asked)
	}

	// What the kubelet said stays while it does not answer, or has not read its pods.
	r.kubelet.Fail(true)
	r.want(t, "rejected by rate limit", train, unknown)
	r.kubelet.Fail(false)
	r.kubelet.Set(fakekubelet.Pod("kube-system", "static", ""))
	r.want(t, "it has not read its pods yet", train, unknown)
	if _, err := r.Find(t.Context()); !errors.Is(err, ErrKubelet) {
		t.Errorf("%v does not say that the kubelet may answer soon", err)
	}
	r.kubelet.Set(plugin)
	r.want(t, "")
}

// TestObserverWhileTheAPIServerIsAway: until it is known that a claim only observes a GPU, it uses it.
func TestObserverWhileTheAPIServerIsAway(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.kubelet.Set(plugin, fakekubelet.Pod("ops", "exporter", "exporter", of("gpu-2")))
	r.cluster.claims["ops/exporter"] = allocated("ops", "exporter", "x", true, "gpu-2")
	r.Request(allocated("ml", "stuck", "stuck", false, "gpu-0"))
	r.cluster.err = errors.New("away")
	r.want(t, "away",
		Claim{Namespace: "ml", Name: "stuck", UID: "stuck", Devices: []string{"gpu-0"}},
		Claim{Namespace: "ops", Name: "exporter", Devices: []string{"gpu-2"}, Pods: []string{"exporter"}})
	if r.cluster.asked != 1 {
		t.Errorf("an API server that does not answer was asked %d times", r.cluster.asked)
	}
	r.cluster.err = nil
	r.want(t, "")
}

// TestObserverOfAnotherDevice: the kubelet speaks of a claim of this name that is not the one in
// the API server.
func TestObserverOfAnotherDevice(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.kubelet.Set(plugin, fakekubelet.Pod("ops", "exporter", "exporter", of("gpu-2")))
	r.cluster.claims["ops/exporter"] = allocated("ops", "exporter", "x", true, "gpu-7")
	r.want(t, "", Claim{Namespace: "ops", Name: "exporter", Devices: []string{"gpu-2"}, Pods: []string{"exporter"}})
}

func TestCheckpoint(t *testing.T) {
	t.Parallel()
	infer := Claim{UID: inferClaim, Devices: []string{"gpu-1-mig-1g10gb-19-0"}, Pods: []string{"infer-0"}}
	train := Claim{UID: trainClaim, Devices: []string{"gpu-0"}, Pods: []string{"train-0"}}
	batch := Claim{Namespace: "ml", Name: "batch", UID: batchClaim, Devices: []string{"gpu-1-mig-2g20gb-14-4"}}
	cases := map[string]struct {
		change  func(t *testing.T, r *rig)
		want    []Claim
		wantErr string
	}{
		"all ended long ago": {},
		"pods run": {
			change: func(_ *testing.T, r *rig) {
				r.running = map[types.UID]bool{trainPod: true, inferPod: true, observerPod: true}
			},
			want: []Claim{train, infer},
		},
		"a claim was begun and is there": {
			change: func(_ *testing.T, r *rig) {
				r.cluster.claims["ml/batch"] = allocated("ml", "batch", batchClaim, false, "gpu-1-mig-2g20gb-14-4")
			},
			want: []Claim{batch},
		},
		"another claim has its name": {
			change: func(_ *testing.T, r *rig) {
				r.cluster.claims["ml/batch"] = allocated("ml", "batch", "other", false, "gpu-1-mig-2g20gb-14-4")
			},
		},
		"a claim was begun and is not allocated any more": {
			change: func(_ *testing.T, r *rig) {
				r.cluster.claims["ml/batch"] = allocated("ml", "batch", batchClaim, false)
				r.cluster.claims["ml/batch"].Status.Allocation = nil
			},
		},
		"a claim was begun and now has a device of this driver": {
			change: func(_ *testing.T, r *rig) {
				r.cluster.claims["ml/batch"] = allocated("ml", "batch", batchClaim, false, "gpu-0000-1b-00-0")
			},
		},
		"the API server is away": {
			change:  func(_ *testing.T, r *rig) { r.cluster.err = errors.New("away") },
			want:    []Claim{batch},
			wantErr: "away",
		},
		"first version only": {
			change: func(t *testing.T, r *rig) {
				r.running = map[types.UID]bool{trainPod: true}
				r.writeCheckpoint(t, withoutV2(t))
			},
			want: []Claim{train},
		},
		"no file": {change: func(t *testing.T, r *rig) {
			if err := os.Remove(r.Checkpoint); err != nil {
				t.Fatal(err)
			}
		}},
		"empty": {change: func(t *testing.T, r *rig) { r.writeCheckpoint(t, []byte(`{"checksum":0}`)) }},
		"cut": {
			change:  func(t *testing.T, r *rig) { r.writeCheckpoint(t, []byte(`{"checksum":0,"v1":{"prep`)) },
			wantErr: "read which claims NVIDIA's DRA driver has prepared",
		},
		"processes cannot be seen": {
			change:  func(_ *testing.T, r *rig) { r.processes = errors.New("no procfs") },
			wantErr: "no procfs",
		},
	}
	if len(cases) != 12 {
		t.Errorf("%d cases", len(cases))
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.writeRealCheckpoint(t)
			if test.change != nil {
				test.change(t, r)
			}
			r.want(t, test.wantErr, test.want...)
			r.want(t, test.wantErr, test.want...)
		})
	}
}

// withoutV2 is the checkpoint as an earlier version of NVIDIA's driver has written it.
func withoutV2(t *testing.T) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/checkpoint.json")
	if err != nil {
		t.Fatal(err)
	}
	content := map[string]json.RawMessage{}
	if err := json.Unmarshal(data, &content); err != nil {
		t.Fatal(err)
	}
	delete(content, "v2")
	data, err = json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestKubeletAndCheckpoint: both speak of the same claim, one by its name and the other by its UID.
func TestKubeletAndCheckpoint(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.writeRealCheckpoint(t)
	r.running[trainPod] = true
	r.kubelet.Set(plugin, fakekubelet.Pod("ml", "train-0", "train", of("gpu-0")))
	r.want(t, "", Claim{Namespace: "ml", Name: "train", UID: trainClaim, Devices: []string{"gpu-0"}, Pods: []string{"train-0"}})
}

// TestWithoutKubelet: where the kubelet has no such socket, the checkpoint and the processes tell.
func TestWithoutKubelet(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Kubelet.Socket += "-not"
	r.writeRealCheckpoint(t)
	r.running[trainPod] = true
	r.want(t, "the kubelet cannot be asked", Claim{UID: trainClaim, Devices: []string{"gpu-0"}, Pods: []string{"train-0"}})
	if _, err := r.Find(t.Context()); errors.Is(err, ErrKubelet) {
		t.Error("waiting for the kubelet would be in vain")
	}
}

func TestRequestedClaims(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	store := func(c *resourceapi.ResourceClaim) *resourceapi.ResourceClaim {
		r.cluster.claims[c.Namespace+"/"+c.Name] = c
		return c
	}
	for name, c := range map[string]*resourceapi.ResourceClaim{
		"own":       store(allocated("ml", "own", "own", false, "gpu-0000-1b-00-0")),
		"observer":  store(allocated("ml", "observer", "observer", true, "gpu-0")),
		"no device": {},
	} {
		if foreign := r.Request(c); len(foreign) > 0 {
			t.Errorf("%s: devices %v", name, foreign)
		}
	}
	stuck := store(allocated("ml", "stuck", "stuck", false, "gpu-0", "gpu-0000-1b-00-0"))
	stuck.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "stuck-0", UID: "1"}}
	if diff := cmp.Diff([]string{"gpu-0"}, r.Request(stuck)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	want := Claim{Namespace: "ml", Name: "stuck", UID: "stuck", Devices: []string{"gpu-0"}, Pods: []string{"stuck-0"}}
	r.want(t, "", want)
	r.cluster.err = errors.New("forbidden")
	r.want(t, "forbidden", want)
	r.cluster.err = nil

	// The scheduler allocates it anew.
	store(allocated("ml", "stuck", "stuck", false, "gpu-0000-1b-00-0"))
	r.want(t, "")
	r.Request(stuck)
	delete(r.cluster.claims, "ml/stuck")
	r.want(t, "")
	r.Request(stuck)
	store(stuck)
	r.want(t, "", want)
	r.Release("stuck")
	r.want(t, "")
}

func TestMinor(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]int{
		"gpu-0": 0, "gpu-15": 15, "gpu-3-mig-1g24gb-19-0": 3, "gpu-1-mig-1g10gb-me-20-6": 1,
		"gpu-vfio-0": -1, "gpu-0000-1b-00-0": -1, "channel-0": -1, "gpu-": -1, "gpu-99999": -1,
	} {
		got, found := Minor(name)
		if !found {
			got = -1
		}
		if got != want {
			t.Errorf("%s: minor %d, want %d", name, got, want)
		}
	}
}

func TestRunningPods(t *testing.T) {
	t.Parallel()
	const container = "/kubepods.slice/kubepods-podaaaaaaaa_0000_4000_8000_000000000001.slice/cri-containerd-" +
		"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef.scope"
	got, err := RunningPods(fstest.MapFS{
		"1/cgroup": {Data: []byte("0::/init.scope\n")}, "77/cgroup": {Data: []byte("0::" + container + "\n")}, "self/x": {}, "78/comm": {},
	})
	if diff := cmp.Diff(map[types.UID]bool{trainPod: true}, got); diff != "" || err != nil {
		t.Errorf("%v, pods (-want +got):\n%s", err, diff)
	}
}

// TestCheckpointUnreadable: what is known stays while the file or the processes cannot be read.
func TestCheckpointUnreadable(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.writeRealCheckpoint(t)
	r.running[trainPod] = true
	train := Claim{UID: trainClaim, Devices: []string{"gpu-0"}, Pods: []string{"train-0"}}
	r.want(t, "", train)
	r.processes = errors.New("no procfs")
	r.want(t, "no procfs", train)
	r.processes = nil
	r.writeCheckpoint(t, []byte("{"))
	r.want(t, "read which claims NVIDIA's DRA driver has prepared", train)
	r.writeRealCheckpoint(t)
	delete(r.running, trainPod)
	r.want(t, "")
}
