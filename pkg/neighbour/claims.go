// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package neighbour

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
)

// Claim has devices of this driver's name and pool that this driver never publishes: another
// driver with the same name does.
type Claim struct {
	// Namespace and Name are empty where only the UID is known, and the other way round.
	Namespace, Name string
	UID             types.UID
	// Devices are those that the claim uses, by name, without those that it only observes.
	Devices []string
	// Pods are the names of the pods that use it, where they are known.
	Pods []string
}

// String is "namespace/name", or the UID.
func (c Claim) String() string {
	if c.Name == "" {
		return "with UID " + string(c.UID)
	}
	return c.Namespace + "/" + c.Name
}

// Pool is a driver's pool of devices.
type Pool struct{ Driver, Name string }

// ForeignDevices lists the devices of a pool that a claim was allocated, and uses, and that this
// driver never publishes, whatever the policy and the hardware were.
func (p Pool) ForeignDevices(allocation *resourceapi.AllocationResult) []string {
	if allocation == nil {
		return nil
	}
	var names []string
	for _, r := range allocation.Devices.Results {
		if !ptr.Deref(r.AdminAccess, false) && p.foreign(r.Driver, r.Pool, r.Device) {
			names = append(names, r.Device)
		}
	}
	return unique(names)
}

func (p Pool) foreign(driver, pool, name string) bool {
	return driver == p.Driver && pool == p.Name && !device.IsName(name)
}

// nvidiaName is the name of a GPU, or of a partition of it, that NVIDIA's driver gives.
var nvidiaName = regexp.MustCompile(`^gpu-([0-9]{1,4})(-mig-.+)?$`)

// Minor returns the minor number of the GPU that a device of NVIDIA's driver is, or is a part of,
// by the device's name.
func Minor(name string) (minor int, found bool) {
	match := nvidiaName.FindStringSubmatch(name)
	if match == nil {
		return 0, false
	}
	minor, err := strconv.Atoi(match[1])
	return minor, err == nil
}

// Cluster reads claims from the API server.
type Cluster interface {
	// Named returns the claim with this name, and with this UID unless it is empty. Nil means
	// that there is none, an error that this is not known.
	Named(ctx context.Context, namespace, name string, uid types.UID) (*resourceapi.ResourceClaim, error)
}

// Finder finds the claims on this node that another driver has prepared, or would have to.
type Finder struct {
	Pool    Pool
	Kubelet *Kubelet
	Cluster Cluster
	// Checkpoint is the path of the file of NVIDIA's driver.
	Checkpoint string
	// RunningPods lists the UIDs of the pods that have processes on this node.
	RunningPods func() (map[types.UID]bool, error)

	// held are what the kubelet said last, and recorded what the checkpoint did. What follows is
	// for Find.
	held, recorded []Claim
	// observes says which of the claims that pods have only observe their devices, where the API
	// server has answered that.
	observes map[podClaim]bool
	// away is why the API server did not answer, once for all claims of a look.
	away error
	// gone are claims of the checkpoint that are not there any more.
	gone map[types.UID]bool

	mu sync.Mutex
	// requested are claims that the kubelet asked this driver to prepare.
	requested map[types.UID]Claim
}

type podClaim struct{ namespace, claim, pod string }

// Request notes a claim that the kubelet asks this driver to prepare, and returns the devices for
// which it cannot.
func (f *Finder) Request(c *resourceapi.ResourceClaim) []string {
	devices := f.Pool.ForeignDevices(c.Status.Allocation)
	if len(devices) == 0 {
		return nil
	}
	noted := Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID, Devices: devices}
	for _, user := range c.Status.ReservedFor {
		noted.Pods = append(noted.Pods, user.Name)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.requested == nil {
		f.requested = map[types.UID]Claim{}
	}
	f.requested[c.UID] = noted
	return devices
}

// Release notes that the last pod of a claim has ended on this node, and reports whether the claim
// had been noted.
func (f *Finder) Release(uid types.UID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, noted := f.requested[uid]
	delete(f.requested, uid)
	return noted
}

// lookTimeout bounds a look, however many claims the API server is asked about: publishing waits
// for the first.
const lookTimeout = 10 * time.Second

// Find returns the claims in a fixed order. With an error there may be more, and some of those that
// are returned may be gone. It must not be called concurrently.
func (f *Finder) Find(ctx context.Context) ([]Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	f.away = nil
	held, kubeletErr := f.fromKubelet(ctx)
	recorded, checkpointErr := f.fromCheckpoint(ctx)
	requested := f.fromRequests(ctx)
	return join(slices.Concat(held, requested, recorded)), errors.Join(kubeletErr, checkpointErr, f.away)
}

// named reads a claim, unless the API server did not answer just before.
func (f *Finder) named(ctx context.Context, namespace, name string, uid types.UID) (*resourceapi.ResourceClaim, error) {
	if f.away != nil {
		return nil, f.away
	}
	found, err := f.Cluster.Named(ctx, namespace, name, uid)
	f.away = err
	return found, err
}

// fromKubelet are the claims that containers of running pods have. They stay what they were as
// long as the kubelet does not answer.
func (f *Finder) fromKubelet(ctx context.Context) ([]Claim, error) {
	pods, err := f.Kubelet.pods(ctx)
	if err != nil {
		return f.held, err
	}
	f.held = nil
	before := f.observes
	f.observes = map[podClaim]bool{}
	for _, pod := range pods {
		for _, container := range pod.GetContainers() {
			for _, d := range container.GetDynamicResources() {
				devices := f.foreignOf(d)
				if len(devices) == 0 {
					continue
				}
				key := podClaim{d.GetClaimNamespace(), d.GetClaimName(), pod.GetName()}
				if f.onlyObserves(ctx, key, devices, before) {
					continue
				}
				f.held = append(f.held, Claim{
					Namespace: d.GetClaimNamespace(), Name: d.GetClaimName(), Devices: devices, Pods: []string{pod.GetName()},
				})
			}
		}
	}
	return f.held, nil
}

