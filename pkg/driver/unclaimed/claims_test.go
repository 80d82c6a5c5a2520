// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/fakekubelet"
	"github.com/partage-dev/partage/test/must"
)

const (
	testDriver = "gpu.nvidia.com"
	testPool   = "node-1"
)

// cluster has claims by "namespace/name".
type cluster struct {
	claims map[string]*resourceapi.ResourceClaim
	err    error
	asked  int
	// onAsked runs before a question is answered.
	onAsked func(ctx context.Context) error
}

func (c *cluster) named(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	c.asked++
	if c.onAsked != nil {
		if err := c.onAsked(ctx); err != nil {
			return nil, err
		}
	}
	if c.err != nil {
		return nil, c.err
	}
	return c.claims[namespace+"/"+name], nil
}

// allocate stores a claim with devices of the pool.
func (c *cluster) allocate(namespace, name string, admin bool, devices ...string) {
	allocation := &resourceapi.AllocationResult{}
	for _, d := range devices {
		r := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: testDriver, Pool: testPool, Device: d}
		if admin {
			r.AdminAccess = ptr.To(true)
		}
		allocation.Devices.Results = append(allocation.Devices.Results, r)
	}
	c.claims[namespace+"/"+name] = &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Status:     resourceapi.ResourceClaimStatus{Allocation: allocation},
	}
}

// rig is a finder on a node with a kubelet that answers.
type rig struct {
	*Finder
	kubelet *fakekubelet.PodResources
	cluster *cluster
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "n"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "k.sock")
	r := &rig{kubelet: fakekubelet.Serve(t, socket), cluster: &cluster{claims: map[string]*resourceapi.ResourceClaim{}}}
	r.kubelet.Set(plugin)
	r.Finder = &Finder{Driver: testDriver, Pool: testPool, Socket: socket, PodName: "plugin-x", Named: r.cluster.named}
	return r
}

// want fails unless these claims are found, and the error has this text.
func (r *rig) want(t *testing.T, wantErr string, want ...Claim) {
	t.Helper()
	got, err := r.Find(t.Context())
	expect.Same(t, got, want, "claims")
	switch {
	case err == nil && wantErr != "", err != nil && wantErr == "", err != nil && !strings.Contains(err.Error(), wantErr):
		t.Errorf("error %v, want one with %q", err, wantErr)
	}
}

// of is a device of NVIDIA's driver.
func of(name string) fakekubelet.Device {
	return fakekubelet.Device{Driver: testDriver, Pool: testPool, Name: name}
}

// plugin is this driver's own pod.
var plugin = fakekubelet.Pod("partage", "plugin-x", "")

func TestClaimsOfPods(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.want(t, "")
	r.kubelet.Set(plugin,
		fakekubelet.Pod("ml", "train-1", "train", of("gpu-1"), of("gpu-0")),
		fakekubelet.Pod("ops", "unknown", "unknown", of("gpu-3")),
		fakekubelet.Pod("ml", "train-0", "train", of("gpu-0"), of("gpu-1")),
		fakekubelet.Pod("ml", "own", "own", of("gpu-0000-1b-00-0-mig-1g10gb-0")),
		fakekubelet.Pod("ml", "withdrawn", "withdrawn", of("gpu-0000-ff-00-0-timeslice")),
		fakekubelet.Pod("ml", "channel", "channel", fakekubelet.Device{Driver: "compute-domain.nvidia.com", Pool: testPool, Name: "channel-0"}),
		fakekubelet.Pod("ml", "elsewhere", "elsewhere", fakekubelet.Device{Driver: testDriver, Pool: "rack", Name: "gpu-0"}),
		fakekubelet.Pod("ops", "exporter", "exporter", of("gpu-2")),
	)
	r.cluster.allocate("ml", "train", false, "gpu-0", "gpu-1")
	r.cluster.allocate("ops", "exporter", true, "gpu-2")
	train := Claim{Namespace: "ml", Name: "train", Devices: []string{"gpu-0", "gpu-1"}, Pods: []string{"train-0", "train-1"}}
	unknown := Claim{Namespace: "ops", Name: "unknown", Devices: []string{"gpu-3"}, Pods: []string{"unknown"}}
	r.want(t, "", train, unknown)

	// The API server is asked once about each claim.
	r.want(t, "", train, unknown)
	expect.Equal(t, r.cluster.asked, 3, "times that the API server was asked")

	// What the kubelet said stays while it does not answer, or has not read its pods.
	r.kubelet.Fail(true)
	r.want(t, "rejected by rate limit", train, unknown)
	r.kubelet.Fail(false)
	r.kubelet.Set(fakekubelet.Pod("kube-system", "static", ""))
	r.want(t, "it has not read its pods yet", train, unknown)
	expect.Is(t, expect.Err(r.Find(t.Context())), ErrKubelet)
	r.kubelet.Set(plugin)
	r.want(t, "")
}

