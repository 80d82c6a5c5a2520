// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package plugin connects the driver to the kubelet and to the API server.
//
//	registration.go  how the kubelet finds the plugin; prepare.go serves its calls, which go to package claim
//	gpu_loop.go      cleans up, joins all that is known of the GPUs, and propagates it
//	gpus.go          what was discovered of them, also by an earlier process
//	gpu_health.go    what package health finds out
//	neighbours.go    which of them another driver with the same name has given away, and what else on the node gives out GPUs
//	node.go          watches the Node: its identity, its labels, which GPUs are cordoned, and what its kubelet can do
//	desired.go       which devices are to be published
//	want.go          what slices, taints, the status of claims, the kubelet, events, labels of the node and metrics should be, given all of this
//	conditions.go    texts for people about conditions of the GPUs; package device makes taints of the conditions
//	device_states.go the health of the devices of claims, for the kubelet
//	claimstatus/     writes it to the status of claims
//	publish/         keeps ResourceSlices in the API server
//	metadata.go      what containers can read about their devices, in files
//	events/          tells people what holds, and what happens
//	health.go        why the plugin is not ready, and whether it is alive
package plugin

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	metadatav1beta1 "k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/health"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin/claimstatus"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/driver/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/driver/plugin/nodelabels"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish"
	"github.com/partage-dev/partage/pkg/driver/plugin/publish/rules"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
)

// Claims keeps the state of claims on this node, and knows what they and others have on the GPUs. All methods may be called concurrently.
type Claims interface {
	// Prepare is idempotent and prepares a claim completely or not at all.
	Prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]claim.LiveDevice, error)
	// Unprepare is idempotent; an unknown claim is a success.
	Unprepare(ctx context.Context, uid types.UID) error
	// SetInventory replaces the devices that claims can have.
	SetInventory(inventory *device.Inventory)
	// Reconcile finishes or undoes what was left half done, and what belongs to no claim any more, and says what there is
	// then. An error means that something is left. It does not wait for a GPU that is busy or does not answer.
	Reconcile(ctx context.Context) (device.Status, error)
	// ReleaseOrphans asks the API server about prepared claims until ctx ends, and
	// releases those that do not have their devices any more.
	ReleaseOrphans(ctx context.Context)
	// Unobserved lists the GPUs that could not be observed yet.
	Unobserved() []string
	// InUse lists the devices that claims are known to have, by name. An error says
	// that there may be more.
	InUse() ([]string, error)
	// Statements returns what people should be told about claims now.
	Statements() []claim.Statement
	// Live lists what prepared claims have. It waits for no GPU.
	Live() ([]claim.LiveClaim, error)
	// Changed returns a channel that is closed when this process next changes anything.
	Changed() <-chan struct{}
}

// Options are all mandatory except where a comment says otherwise.
type Options struct {
	DriverName string
	// NodeName is the node's name and the name of its only pool.
	NodeName   string
	KubeClient kubernetes.Interface
	// MetadataClient reads what needs no more than metadata.
	MetadataClient metadata.Interface
	Claims         Claims
	Hardware       Hardware

	// DataDir holds the DRA socket; it is made if absent. RegistrarDir is where
	// the kubelet watches for registration sockets; it must exist.
	DataDir      string
	RegistrarDir string
	// BootID is that of this boot of the machine.
	BootID string

	// PollInterval is the time between two polls of the GPUs, which clean up, too.
	PollInterval time.Duration

	// Policy is the admin's sharing policy.
	Policy PolicySource
	// Limited says that an interposer library limits time-slice shares.
	Limited bool

	// PodUID lets two instances overlap during a rolling update, each with its
	// own sockets. Optional: without it there is one instance at a time.
	PodUID types.UID
	// StatusClient writes the status of claims. Optional: without it nothing is written.
	StatusClient kubernetes.Interface
	// DeviceMetadata gives containers a file about their devices.
	DeviceMetadata bool
	// NodeLabels says what becomes of the node's labels about its GPUs, which LabelClient
	// writes. Optional: without a mode they are left alone.
	NodeLabels  nodelabels.Mode
	LabelClient kubernetes.Interface
	// CDIDir is the folder of CDI specs, and FileContext the SELinux context of files that
	// containers read, empty for none.
	CDIDir, FileContext string
	// Events reports conditions of the GPUs.
	Events events.Tell
	// Health tells what is wrong with GPUs that answer.
	Health health.Hardware
	// Metrics are of what the plugin does.
	Metrics *metrics.Metrics
	// Runtime finds out whether containers without a claim can have GPUs.
	Runtime RuntimeCheck
	// ForeignClaims finds claims of another driver with this driver's name.
	ForeignClaims ForeignClaims
	// HealthListener serves the gRPC health protocol and is closed by Run.
	// Optional.
	HealthListener net.Listener

	// Tests have other times: publishPace is that of the publisher, and answer for how long nothing is closed after the last call, whose
	// answer may not be written yet.
	publishPace *rules.Pace
	answer      time.Duration
}