func (f *Finder) foreignOf(d *podresourcesapi.DynamicResource) []string {
	var names []string
	for _, r := range d.GetClaimResources() {
		if f.Pool.foreign(r.GetDriverName(), r.GetPoolName(), r.GetDeviceName()) {
			names = append(names, r.GetDeviceName())
		}
	}
	return unique(names)
}

// onlyObserves reports whether a claim only observes its devices, which the kubelet does not tell.
// Where the API server does not tell it either, the claim uses them.
func (f *Finder) onlyObserves(ctx context.Context, key podClaim, devices []string, before map[podClaim]bool) bool {
	if known, found := before[key]; found {
		f.observes[key] = known
		return known
	}
	found, err := f.named(ctx, key.namespace, key.claim, "")
	if err != nil {
		return false
	}
	f.observes[key] = found != nil && f.hasForObservation(found, devices)
	return f.observes[key]
}

func (f *Finder) hasForObservation(c *resourceapi.ResourceClaim, devices []string) bool {
	if c.Status.Allocation == nil {
		return false
	}
	uses := f.Pool.ForeignDevices(c.Status.Allocation)
	allocated := map[string]bool{}
	for _, r := range c.Status.Allocation.Devices.Results {
		allocated[r.Device] = true
	}
	// A device that the claim was not allocated is that of an earlier claim of the same name.
	return !slices.ContainsFunc(devices, func(name string) bool { return !allocated[name] || slices.Contains(uses, name) })
}

// fromRequests are the claims that this driver was asked to prepare, as long as they are allocated.
func (f *Finder) fromRequests(ctx context.Context) []Claim {
	f.mu.Lock()
	requested := make([]Claim, 0, len(f.requested))
	for _, uid := range slices.Sorted(maps.Keys(f.requested)) {
		requested = append(requested, f.requested[uid])
	}
	f.mu.Unlock()
	return slices.DeleteFunc(requested, func(c Claim) bool {
		found, err := f.named(ctx, c.Namespace, c.Name, c.UID)
		over := err == nil && (found == nil || len(f.Pool.ForeignDevices(found.Status.Allocation)) == 0)
		if over {
			f.Release(c.UID)
		}
		return over
	})
}

// fromCheckpoint are the claims that NVIDIA's driver has written down and that are in use. It
// does not remove any while it does not run, so that most may have ended long ago. They stay what
// they were while the file or the processes cannot be read.
func (f *Finder) fromCheckpoint(ctx context.Context) ([]Claim, error) {
	written, err := readCheckpoint(f.Checkpoint)
	if err != nil {
		return f.recorded, err
	}
	var running map[types.UID]bool
	var claims []Claim
	for _, uid := range slices.Sorted(maps.Keys(written)) {
		c := written[uid]
		devices := f.Pool.ForeignDevices(c.Status.Allocation)
		if len(devices) == 0 || f.gone[uid] {
			continue
		}
		found := Claim{Namespace: c.Namespace, Name: c.Name, UID: uid, Devices: devices}
		if c.Name != "" && c.Namespace != "" {
			if f.allocated(ctx, found) {
				claims = append(claims, found)
			}
			continue
		}
		if running == nil {
			if running, err = f.RunningPods(); err != nil {
				return f.recorded, err
			}
		}
		for _, user := range c.Status.ReservedFor {
			if running[user.UID] {
				found.Pods = append(found.Pods, user.Name)
			}
		}
		if len(found.Pods) > 0 {
			claims = append(claims, found)
		}
	}
	f.recorded = claims
	return claims, nil
}

// allocated asks the API server about a claim of the checkpoint. Where it does not answer the
// claim is.
func (f *Finder) allocated(ctx context.Context, c Claim) bool {
	found, err := f.named(ctx, c.Namespace, c.Name, c.UID)
	switch {
	case err != nil:
		return true
	case found == nil:
		if f.gone == nil {
			f.gone = map[types.UID]bool{}
		}
		f.gone[c.UID] = true
		return false
	}
	return len(f.Pool.ForeignDevices(found.Status.Allocation)) > 0
}

// join makes one of several claims that are the same. Of two of which one has no name, and the
// other one the same devices and pods, too: they are what the checkpoint and the kubelet say.
func join(all []Claim) []Claim {
	var joined []Claim
	for _, c := range all {
		at := slices.IndexFunc(joined, func(j Claim) bool { return j.same(c) })
		if at < 0 {
			joined = append(joined, c)
			continue
		}
		j := &joined[at]
		j.Namespace, j.Name, j.UID = cmp.Or(j.Namespace, c.Namespace), cmp.Or(j.Name, c.Name), cmp.Or(j.UID, c.UID)
		j.Devices = unique(append(j.Devices, c.Devices...))
		j.Pods = unique(append(j.Pods, c.Pods...))
	}
	slices.SortFunc(joined, func(a, b Claim) int { return cmp.Compare(a.String(), b.String()) })
	return joined
}

func (c Claim) same(o Claim) bool {
	switch {
	case c.Name != "" && o.Name != "":
		return c.Namespace == o.Namespace && c.Name == o.Name
	case c.UID != "" && o.UID != "":
		return c.UID == o.UID
	}
	shared := func(pod string) bool { return slices.Contains(c.Pods, pod) }
	return slices.ContainsFunc(o.Pods, shared) && slices.Equal(c.Devices, o.Devices)
}

func unique(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return slices.Compact(names)
}