// TestWithoutKubelet: where the kubelet has no such socket, nobody waits for it.
func TestWithoutKubelet(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Socket += "-not"
	r.want(t, "the kubelet cannot be asked")
	if _, err := r.Find(t.Context()); errors.Is(err, ErrKubelet) {
		t.Error("waiting for the kubelet would be in vain")
	}
}

// TestObserver: a claim uses its devices unless the API server says that it has admin access to each of them.
func TestObserver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	exporter := Claim{Namespace: "ops", Name: "exporter", Devices: []string{"gpu-2"}, Pods: []string{"exporter"}}
	next := Claim{Namespace: "ops", Name: "next", Devices: []string{"gpu-2"}, Pods: []string{"next"}}
	pods := []*podresourcesapi.PodResources{plugin, fakekubelet.Pod("ops", "exporter", "exporter", of("gpu-2")), fakekubelet.Pod("ops", "next", "next", of("gpu-2"))}
	r.kubelet.Set(pods...)
	r.cluster.allocate("ops", "exporter", true, "gpu-2")
	r.cluster.allocate("ops", "next", true, "gpu-2")
	r.cluster.err = errors.New("away")
	r.want(t, "away", exporter, next)
	expect.Equal(t, r.cluster.asked, 1, "times that an API server that does not answer was asked")
	r.cluster.err = nil
	r.want(t, "")

	// Claims of the same names, of other pods.
	for name, change := range map[string]func(){
		"another device": func() { r.cluster.allocate("ops", "exporter", true, "gpu-7") },
		"no device":      func() { r.cluster.claims["ops/exporter"].Status.Allocation = nil },
		"one of two":     func() { r.cluster.allocate("ops", "exporter", true, "gpu-7", "gpu-8") },
		"both ways": func() {
			r.cluster.allocate("ops", "exporter", true, "gpu-2", "gpu-2")
			r.cluster.claims["ops/exporter"].Status.Allocation.Devices.Results[0].AdminAccess = nil
		},
	} {
		change()
		r.kubelet.Set(plugin, fakekubelet.Pod("ops", name, "exporter", of("gpu-2")))
		r.want(t, "", Claim{Namespace: "ops", Name: "exporter", Devices: []string{"gpu-2"}, Pods: []string{name}})
	}
}

// TestManyClaimsAtASlowAPIServer: publishing waits for the first look, so that all questions of a
// look together have a limit. What was not answered counts, and is asked next time.
func TestManyClaimsAtASlowAPIServer(t *testing.T) {
	t.Parallel()
	const all, answered = 60, 15
	r := newRig(t)
	pods := []*podresourcesapi.PodResources{plugin}
	for i := range all {
		name := fmt.Sprintf("exporter-%03d", i)
		pods = append(pods, fakekubelet.Pod("ops", name, name, of("gpu-0")))
		r.cluster.allocate("ops", name, true, "gpu-0")
	}
	r.kubelet.Set(pods...)
	var limits []time.Time
	r.cluster.onAsked = func(ctx context.Context) error {
		limit, has := ctx.Deadline()
		if !has || len(limits) > 0 && limit != limits[0] {
			t.Errorf("question %d has the limit %v, the first had %v", len(limits), limit, limits)
		}
		limits = append(limits, limit)
		if len(limits) > answered {
			return context.DeadlineExceeded
		}
		return nil
	}
	for left := all - answered; left > 0; left -= answered {
		limits = nil
		found, err := r.Find(t.Context())
		if len(found) != left || !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%d claims, want %d; error %v", len(found), left, err)
		}
		if limits[0].After(time.Now().Add(findLimit)) {
			t.Errorf("the limit is %v", limits[0])
		}
	}
	limits = nil
	r.want(t, "")
}

