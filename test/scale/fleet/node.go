// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin"
	"github.com/partage-dev/partage/pkg/driver/plugin/events"
	"github.com/partage-dev/partage/pkg/driver/unclaimed"
	"github.com/partage-dev/partage/pkg/gpu"
)

const driverName = "gpu.nvidia.com"

// What the plugin's flags and the chart have by default.
const (
	pollInterval = 10 * time.Second
	qps          = 50
	burst        = 100
)

// NVIDIADriver is the one of all nodes, which somebody may be upgrading. It is nil at such a time.
type NVIDIADriver struct {
	version atomic.Pointer[string]
	storm   atomic.Bool
}

// SetStorm lets all GPUs reach their thermal limit, or cool down.
func (d *NVIDIADriver) SetStorm(on bool) { d.storm.Store(on) }

// Load loads a version.
func (d *NVIDIADriver) Load(version string) { d.version.Store(&version) }

// Unload unloads it.
func (d *NVIDIADriver) Unload() { d.version.Store(nil) }

// Node runs the plugin of a node.
type Node struct {
	Name string
	// Facts are what the hardware would say.
	Facts  *gpu.Node
	Driver *NVIDIADriver
	// Dir is for the plugin's files. The path must be short: sockets are in it.
	Dir string
	// Config is for the API server. The node gets a connection of its own.
	Config *rest.Config
	// PolicyFile has the sharing policy, and Spread is over how long nodes spread its changes.
	PolicyFile string
	Spread     time.Duration

	stop  context.CancelFunc
	ended chan error
}

// factsOf are those of a machine, with UUIDs and a host's name that only this node has.
func factsOf(machine *gpu.Node, index int) *gpu.Node {
	own := *machine
	own.GPUs = nil
	for i, g := range machine.GPUs {
		g.UUID = fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", index, i)
		own.GPUs = append(own.GPUs, g)
	}
	return &own
}

// Start starts the plugin.
func (n *Node) Start(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	p, err := n.plugin(ctx)
	if err != nil {
		stop()
		return fmt.Errorf("start the plugin of node %s: %w", n.Name, err)
	}
	ended := make(chan error, 1)
	n.stop, n.ended = stop, ended
	go func() { ended <- p.Run(ctx) }()
	return nil
}

// Stop stops the plugin, if it was started, and returns when it has ended.
func (n *Node) Stop() error {
	if n.stop == nil {
		return nil
	}
	n.stop()
	n.stop = nil
	if err := <-n.ended; err != nil {
		return fmt.Errorf("the plugin of node %s: %w", n.Name, err)
	}
	return nil
}

// plugin makes the plugin as its program does, without what asks the machine.
func (n *Node) plugin(ctx context.Context) (*plugin.Plugin, error) {
	registrar := filepath.Join(n.Dir, "r")
	if err := os.MkdirAll(registrar, 0o750); err != nil {
		return nil, err
	}
	c, err := newClients(n.Config)
	if err != nil {
		return nil, err
	}
	hardware := &machine{facts: n.Facts, driver: n.Driver}
	return plugin.New(plugin.Options{
		DriverName: driverName, NodeName: n.Name,
		KubeClient: c.main, MetadataClient: c.metadata, StatusClient: c.status,
		Events: events.New(ctx, driverName, n.Name, c.events, c.background).Tell,
		Claims: noClaims{hardware}, Hardware: hardware, Health: hardware,
		DataDir: n.Dir, RegistrarDir: registrar, CDIDir: filepath.Join(n.Dir, "cdi"), BootID: "boot",
		PollInterval: pollInterval, Metrics: metrics.New(metrics.Options{}),
		Policy:        plugin.NewPolicyFile(n.PolicyFile, n.Spread),
		Runtime:       func([]string) (unclaimed.Access, error) { return unclaimed.Access{}, nil },
		ForeignClaims: func(context.Context) ([]unclaimed.Claim, error) { return nil, nil },
	}), nil
}