// Times that bound waiting. None of them decides about correctness.
const (
	// The kubelet gives a call 45 s and comes back only a minute later, so a
	// call that arrives while the driver starts had better wait a little: for longer
	// than a GPU that hangs holds up the first discovery of the others.
	startupTimeout = 30 * time.Second
	// A pod gets 30 s between SIGTERM and SIGKILL by default.
	drainTimeout = 20 * time.Second
	// A call that was cancelled has nothing to wait for any more.
	cancelTimeout = 5 * time.Second
	// The helper closes connections without waiting until answers are written.
	answerTime = 500 * time.Millisecond
)

// shared is what the parts of the driver have in common.
type shared struct {
	options    *Options
	readiness  *readiness
	startup    *startup
	notifier   *events.Notifier
	neighbours *neighbourMonitor
	states     *deviceStates
	requested  *requestedDevices
	// pollNow asks for a poll of the GPUs, which cleans up, too.
	pollNow loop.Trigger
	// stop ends Run with an error.
	stop context.CancelCauseFunc
}

// Plugin is the running driver.
type Plugin struct {
	*shared
	publisher *publish.Publisher
	service   *draService
	gpus      *gpuLoop
	node      *ownNode
	labels    *nodelabels.Writer
	// status is nil where the status of claims is not written.
	status *claimstatus.Writer
	// socketUID is part of the names of the sockets.
	socketUID types.UID
}

// New does nothing yet.
func New(o Options) *Plugin {
	all := &shared{
		options: &o, readiness: newReadiness(), startup: newStartup(), notifier: events.NewNotifier(o.Events), states: newDeviceStates(o.PollInterval),
		requested: &requestedDevices{driverName: o.DriverName, poolName: o.NodeName}, pollNow: loop.NewTrigger(),
	}
	p := &Plugin{shared: all, service: &draService{shared: all}}
	p.publisher = p.newPublisher()
	if o.StatusClient != nil {
		p.status = claimstatus.New(claimstatus.Options{DriverName: o.DriverName, Client: o.StatusClient, Newest: p.publisher.Newest})
	}
	p.labels = nodelabels.New(nodelabels.Options{
		NodeName: o.NodeName, Client: o.LabelClient, Mode: o.NodeLabels,
		Say: func(ctx context.Context, message string) { p.notifier.Say(ctx, reasonForeignLabels, message) },
	})
	p.node = newOwnNode(o.KubeClient, o.NodeName, p.pollNow, func(err error) { p.stop(err) })
	software := &softwareFinder{node: p.node.now.Load, runtime: o.Runtime, observe: o.Metrics.SetNeighbour}
	if o.PodUID != "" { // without it this driver has the socket that the other one would have
		software.otherDriver = func(ctx context.Context) unclaimed.Finding {
			return unclaimed.OtherDriver(ctx, o.RegistrarDir, o.DriverName)
		}
	}
	p.neighbours = newNeighbourMonitor(o.ForeignClaims, software.find, 3*o.PollInterval, p.pollNow)
	p.gpus = &gpuLoop{
		shared: all, publish: p.publish, health: p.newMonitor(),
		discovery: discoverer{hardware: o.Hardware, interval: o.PollInterval, opened: p.startup.opened, found: make(chan discovery, 1)},
		gpus:      knownGPUs{file: lastseen.New(o.DataDir, o.BootID)},
		desired:   desired{shared: all, node: p.node, stored: p.publisher, now: time.Now, needed: map[string]time.Time{}},
	}
	return p
}

func (p *Plugin) newPublisher() *publish.Publisher {
	o := p.options
	return publish.New(publish.Options{
		DriverName: o.DriverName, NodeName: o.NodeName, KubeClient: o.KubeClient, MetadataClient: o.MetadataClient,
		LockFile: filepath.Join(o.DataDir, "publish.lock"),
		Report:   func(ctx context.Context, reason string) { p.readiness.set(ctx, needSlices, reason) },
		Say:      p.notifier.Say,
		Observe: func(slices int, err error) {
			if err != nil {
				o.Metrics.PublishFailed()
				return
			}
			o.Metrics.Published(slices)
		},
		Pace: o.publishPace,
	})
}

// publish tells the cluster what is wanted. What is stored stays as it is as long as it is not known what it should be.
func (p *Plugin) publish(w *wanted) {
	if w.node != nil {
		p.publisher.SetOwner(w.node.UID)
		p.labels.Set(w.node, w.offered, w.certain)
		var gives *bool
		if knows, err := extendedResources(w.node); err == nil {
			gives = &knows
		}
		p.options.Metrics.SetExtendedResources(gives)
	}
	if p.status != nil && w.enough {
		p.status.Set(statusOf(w.states))
	}
	if w.certain {
		p.publisher.SetInventory(w.inventory)
	}
}

