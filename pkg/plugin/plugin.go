// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package plugin connects the driver to the kubelet and to the API server: it
// registers with the kubelet, hands claims to package claim, follows what becomes
// of the hardware, and publishes ResourceSlices.
package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	draclient "k8s.io/dynamic-resource-allocation/client"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/claim"
	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
)

// Claims keeps the state of claims on this node. All methods may be called
// concurrently.
type Claims interface {
	// SetInventory says which devices exist from now on.
	SetInventory(inventory *device.Inventory)
	// Prepare is idempotent and prepares a claim completely or not at all.
	Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]claim.PreparedDevice, error)
	// Unprepare is idempotent; an unknown claim is a success.
	Unprepare(ctx context.Context, uid types.UID) error
	// Reconcile finishes or undoes what was left half done, and what belongs to
	// no claim any more. An error means that something is left; it is called
	// again in any case.
	Reconcile(ctx context.Context) error
	// Survey tells what is the case on the GPUs. It does not wait for a GPU that
	// is busy or does not answer.
	Survey(ctx context.Context) device.Status
	// InUse lists the devices that claims are known to have, by name. An error says
	// that there may be more.
	InUse() ([]string, error)
}

// Hardware finds the GPUs of this machine. Its methods return in bounded time,
// with an error that wraps gpu.ErrHung where the hardware does not.
type Hardware interface {
	// Open returns an error that wraps gpu.ErrDriverNotLoaded while there is no
	// driver. It is called again after it succeeded.
	Open(ctx context.Context) error
	Discover(ctx context.Context) (*gpu.Node, error)
}

// Options are all mandatory except where a comment says otherwise.
type Options struct {
	DriverName string
	// NodeName is the node's name and the name of its only pool.
	NodeName   string
	KubeClient kubernetes.Interface
	Claims     Claims
	Hardware   Hardware

	// DataDir holds the DRA socket; it is made if absent. RegistrarDir is where
	// the kubelet watches for registration sockets; it must exist.
	DataDir      string
	RegistrarDir string

	// PollInterval is the time between two looks at the GPUs,
	// ReconcileInterval that between two times of cleaning up.
	PollInterval, ReconcileInterval time.Duration

	// Policy is what the admin wants published.
	Policy PolicySource
	// Limited says that an interposer library limits time-slice shares.
	Limited bool

	// PodUID lets two instances overlap during a rolling update, each with its
	// own sockets. Optional: without it there is one instance at a time.
	PodUID types.UID
	// Events tells people what is the case on the GPUs. Optional.
	Events claim.Events
	// HealthListener serves the gRPC health protocol and is closed by Run.
	// Optional.
	HealthListener net.Listener
}

// Times that bound waiting. None of them decides about correctness.
const (
	// The kubelet gives a call 45 s and comes back only a minute later, so a
	// call that arrives while the driver starts had better wait a little: for longer
	// than a GPU that hangs holds up the first discovery of the others.
	settleTimeout = 30 * time.Second
	// Leftovers had better be gone before the first claim.
	cleanUpTimeout = 20 * time.Second
	// A pod gets 30 s between SIGTERM and SIGKILL by default.
	drainTimeout = 20 * time.Second
	// A call that was cancelled has nothing to wait for any more.
	cancelTimeout = 5 * time.Second
	// The helper closes connections without waiting until answers are written.
	answerTime  = 500 * time.Millisecond
	nodeTimeout = 10 * time.Second
)

// Plugin is the running driver. It implements kubeletplugin.DRAPlugin.
type Plugin struct {
	Options

	slices *draclient.Client
	retry  wait.Backoff
	// followUp is how long after a claim failed it is cleaned up.
	followUp time.Duration
	ready    *readiness
	calls    inflight
	fatal    context.CancelCauseFunc
	// background are goroutines that end after the calls of the kubelet.
	background sync.WaitGroup

	// settled is closed once the start has been tried: the inventory is there
	// and leftovers are dealt with, or it is known that there is no driver yet.
	settled     chan struct{}
	settledOnce sync.Once

	// inventory is what is to be published, nil until there is one.
	inventory atomic.Pointer[device.Inventory]
	notices   notices
	leftovers leftovers
	asked     asked

	// These ask for something to be done soon: republish to publish the
	// inventory, recheck to see whether what was published is still there,
	// failed to clean up after a claim that failed, look to look at the GPUs.
	republish, recheck, failed, look chan struct{}
	// noCounters is set when the cluster turned out not to store shared
	// counters, noShares when it turned out not to store what several claims need
	// to have one device.
	noCounters, noShares atomic.Bool
	// droppedOnce are the features of which it was logged that they are missing.
	droppedOnce sync.Map
}

var _ kubeletplugin.DRAPlugin = (*Plugin)(nil)

