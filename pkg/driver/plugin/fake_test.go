// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/health"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/healthsocket"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/test/flow/fakeapi"
)

const (
	testDriver = "gpu.nvidia.com"
	testNode   = "node-1"
	// eventually bounds waits that a passing test never comes near.
	eventually = 30 * time.Second
	// writing is enough for an answer, also on a machine that does much else.
	writing = 10 * answerTime
)

// apiServer is a fake one.
type apiServer = fakeapi.Server

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	api := fakeapi.New(t)
	api.AddNode(testNode)
	return api
}

// fakeClaims remembers what is prepared and can be made to fail.
type fakeClaims struct {
	mu         sync.Mutex
	unobserved []string
	inventory  *device.Inventory
	prepared   map[types.UID]bool
	status     device.Status
	reconciled int
	left       error
	inUse      []string
	inUseErr   error
	live       []claim.LiveClaim
	changed    chan struct{}

	// onPrepare runs in Prepare without the lock.
	onPrepare func(ctx context.Context, claim *resourceapi.ResourceClaim) error
	// onReconcile runs in Reconcile without the lock.
	onReconcile func()
}

func (f *fakeClaims) Statements() []claim.Statement { return nil }

func (f *fakeClaims) Unobserved() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unobserved
}

func (f *fakeClaims) SetInventory(i *device.Inventory) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inventory = i
}

func (f *fakeClaims) Prepare(ctx context.Context, c *resourceapi.ResourceClaim) ([]claim.LiveDevice, error) {
	if f.onPrepare != nil {
		if err := f.onPrepare(ctx, c); err != nil {
			return nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.inventory == nil {
		return nil, errors.New("there is no inventory")
	}
	if f.prepared == nil {
		f.prepared = map[types.UID]bool{}
	}
	f.prepared[c.UID] = true
	share := types.UID("share")
	return []claim.LiveDevice{{
		Requests: []string{"r/a"}, Pool: testNode, Device: "gpu-0000-1b-00-0",
		CDIDevice: "k8s.gpu.nvidia.com/claim=" + string(c.UID), ShareID: &share, GPU: "GPU-" + firstGPU,
	}}, nil
}

func (f *fakeClaims) Unprepare(_ context.Context, uid types.UID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if uid == "stuck" {
		return errors.New("device gpu-0000-1b-00-0: in use by process 42")
	}
	delete(f.prepared, uid)
	return nil
}

func (f *fakeClaims) Reconcile(context.Context) (device.Status, error) {
	if f.onReconcile != nil {
		f.onReconcile()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.reconciled++
	return f.status, f.left
}

func (f *fakeClaims) ReleaseOrphans(context.Context) {}

func (f *fakeClaims) InUse() ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.inUse), f.inUseErr
}

func (f *fakeClaims) Live() ([]claim.LiveClaim, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.live), nil
}

func (f *fakeClaims) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return f.changed
}

// uses is a claim with one device: a partition, where it is said at which placement.
func uses(ref claim.Ref, device, pciAddress string, at *gpu.Placement) claim.LiveClaim {
	d := claim.LiveDevice{Device: device, PCIAddress: pciAddress}
	if at != nil {
		d.Partition = &claim.LivePartition{Placement: *at}
	}
	return claim.LiveClaim{Claim: ref, Devices: []claim.LiveDevice{d}}
}

// setLive says what prepared claims have.
func (f *fakeClaims) setLive(live ...claim.LiveClaim) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.live = live
	if f.changed != nil {
		close(f.changed)
		f.changed = nil
	}
}

func (f *fakeClaims) setInUse(names ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inUse = names
}

func (f *fakeClaims) setStatus(s device.Status) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status = s
}

// rounds is how often Reconcile was called.
func (f *fakeClaims) rounds() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reconciled
}

// fakePolicy is a policy that a test replaces.
type fakePolicy struct {
	mu      sync.Mutex
	current *policy.Policy
	err     error
}

func (f *fakePolicy) Read(context.Context) (*policy.Policy, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.current, f.err
}

func (f *fakePolicy) set(p *policy.Policy, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current, f.err = p, err
}

// withoutShares offers what one claim has alone.
func withoutShares() *policy.Policy {
	return &policy.Policy{Default: policy.Offer{Whole: true, Partition: &policy.PartitionOffer{}}}
}

// fakeHardware has GPUs once the driver is there.
type fakeHardware struct {
	mu          sync.Mutex
	err         error
	node        *gpu.Node
	discoveries int
	// removed are the GPUs that were taken out.
	removed []string
	// onDiscover runs in Discover without the lock.
	onDiscover func(ctx context.Context) error
}

func (f *fakeHardware) setError(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *fakeHardware) setNode(node *gpu.Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.node = node
}