// clients are those of a plugin. They share a connection.
type clients struct {
	main, background, events, status kubernetes.Interface
	metadata                         metadata.Interface
}

func newClients(base *rest.Config) (*clients, error) {
	config := rest.CopyConfig(base)
	config.QPS, config.Burst = qps, burst
	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	shared, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	c := &clients{}
	for client, config := range map[*kubernetes.Interface]*rest.Config{
		&c.main: config, &c.background: plugin.BackgroundConfig(config), &c.events: plugin.BackgroundConfig(config), &c.status: plugin.StatusConfig(config),
	} {
		if *client, err = kubernetes.NewForConfigAndClient(config, shared); err != nil {
			return nil, err
		}
	}
	c.metadata, err = metadata.NewForConfigAndClient(config, shared)
	return c, err
}

// machine is what a plugin finds.
type machine struct {
	facts  *gpu.Node
	driver *NVIDIADriver
}

func (m *machine) Open(context.Context) error {
	if m.driver.version.Load() == nil {
		return fmt.Errorf("load NVML: %w", gpu.ErrDriverNotLoaded)
	}
	return nil
}

func (m *machine) Discover(ctx context.Context) (*gpu.Node, error) {
	if err := m.Open(ctx); err != nil {
		return nil, err
	}
	found := *m.facts
	if version := m.driver.version.Load(); version != nil {
		found.DriverVersion = *version
	}
	return &found, nil
}

func (m *machine) Removed(string) bool { return false }

func (m *machine) Events(ctx context.Context) <-chan gpu.Event {
	none := make(chan gpu.Event)
	context.AfterFunc(ctx, func() { close(none) })
	return none
}

func (m *machine) Unmonitored(string) error { return nil }

// hotFor and coolFor are how long a GPU at its thermal limit lowers its clocks and does not, in turns.
const hotFor, coolFor = 70 * time.Second, 70 * time.Second

func (m *machine) Health(ctx context.Context, _ string) (h gpu.Health, err error) {
	if m.driver.storm.Load() && time.Now().UnixNano()%int64(hotFor+coolFor) < int64(hotFor) {
		h.Throttling = []gpu.Throttling{gpu.ThrottlingHardwareThermal}
	}
	return h, m.Open(ctx)
}

func (m *machine) MIGState(ctx context.Context, _ string) (gpu.MIGState, error) {
	return gpu.MIGState{}, m.Open(ctx)
}

func (m *machine) FabricPending(ctx context.Context, _ string) (string, error) {
	return "", m.Open(ctx)
}

// noClaims says that there are none. While there is no driver, no GPU answers.
type noClaims struct{ machine *machine }

func (c noClaims) Reconcile(ctx context.Context) (status device.Status, left error) {
	err := c.machine.Open(ctx)
	if err == nil {
		return status, nil
	}
	for i := range c.machine.facts.GPUs {
		status.Conditions = append(status.Conditions,
			device.Condition{PCIAddress: c.machine.facts.GPUs[i].PCIAddress, Reason: device.Unresponsive, Message: err.Error()})
	}
	return status, nil
}

func (noClaims) SetInventory(*device.Inventory)             {}
func (noClaims) Statements() []claim.Statement              { return nil }
func (noClaims) Unobserved() []string                       { return nil }
func (noClaims) InUse() ([]string, error)                   { return nil, nil }
func (noClaims) ReleaseOrphans(ctx context.Context)         { <-ctx.Done() }
func (noClaims) Live() ([]claim.LiveClaim, error)           { return nil, nil }
func (noClaims) Changed() <-chan struct{}                   { return nil }
func (noClaims) Unprepare(context.Context, types.UID) error { return nil }
func (noClaims) Prepare(context.Context, *resourceapi.ResourceClaim) ([]claim.LiveDevice, error) {
	return nil, errors.New("the GPUs of this node are not real")
}