// New checks the options and does nothing yet.
func New(o Options) (*Plugin, error) {
	switch {
	case o.DriverName == "", o.NodeName == "", o.DataDir == "", o.RegistrarDir == "":
		return nil, errors.New("a plugin needs a driver name, a node name, a data directory and a registrar directory")
	case o.KubeClient == nil, o.Claims == nil, o.Hardware == nil:
		return nil, errors.New("a plugin needs a Kubernetes client, claims and hardware")
	case o.Policy == nil:
		return nil, errors.New("a plugin needs a sharing policy")
	case o.PollInterval <= 0, o.ReconcileInterval <= 0:
		return nil, errors.New("a plugin needs to know how often to look and how often to clean up")
	}
	return &Plugin{
		Options:   o,
		slices:    draclient.New(o.KubeClient),
		retry:     wait.Backoff{Duration: time.Second, Factor: 1.5, Jitter: 0.1, Steps: 30, Cap: 15 * time.Second},
		followUp:  min(time.Second, o.ReconcileInterval),
		ready:     newReadiness(),
		settled:   make(chan struct{}),
		republish: make(chan struct{}, 1),
		recheck:   make(chan struct{}, 1),
		failed:    make(chan struct{}, 1),
		look:      make(chan struct{}, 1),
	}, nil
}

// Run serves until ctx is cancelled, which is a clean end and returns nil, or
// until an error that retrying cannot mend. Published slices stay: the kubelet
// removes them if no other instance takes over within 30 s.
func (p *Plugin) Run(ctx context.Context) error {
	parent := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p.fatal = cancel

	if p.HealthListener != nil {
		stop := p.serveHealth(ctx)
		defer stop()
	}
	if err := p.checkNode(ctx); err != nil {
		return err
	}
	if err := p.prepareDirectories(ctx); err != nil {
		return err
	}
	// The helper stops at once when its context ends. Detached from ctx it
	// keeps serving until calls in progress have come to their end.
	helper, err := kubeletplugin.Start(context.WithoutCancel(ctx), p, p.helperOptions()...)
	if err != nil {
		return fmt.Errorf("start serving the kubelet in %s and %s: %w", p.DataDir, p.RegistrarDir, err)
	}
	// Calls in progress are served to their end, and so is what goes on beside them.
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	p.background.Go(func() { p.newNodeLoop().run(background) })
	p.background.Go(func() { p.publish(background, helper) })

	<-ctx.Done()
	p.shutDown(ctx, helper)
	end()
	p.background.Wait()
	if parent.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

func (p *Plugin) helperOptions() []kubeletplugin.Option {
	return []kubeletplugin.Option{
		kubeletplugin.DriverName(p.DriverName),
		kubeletplugin.NodeName(p.NodeName),
		kubeletplugin.KubeClient(p.KubeClient),
		kubeletplugin.PluginDataDirectoryPath(p.DataDir),
		kubeletplugin.RegistrarDirectoryPath(p.RegistrarDir),
		kubeletplugin.RollingUpdate(p.PodUID),
		// Package claim locks per GPU, across processes.
		kubeletplugin.Serialize(false),
		// Declining in WatchHealthStatus works as well, as an error in the log.
		kubeletplugin.HealthService(false),
		kubeletplugin.GRPCInterceptor(p.onRegistration),
		kubeletplugin.GRPCInterceptor(onArrival),
	}
}

// checkNode ends the driver when it was told a node name that does not exist:
// nothing it could publish would ever be used. Any other failure is left to the
// retries of publishing, so that unpreparing works while the API server is away.
func (p *Plugin) checkNode(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	_, err := p.KubeClient.CoreV1().Nodes().Get(ctx, p.NodeName, metav1.GetOptions{})
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err) && !notServed(err):
		return fmt.Errorf("the cluster has no node named %q: --node-name (NODE_NAME) must be the name of the Node object that this machine is", p.NodeName)
	default:
		klog.FromContext(ctx).Error(err, "Could not check that the node exists, going on", "node", p.NodeName)
		return nil
	}
}

func (p *Plugin) prepareDirectories(ctx context.Context) error {
	if err := os.MkdirAll(p.DataDir, 0o750); err != nil {
		return fmt.Errorf("make the plugin's data directory: %w", err)
	}
	if info, err := os.Stat(p.RegistrarDir); err != nil || !info.IsDir() {
		return fmt.Errorf("the kubelet's registration directory %s is not there; is the kubelet's root directory another one?", p.RegistrarDir)
	}
	if p.PodUID != "" {
		removeStaleSockets(ctx, filepath.Join(p.RegistrarDir, p.DriverName+"-*-reg.sock"))
		removeStaleSockets(ctx, filepath.Join(p.DataDir, "dra-*.sock"))
	}
	return nil
}

// shutDown lets calls in progress finish, because a claim that is prepared half
// has to be undone by the next instance, then closes the sockets. After it
// returns no call touches the hardware any more, except one that hangs there,
// which it logs.
func (p *Plugin) shutDown(ctx context.Context, helper *kubeletplugin.Helper) {
	logger := klog.FromContext(ctx)
	logger.Info("Stopping", "reason", context.Cause(ctx))
	if !p.calls.waitIdle(drainTimeout, answerTime) {
		logger.Info("Calls are still running, cancelling them", "waited", drainTimeout)
	}
	helper.Stop()
	if !p.calls.waitIdle(cancelTimeout, 0) {
		logger.Info("Calls did not end although they were cancelled", "waited", cancelTimeout)
	}
}
