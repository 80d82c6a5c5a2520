// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package plugin connects the driver to the kubelet and to the API server.
//
//	prepare.go       the calls of the kubelet, which go to package claim
//	gpu_loop.go      surveys the GPUs, and joins that with what discovery.go reads of them
//	node_state.go    what is known about them; gpu_report.go says it
//	recall.go        what an earlier process knew about them
//	desired.go       which devices are to be published
//	publish/         keeps ResourceSlices in the API server
//	reconcile.go     cleans up
//	conditions.go    reports conditions of the GPUs; they become taints in package device
//	gpu_health.go    joins what package health finds out
//	affected_users.go the events of claims on such a GPU
//	device_states.go how the devices of claims are; claim_status.go says it in the status of
//	                 claims, which claimstatus/ writes, health_stream.go to the kubelet
//	metadata.go      what containers can read about their devices, in files
//	own_node.go      what the API server says of this node: its identity, its labels, and which GPUs are cordoned
//	labels.go        tells nodelabels/ which GPUs the labels of the node are about
//	kubelet.go       whether pods can have devices by extended resources
//	neighbours.go    reports what else on the node gives out GPUs, foreign_claims.go follows
//	                 the claims of another driver with the same name
//	events/          tells people what holds, and what happens
//	readiness.go     why the plugin is not ready; health.go answers for it
package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/health"
	"github.com/partage-dev/partage/pkg/logchange"
	"github.com/partage-dev/partage/pkg/metrics"
	"github.com/partage-dev/partage/pkg/plugin/claimstatus"
	"github.com/partage-dev/partage/pkg/plugin/events"
	"github.com/partage-dev/partage/pkg/plugin/internal/loop"
	"github.com/partage-dev/partage/pkg/plugin/lastseen"
	"github.com/partage-dev/partage/pkg/plugin/nodelabels"
	"github.com/partage-dev/partage/pkg/plugin/publish"
	"github.com/partage-dev/partage/pkg/plugin/publish/rules"
)

// Claims keeps the state of claims on this node. All methods may be called
// concurrently.
type Claims interface {
	ClaimPreparer
	ClaimReconciler
	ClaimSurveyor
	ClaimViewer
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

	// PollInterval is the time between two surveys of the GPUs, ReconcileInterval
	// that between two rounds of cleaning up.
	PollInterval, ReconcileInterval time.Duration

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
	// Events reports conditions of the GPUs. Optional.
	Events events.Teller
	// Health tells what is wrong with GPUs. Optional: what makes them fail to answer is
	// noticed without it.
	Health health.Hardware
	// Metrics are of what the plugin does. Optional.
	Metrics *metrics.Metrics
	// Runtime finds out whether containers without a claim can have GPUs. Optional.
	Runtime RuntimeCheck
	// ForeignClaims finds claims of another driver with this driver's name. Optional.
	ForeignClaims ForeignClaims
	// HealthListener serves the gRPC health protocol and is closed by Run.
	// Optional.
	HealthListener net.Listener
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
	answerTime  = 500 * time.Millisecond
	nodeTimeout = 10 * time.Second
)

// timing has the times that tests change.
type timing struct {
	// publishPace is that of the publisher, nil stands for its own.
	publishPace *rules.Pace
	// followUp is the time between a claim that failed and cleaning up.
	followUp time.Duration
	// node is how long the API server may take to say that the node exists.
	node time.Duration
	// answer is for how long nothing is closed after the last call, whose answer may not be
	// written yet.
	answer time.Duration
}

// Plugin is the running driver.
type Plugin struct {
	options   Options
	publisher *publish.Publisher
	board     *events.Board
	service   *draService
	gpus      *gpuLoop
	// reconciler and gpus share triggers with service.
	reconciler *reconciler
	readiness  *readiness
	startup    *startup
	neighbours *neighbourLoop
	kubelet    *kubelet
	foreign    *foreignClaims
	devices    *deviceStates
	// status is nil where the status of claims is not written.
	status  *claimstatus.Writer
	labels  *nodelabels.Writer
	ownNode *ownNode
	timing  timing
	// socketUID is part of the names of the sockets.
	socketUID types.UID
	// stop ends Run with an error.
	stop context.CancelCauseFunc
}

