// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Claim is used by pods of this node and has devices of this driver's name and pool that this driver never publishes: another
// driver with the same name does.
type Claim struct {
	Namespace, Name string
	// Devices and Pods are names.
	Devices, Pods []string
}

func (c Claim) String() string { return c.Namespace + "/" + c.Name }

// nvidiaName is the name of a GPU, or of a partition of it, that NVIDIA's driver gives, with the GPU's minor number.
var nvidiaName = regexp.MustCompile(`^gpu-([0-9]{1,4})(-mig-.+)?$`)

// GPUs returns the PCI addresses of the GPUs that the devices may be on: all GPUs if one of the names is ambiguous.
func (c Claim) GPUs(gpus []gpu.GPU) []string {
	var addresses []string
	for _, name := range c.Devices {
		match := nvidiaName.FindStringSubmatch(name)
		at := slices.IndexFunc(gpus, func(g gpu.GPU) bool { return match != nil && match[1] == strconv.Itoa(g.Minor) })
		if at < 0 {
			addresses = nil
			for i := range gpus {
				addresses = append(addresses, gpus[i].PCIAddress)
			}
			return addresses
		}
		addresses = append(addresses, gpus[at].PCIAddress)
	}
	return unique(addresses)
}

// ErrKubelet says that the kubelet has given no answer, and may soon give one.
var ErrKubelet = errors.New("ask the kubelet which devices pods have")

// Finder finds such claims.
type Finder struct {
	Driver, Pool string
	// Socket is that of the kubelet's PodResources API, and PodName the name of this process's pod. A list without it was made
	// before the kubelet knew its pods. PodName is optional.
	Socket, PodName string
	// Named reads a claim from the API server. Nil means that there is none, an error that this is not known.
	Named func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error)

	// last is what was found last, and observes has the answers of the API server about it.
	last     []Claim
	observes map[string]bool
}

const (
	// findLimit bounds Find, however many claims the API server is asked about: publishing waits for the first.
	findLimit = 10 * time.Second
	// kubeletLimit bounds a question to the kubelet, which answers from memory.
	kubeletLimit = 5 * time.Second
	// maxPodResources is the limit of the kubelet's own client.
	maxPodResources = 16 << 20
)

// Find returns the claims in the order of their names. They stay what they were as long as the kubelet does not answer; a claim
// that the API server could not be asked about is among them. An error says so. It must not be called concurrently.
func (f *Finder) Find(ctx context.Context) ([]Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, findLimit)
	defer cancel()
	pods, err := f.pods(ctx)
	if err != nil {
		return f.last, err
	}
	f.last = nil
	var away error // once for all claims
	observes := map[string]bool{}
	for _, c := range f.claimsOf(pods) {
		// Another claim of this name has other pods.
		key := fmt.Sprint(c.String(), c.Devices, c.Pods)
		observer, known := f.observes[key]
		if !known && away == nil {
			var found *resourceapi.ResourceClaim
			found, away = f.Named(ctx, c.Namespace, c.Name)
			observer, known = onlyObserves(found, c.Devices), away == nil
		}
		if known {
			observes[key] = observer
		}
		if !observer {
			f.last = append(f.last, c)
		}
	}
	f.observes = observes
	return f.last, away
}

// claimsOf are the claims of containers, whether they use their devices or only observe them.
func (f *Finder) claimsOf(pods []*podresourcesapi.PodResources) []Claim {
	claims := map[string]Claim{}
	for _, pod := range pods {
		for _, container := range pod.GetContainers() {
			for _, d := range container.GetDynamicResources() {
				name := d.GetClaimNamespace() + "/" + d.GetClaimName()
				for _, r := range d.GetClaimResources() {
					if r.GetDriverName() == f.Driver && r.GetPoolName() == f.Pool && !device.IsName(r.GetDeviceName()) {
						c := claims[name]
						c.Devices, c.Pods = append(c.Devices, r.GetDeviceName()), append(c.Pods, pod.GetName())
						claims[name] = Claim{d.GetClaimNamespace(), d.GetClaimName(), c.Devices, c.Pods}
					}
				}
			}
		}
	}
	var all []Claim
	for _, name := range slices.Sorted(maps.Keys(claims)) {
		c := claims[name]
		all = append(all, Claim{c.Namespace, c.Name, unique(c.Devices), unique(c.Pods)})
	}
	return all
}

// onlyObserves reports whether a claim has devices with admin access only, which the kubelet does not tell. A device that it
// was not allocated is that of an earlier claim of its name.
func onlyObserves(c *resourceapi.ResourceClaim, devices []string) bool {
	if c == nil || c.Status.Allocation == nil {
		return false
	}
	admin := map[string]bool{}
	for _, r := range c.Status.Allocation.Devices.Results {
		before, seen := admin[r.Device]
		admin[r.Device] = ptr.Deref(r.AdminAccess, false) && (before || !seen)
	}
	return !slices.ContainsFunc(devices, func(name string) bool { return !admin[name] })
}

// pods lists the pods that run on the node, with what each container has.
func (f *Finder) pods(ctx context.Context) (pods []*podresourcesapi.PodResources, err error) {
	if _, err := os.Stat(f.Socket); errors.Is(err, fs.ErrNotExist) {
		// It would be there if this kubelet had one in this folder.
		return nil, fmt.Errorf("%w: %s", errNoSocket, f.Socket)
	}
	ctx, cancel := context.WithTimeout(ctx, kubeletLimit)
	defer cancel()
	// A new connection each time, so that a kubelet that restarts is not waited for.
	conn, err := grpc.NewClient("unix://"+f.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxPodResources)))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKubelet, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	answer, err := podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrKubelet, status.Convert(err).Message())
	}
	known := func(p *podresourcesapi.PodResources) bool { return f.PodName == "" || p.GetName() == f.PodName }
	if !slices.ContainsFunc(answer.GetPodResources(), known) {
		return nil, fmt.Errorf("%w: it has not read its pods yet", ErrKubelet)
	}
	return answer.GetPodResources(), nil
}

func unique(names []string) []string {
	slices.Sort(names)
	return slices.Compact(names)
}