// Run serves until ctx is cancelled, which is a clean end and returns nil, or
// until an error that retrying cannot mend. Published slices stay: the kubelet
// removes them if no other instance takes over within 30 s.
func (p *Plugin) Run(ctx context.Context) error {
	parent := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p.stop = cancel

	p.socketUID = p.options.socketUID(ctx)
	if p.options.HealthListener != nil {
		stop := p.serveHealth(ctx)
		defer stop()
	}
	if err := p.prepareDirectories(ctx); err != nil {
		return err
	}
	// The helper stops at once when its context ends. Detached from ctx it
	// keeps serving until calls in progress have ended.
	helper, err := kubeletplugin.Start(context.WithoutCancel(ctx), p.service, p.helperOptions()...)
	if err != nil {
		return fmt.Errorf("start serving the kubelet in %s and %s: %w", p.options.DataDir, p.options.RegistrarDir, err)
	}
	// So do the loops: a call in progress may depend on them.
	loops, endLoops := context.WithCancel(context.WithoutCancel(ctx))
	defer endLoops()
	all := []func(context.Context){
		p.node.watch.Run, p.gpus.health.Run, p.neighbours.run, p.gpus.run, p.releaseOrphans, p.publisher.Run, p.labels.Run,
	}
	if p.status != nil {
		all = append(all, p.status.Run)
	}
	var running sync.WaitGroup
	for _, run := range all { // the kubelet need not wait for the API server, which may be slow
		running.Go(func() { run(loops) })
	}
	<-ctx.Done()
	p.shutDown(ctx, helper)
	endLoops()
	running.Wait()
	if parent.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// releaseOrphans waits until calls are let through.
func (p *Plugin) releaseOrphans(ctx context.Context) {
	<-p.startup.done
	p.options.Claims.ReleaseOrphans(ctx)
}

func (p *Plugin) helperOptions() []kubeletplugin.Option {
	o := p.options
	return []kubeletplugin.Option{
		kubeletplugin.DriverName(o.DriverName),
		kubeletplugin.NodeName(o.NodeName),
		kubeletplugin.KubeClient(o.KubeClient),
		kubeletplugin.PluginDataDirectoryPath(o.DataDir),
		kubeletplugin.RegistrarDirectoryPath(o.RegistrarDir),
		kubeletplugin.RollingUpdate(p.socketUID),
		// Package claim locks per GPU, across processes.
		kubeletplugin.Serialize(false),
		// A kubelet that does not know it, or has it switched off, does not ask.
		kubeletplugin.HealthService(true),
		kubeletplugin.GRPCInterceptor(p.onRegistration),
		kubeletplugin.GRPCInterceptor(onArrival),
		// The helper writes and removes the files by which containers read about their devices (KEP-5304).
		kubeletplugin.EnableDeviceMetadata(o.DeviceMetadata, []schema.GroupVersion{metadatav1beta1.SchemeGroupVersion}),
		kubeletplugin.CDIDirectory(o.CDIDir),
		kubeletplugin.MetadataFileOps(kubeletplugin.MetadataFileOperations{WriteFile: o.metadataWriter(), Glob: writtenOrHalf}),
	}
}

func (p *Plugin) prepareDirectories(ctx context.Context) error {
	if err := os.MkdirAll(p.options.DataDir, 0o750); err != nil {
		return fmt.Errorf("make the plugin's data directory: %w", err)
	}
	if info, err := os.Stat(p.options.RegistrarDir); err != nil || !info.IsDir() {
		return fmt.Errorf("the kubelet's registration directory %s is not there; is the kubelet's root directory another one?", p.options.RegistrarDir)
	}
	p.options.removeStaleSockets(ctx)
	return nil
}

// shutDown lets calls in progress finish, because a half-prepared claim has to be
// undone by the next instance, then closes the sockets. After it returns no call
// touches the hardware any more, except one that hangs there, which it logs.
func (p *Plugin) shutDown(ctx context.Context, helper *kubeletplugin.Helper) {
	logger := klog.FromContext(ctx)
	logger.Info("Stopping", "reason", context.Cause(ctx))
	if !p.service.calls.waitIdle(ctx, drainTimeout, cmp.Or(p.options.answer, answerTime)) {
		logger.Info("Calls are still running, cancelling them", "waited", drainTimeout)
	}
	helper.Stop()
	if !p.service.calls.waitIdle(ctx, cancelTimeout, 0) {
		logger.Info("Calls did not end although they were cancelled", "waited", cancelTimeout)
	}
}