// New checks the options and does nothing yet.
func New(o Options) (*Plugin, error) {
	return newPlugin(o, timing{followUp: min(time.Second, o.ReconcileInterval), node: nodeTimeout, answer: answerTime})
}

func newPlugin(o Options, t timing) (*Plugin, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.Events == nil {
		o.Events = events.None{}
	}
	if o.Metrics == nil {
		o.Metrics = metrics.New(metrics.Options{}) // nobody asks for them
	}
	p := &Plugin{options: o, timing: t, readiness: newReadiness(), startup: newStartup()}
	p.board = events.NewBoard(o.Events)
	stop := func(err error) { p.stop(err) }
	failed, surveyNow, healthChanged := loop.NewTrigger(), loop.NewTrigger(), loop.NewTrigger()
	troubles := &troubles{}
	requested := &requestedDevices{driverName: o.DriverName, poolName: o.NodeName}
	p.publisher = publish.New(publish.Options{
		DriverName: o.DriverName, NodeName: o.NodeName, KubeClient: o.KubeClient, MetadataClient: o.MetadataClient,
		LockFile: filepath.Join(o.DataDir, "publish.lock"),
		Report:   func(ctx context.Context, reason string) { p.readiness.set(ctx, needSlices, reason) },
		Say: func(ctx context.Context, reason, message string) {
			var statements []events.Statement
			if message != "" {
				statements = []events.Statement{{Event: events.Event{Reason: reason, Text: message}}}
			}
			p.board.Say(ctx, reason, statements, nil)
		},
		Observe: func(slices int, err error) {
			if err != nil {
				o.Metrics.PublishFailed()
				return
			}
			o.Metrics.Published(slices)
		},
		Pace: t.publishPace,
	})
	p.devices = newDeviceStates(o.Claims, p.tellStates, o.PollInterval)
	if o.StatusClient != nil {
		p.status = claimstatus.New(claimstatus.Options{
			DriverName: o.DriverName, Client: o.StatusClient, Newest: p.publisher.Newest,
		})
	}
	p.foreign = newForeignClaims(o.ForeignClaims, o.ReconcileInterval, healthChanged)
	p.service = &draService{
		foreign: p.foreign, viewer: o.Claims,
		devices: p.devices, claims: o.Claims, startup: p.startup, readiness: p.readiness, requested: requested,
		troubles: troubles, failed: failed, stop: stop, metrics: o.Metrics,
	}
	p.reconciler = &reconciler{
		claims: o.Claims, interval: o.ReconcileInterval, followUp: t.followUp, failed: failed, surveyNow: surveyNow,
		metrics: o.Metrics,
	}
	p.labels = newLabels(&o)
	p.ownNode = newOwnNode(o.MetadataClient, o.NodeName, p.board, p.seeNode, healthChanged)
	p.kubelet = &kubelet{board: p.board, observe: o.Metrics.SetExtendedResources, changed: surveyNow}
	p.neighbours = &neighbourLoop{
		node: readNode(o.KubeClient, o.NodeName, t.node), otherDriver: p.options.otherDriver(), runtime: o.Runtime, board: p.board,
		observe: o.Metrics.SetNeighbour, interval: o.ReconcileInterval, unread: logchange.Problem{Patience: nodeUnread},
		seen: p.kubelet.look, restarted: loop.NewTrigger(),
	}
	p.gpus = &gpuLoop{
		interval: o.PollInterval, hardware: o.Hardware, claims: o.Claims, publish: p.publish, reconciler: p.reconciler,
		readiness: p.readiness, startup: p.startup, board: p.board,
		conditions: &conditionSpeaker{board: p.board, claims: o.Claims, isThere: func(address string) bool { return p.gpus.state.known.Has(address) }},
		health:     noHealth{}, foreign: p.foreign, ownNode: p.ownNode, troubles: troubles, tell: p.devices.set,
		surveyNow: surveyNow, failed: failed, healthChanged: healthChanged, stop: stop, metrics: o.Metrics,
		discoverer: newDiscoverer(o.Hardware, p.startup), report: gpuReport{board: p.board},
		lastSeen: lastseen.New(o.DataDir, o.BootID),
		desired: desired{
			policies: o.Policy, limited: o.Limited, kubelet: p.kubelet, stored: p.publisher, claims: o.Claims, requested: requested,
			readiness: p.readiness, board: p.board, grace: withdrawalGrace, now: time.Now,
		},
	}
	return p, nil
}