func (f *fakeHardware) setOnDiscover(do func(ctx context.Context) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.onDiscover = do
}

func (f *fakeHardware) Open(context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *fakeHardware) Discover(ctx context.Context) (*gpu.Node, error) {
	f.mu.Lock()
	f.discoveries++
	node, do := f.node, f.onDiscover
	f.mu.Unlock()
	if do != nil {
		if err := do(ctx); err != nil {
			return nil, err
		}
	}
	return node, nil
}

func (f *fakeHardware) Removed(pciAddress string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Contains(f.removed, pciAddress)
}

// quiet are GPUs of which nothing is reported.
type quiet struct{}

var _ health.Hardware = quiet{}

func (quiet) Events(ctx context.Context) <-chan gpu.Event {
	events := make(chan gpu.Event)
	context.AfterFunc(ctx, func() { close(events) })
	return events
}

func (quiet) Unmonitored(string) error                               { return nil }
func (quiet) Health(context.Context, string) (gpu.Health, error)     { return gpu.Health{}, nil }
func (quiet) MIGState(context.Context, string) (gpu.MIGState, error) { return gpu.MIGState{}, nil }
func (quiet) FabricPending(context.Context, string) (string, error)  { return "", nil }

func withoutRuntime([]string) (unclaimed.Access, error) { return unclaimed.Access{}, nil }

func withoutForeign(context.Context) ([]unclaimed.Claim, error) { return nil, nil }

const (
	firstGPU  = "0000:1b:00.0"
	secondGPU = "0000:2c:00.0"
)

// testNodeWith has GPUs that can be cut in two halves. Each is four devices.
func testNodeWith(pciAddresses ...string) *gpu.Node {
	all := gpu.Resources{MemoryBytes: 8 << 30, Multiprocessors: 16, CopyEngines: 2}
	half := gpu.Resources{MemoryBytes: 4 << 30, Multiprocessors: 8, CopyEngines: 1}
	node := &gpu.Node{DriverVersion: "580.95.05", CUDAVersion: gpu.Version{Major: 13}}
	for _, address := range pciAddresses {
		node.GPUs = append(node.GPUs, gpu.GPU{
			PCIAddress: address, UUID: "GPU-" + address, ProductName: "Test GPU", Architecture: "Hopper",
			ComputeCapability: gpu.Version{Major: 9},
			Resources:         all,
			MIG: &gpu.MIG{Dynamic: true, MemorySlices: 2, Profiles: []gpu.Profile{
				{
					ID: 0, Name: "2g.8gb", Slices: 2, MaxInstances: 1, Resources: all,
					Placements: []gpu.Placement{{Start: 0, Size: 2}},
				},
				{
					ID: 19, Name: "1g.4gb", Slices: 1, MaxInstances: 2, Resources: half,
					Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 1, Size: 1}},
				},
			}},
		})
	}
	return node
}

// fakeEvents remembers events.
type fakeEvents struct {
	mu  sync.Mutex
	all []string
}

func (f *fakeEvents) Tell(_ context.Context, all ...events.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range all {
		f.all = append(f.all, e.String())
	}
}

func (f *fakeEvents) list() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.all)
}

// rig is a running plugin with everything around it.
type rig struct {
	api      *apiServer
	claims   *fakeClaims
	hardware *fakeHardware
	events   *fakeEvents
	// options are what the plugin is made of; tests change them before
	// they start it.
	options Options
	plugin  *Plugin
	stop    context.CancelFunc
	done    chan error
	// unregistered is set by tests without a kubelet.
	unregistered bool
	// registering is held in a call of the registration service, which a kubelet
	// makes one at a time.
	registering sync.Mutex
	policy      *fakePolicy
}

// registerSoon registers the plugin once it can be.
func (r *rig) registerSoon(ctx context.Context) {
	conn, err := grpc.NewClient("unix://"+r.options.registrationSocket(r.options.PodUID), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return
	}
	defer conn.Close()
	registration := registerapi.NewRegistrationClient(conn)
	_ = wait.PollUntilContextCancel(ctx, 5*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		r.registering.Lock()
		defer r.registering.Unlock()
		_, err := registration.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
		return err == nil, nil
	})
}

// newRig prepares a plugin that is not running yet.
func newRig(t *testing.T) *rig {
	t.Helper()
	return newRigOn(t, newAPIServer(t))
}