func TestGPUs(t *testing.T) {
	t.Parallel()
	gpus := []gpu.GPU{{PCIAddress: "a", Minor: 0}, {PCIAddress: "b", Minor: 1}, {PCIAddress: "c", Minor: 15}}
	all := "a b c"
	for names, want := range map[string]string{
		"":                        "",
		"gpu-0":                   "a",
		"gpu-1":                   "b",
		"gpu-15":                  "c",
		"gpu-1-mig-1g24gb-19-0":   "b",
		"gpu-1-mig-1g10gb-me-2-6": "b",
		"gpu-1 gpu-1-mig-1g4gb-0": "b",
		"gpu-1 gpu-0":             "a b",
		"gpu-1 gpu-vfio-0":        all,
		"gpu-7":                   all,
		"gpu-vfio-0":              all,
		"channel-0":               all,
		"gpu-":                    all,
		"gpu-99999":               all,
		"gpu-0000-1b-00-0":        all,
	} {
		expect.Equal(t, strings.Join(Claim{Devices: strings.Fields(names)}.GPUs(gpus), " "), want, names)
	}
}

// uidOf is the UID of a pod.
func uidOf(n int) string { return fmt.Sprintf("3f2a1b4c-0000-4000-8000-%012d", n) }

// TestPodsWithAClaim: a claim that is not in the cluster any more is with the pods that the kubelet lists with it, and may be with those of its
// namespace that run and were deleted.
func TestPodsWithAClaim(t *testing.T) {
	t.Parallel()
	const name, other = "team/train-0", "victim/web"
	with := fakekubelet.Pod("team", "train-0", "gpu", of("gpu-0000-1b-00-0"))
	without, others := fakekubelet.Pod("team", "train-0", ""), fakekubelet.Pod("victim", "web", "")
	for title, test := range map[string]struct {
		listed []string
		// running are the names of pods with processes, by number.
		running map[int]string
		want    string
	}{
		"none":                             {},
		"listed with it":                   {listed: []string{"with"}, running: map[int]string{1: name}, want: "pod team/train-0"},
		"listed without it":                {listed: []string{"without"}, running: map[int]string{1: name}},
		"of other namespaces":              {listed: []string{"others"}, running: map[int]string{1: other}},
		"of others, deleted":               {running: map[int]string{1: other}},
		"deleted":                          {running: map[int]string{1: name}, want: "pod team/train-0, which was deleted and runs"},
		"deleted, and another of its name": {listed: []string{"without"}, running: map[int]string{1: name, 2: name}, want: "pod team/train-0, which was deleted and runs"},
		"nobody knows its name":            {running: map[int]string{1: ""}, want: "pod with UID " + uidOf(1) + ", whose name is not known"},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			r, proc := newRig(t), t.TempDir()
			listed := append([]string{}, test.listed...)
			pods := map[string]*podresourcesapi.PodResources{"with": with, "without": without, "others": others}
			all := []*podresourcesapi.PodResources{plugin}
			for _, l := range listed {
				all = append(all, pods[l])
			}
			r.kubelet.Set(all...)
			names := map[string]string{}
			for n, name := range test.running {
				names[uidOf(n)] = name
				dir := filepath.Join(proc, strconv.Itoa(100+n))
				must.Do(t, os.Mkdir(dir, 0o755))
				cgroup := fmt.Sprintf("0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod%s.slice/cri-containerd-%s.scope\n",
					strings.ReplaceAll(uidOf(n), "-", "_"), strings.Repeat("0a", 32))
				must.Do(t, os.WriteFile(filepath.Join(dir, "cgroup"), []byte(cgroup), 0o600))
			}
			p := Pods{Socket: r.Socket, PodName: r.PodName, Proc: proc, Named: func(uid string) string { return names[uid] }}
			got, err := p.With(t.Context(), "team", "gpu")
			if err != nil || (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("got %q, %v, want %q", got, err, test.want)
			}
			r.kubelet.Fail(true)
			if got, err := p.With(t.Context(), "team", "gpu"); err == nil {
				t.Errorf("the kubelet does not answer: got %q", got)
			}
		})
	}
}