func (o *Options) validate() error {
	switch {
	case o.DriverName == "", o.NodeName == "", o.DataDir == "", o.RegistrarDir == "":
		return errors.New("a plugin needs a driver name, a node name, a data directory and a registrar directory")
	case o.BootID == "":
		return errors.New("a plugin needs to know the boot of the machine")
	case o.KubeClient == nil, o.MetadataClient == nil, o.Claims == nil, o.Hardware == nil:
		return errors.New("a plugin needs Kubernetes clients, claims and hardware")
	case o.Policy == nil:
		return errors.New("a plugin needs a sharing policy")
	case !filepath.IsAbs(o.CDIDir):
		return fmt.Errorf("the folder of CDI specs is %q: want an absolute path", o.CDIDir)
	case o.PollInterval <= 0, o.ReconcileInterval <= 0:
		return errors.New("a plugin needs to know how often to poll the GPUs and how often to clean up")
	}
	return nil
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
	var running sync.WaitGroup
	// The kubelet need not wait for the API server, which may be slow.
	running.Go(func() { p.followNode(ctx) })
	if monitor := p.newMonitor(); monitor != nil {
		p.gpus.health = monitor
		running.Go(func() { monitor.Run(loops) })
	}
	running.Go(func() { p.board.Run(loops) })
	running.Go(func() { p.foreign.run(loops) })
	running.Go(func() { p.ownNode.watch.Run(loops) })
	running.Go(func() { p.gpus.run(loops) })
	running.Go(func() { p.runReconciler(loops) })
	running.Go(func() { p.publisher.Run(loops) })
	running.Go(func() { p.devices.run(loops) })
	if p.status != nil {
		running.Go(func() { p.status.Run(loops) })
	}
	running.Go(func() { p.labels.Run(loops) })

	<-ctx.Done()
	p.shutDown(ctx, helper)
	endLoops()
	running.Wait()
	if parent.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// runReconciler cleans up again and again after the start, which cleans up itself.
func (p *Plugin) runReconciler(ctx context.Context) {
	<-p.startup.done
	p.reconciler.run(ctx)
}

func (p *Plugin) helperOptions() []kubeletplugin.Option {
	o := &p.options
	return append(o.metadataOptions(),
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
	)
}

func (p *Plugin) prepareDirectories(ctx context.Context) error {
	if err := os.MkdirAll(p.options.DataDir, 0o750); err != nil {
		return fmt.Errorf("make the plugin's data directory: %w", err)
	}
	if info, err := os.Stat(p.options.RegistrarDir); err != nil || !info.IsDir() {
		return fmt.Errorf("the kubelet's registration directory %s is not there; is the kubelet's root directory another one?", p.options.RegistrarDir)
	}
	p.options.removeEarlierSockets(ctx, p.socketUID)
	return nil
}

// shutDown lets calls in progress finish, because a half-prepared claim has to be
// undone by the next instance, then closes the sockets. After it returns no call
// touches the hardware any more, except one that hangs there, which it logs.
func (p *Plugin) shutDown(ctx context.Context, helper *kubeletplugin.Helper) {
	logger := klog.FromContext(ctx)
	logger.Info("Stopping", "reason", context.Cause(ctx))
	if !p.service.calls.waitIdle(drainTimeout, p.timing.answer) {
		logger.Info("Calls are still running, cancelling them", "waited", drainTimeout)
	}
	helper.Stop()
	if !p.service.calls.waitIdle(cancelTimeout, 0) {
		logger.Info("Calls did not end although they were cancelled", "waited", cancelTimeout)
	}
}