// newRigOn is newRig for an API server that there is already.
func newRigOn(t *testing.T, api *apiServer) *rig {
	t.Helper()
	r := &rig{
		api: api, claims: &fakeClaims{}, hardware: &fakeHardware{node: testNodeWith(firstGPU)},
		events: &fakeEvents{}, policy: &fakePolicy{current: withoutShares()}, done: make(chan error, 1),
	}
	config := &rest.Config{Host: r.api.URL(), QPS: -1}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	// Socket paths have little room; t.TempDir() would use most of it.
	dir, err := os.MkdirTemp("", "p")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	registrar := filepath.Join(dir, "reg")
	if err := os.Mkdir(registrar, 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "health"))
	if err != nil {
		t.Fatal(err)
	}
	r.options = Options{
		DriverName: testDriver, NodeName: testNode, KubeClient: client, MetadataClient: metadataClient, Claims: r.claims, Hardware: r.hardware,
		DataDir: filepath.Join(dir, "data"), RegistrarDir: registrar, CDIDir: filepath.Join(dir, "cdi"), BootID: "boot-1", PodUID: "uid-1", HealthListener: listener,
		Policy: r.policy, PollInterval: 10 * time.Millisecond, Events: r.events.Tell, Health: quiet{}, Metrics: metrics.New(metrics.Options{}),
		Runtime: withoutRuntime, ForeignClaims: withoutForeign,
	}
	pace := rules.Usual
	pace.Retry, pace.Hold = 5*time.Millisecond, time.Millisecond
	r.options.publishPace = &pace
	return r
}

// build makes the plugin, which does nothing yet.
func (r *rig) build(t *testing.T) {
	t.Helper()
	r.plugin = New(r.options)
}

// start runs the plugin until the test ends.
func (r *rig) start(t *testing.T) {
	t.Helper()
	r.build(t)
	// A logger of the test would be used by goroutines that client-go leaves
	// behind, so the global one is used where no test looks at the log.
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), ktesting.NewLogger(nopTL{}, ktesting.NewConfig())))
	r.stop = cancel
	go func() { r.done <- r.plugin.Run(ctx) }()
	if !r.unregistered {
		// Like a kubelet that runs. It ends with the plugin.
		go r.registerSoon(ctx)
	}
	t.Cleanup(func() {
		cancel()
		if r.done != nil {
			if err := <-r.done; err != nil {
				t.Errorf("Run: %v", err)
			}
		}
	})
}

type nopTL struct{}

func (nopTL) Helper()    {}
func (nopTL) Log(...any) {}

// wait returns what Run returned.
func (r *rig) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.done:
		r.done = nil
		return err
	case <-time.After(eventually):
		t.Fatal("Run did not return")
		return nil
	}
}

func dial(t *testing.T, target string) grpc.ClientConnInterface {
	t.Helper()
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// register does what the kubelet does and returns a client for the DRA socket.
func (r *rig) register(t *testing.T) drapb.DRAPluginClient {
	t.Helper()
	registration := registerapi.NewRegistrationClient(dial(t, "unix://"+r.options.registrationSocket(r.options.PodUID)))
	var info *registerapi.PluginInfo
	r.until(t, "registration", func(ctx context.Context) (err error) {
		info, err = registration.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
		return err
	})
	r.registering.Lock()
	defer r.registering.Unlock()
	if _, err := registration.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	return drapb.NewDRAPluginClient(dial(t, "unix://"+info.GetEndpoint()))
}

// until repeats try until it succeeds.
func (r *rig) until(t *testing.T, what string, try func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, eventually, true, func(ctx context.Context) (bool, error) {
		last = try(ctx)
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, last)
	}
}

// check asks as a probe of the kubelet does.
func (r *rig) check(ctx context.Context, question string) error {
	return healthsocket.Ask(ctx, r.options.HealthListener.Addr().String(), question)
}

// claim stores an allocated claim and returns how the kubelet asks for it.
func (r *rig) claim(name string) *drapb.Claim {
	stored := r.api.SetClaim(&resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	})
	return &drapb.Claim{Namespace: stored.Namespace, Name: stored.Name, Uid: string(stored.UID)}
}

func objectMeta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)}
}

// prepared prepares a claim and returns its CDI ids.
func (r *rig) prepared(t *testing.T, client drapb.DRAPluginClient, c *drapb.Claim) []string {
	t.Helper()
	answer, err := client.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{c}})
	if err != nil || answer.GetClaims()[c.GetUid()].GetError() != "" {
		t.Fatal(err, answer)
	}
	var ids []string
	for _, d := range answer.GetClaims()[c.GetUid()].GetDevices() {
		ids = append(ids, d.GetCdiDeviceIds()...)
	}
	return ids
}

// unprepared unprepares a claim.
func (r *rig) unprepared(t *testing.T, client drapb.DRAPluginClient, c *drapb.Claim) {
	t.Helper()
	answer, err := client.NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{c}})
	if err != nil || answer.GetClaims()[c.GetUid()].GetError() != "" {
		t.Fatal(err, answer)
	}
}
