// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/partage-dev/partage/pkg/device"
)

// publisher is the part of kubeletplugin.Helper that publishing needs.
type publisher interface {
	PublishResources(ctx context.Context, resources resourceslice.DriverResources) error
}

// featurePartitionable is the gate without which the API server drops shared
// counters; on by default since Kubernetes 1.36.
const featurePartitionable = "DRAPartitionableDevices"

// publish keeps the ResourceSlices of this node in the API server until ctx
// ends. The slice controller does the work; this decides what it is given and
// when it looks again.
func (p *Plugin) publish(ctx context.Context, helper publisher, inventory *device.Inventory) {
	if !p.probeCounters(ctx) {
		return
	}
	var again repeat
	state := publication{delay: p.confirmDelay()}
	for ctx.Err() == nil {
		resources := inventory.DriverResources(device.Options{
			Driver:               p.DriverName,
			Pool:                 p.NodeName,
			NodeName:             p.NodeName,
			PartitionableDevices: !p.noCounters.Load(),
		})
		if err := helper.PublishResources(ctx, resources); err != nil && ctx.Err() == nil {
			p.fatal(fmt.Errorf("publish ResourceSlices: %w", err))
			return
		}
		next := again.wait
		if !p.confirm(ctx, resources, &state) {
			next = state.wait
		}
		select {
		case <-ctx.Done():
		case <-p.republish:
		case <-p.registered:
			again.restart()
		case <-next():
		}
	}
}

// publication is what publish knows about what the API server holds.
type publication struct {
	attempts int
	delay    wait.Backoff
	// told is the last success that was logged.
	told string
}

func (s *publication) wait() <-chan time.Time {
	return time.After(s.delay.Step())
}

// confirmDelay is shorter than that of other retries: the first attempt comes
// right after the slice controller was told and nearly always too early.
func (p *Plugin) confirmDelay() wait.Backoff {
	delay := p.retry
	delay.Duration /= 5
	return delay
}

// repeat is a short series of delays. A kubelet that starts deletes all slices of
// its node and then registers the plugin. The slice controller puts them back
// 30 s after it sees a deletion, or at once when it is asked to publish; when the
// deletions become visible is not known, hence several times.
type repeat struct{ backoff wait.Backoff }

func (r *repeat) restart() {
	r.backoff = wait.Backoff{Duration: time.Second, Factor: 3, Steps: 3}
}

func (r *repeat) wait() <-chan time.Time {
	if r.backoff.Steps == 0 {
		return nil
	}
	return time.After(r.backoff.Step())
}

// onRegistration sees the kubelet tell the outcome of the registration.
func (p *Plugin) onRegistration(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if outcome, ok := req.(*registerapi.RegistrationStatus); ok {
		if outcome.PluginRegistered {
			klog.FromContext(ctx).Info("Registered with the kubelet")
			signal(p.registered)
		} else {
			klog.FromContext(ctx).Error(errors.New(outcome.Error), "The kubelet refused the registration")
		}
	}
	return handler(ctx, req)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// attemptsBeforeTelling is for how many attempts it is normal that the API
// server does not hold everything yet.
const attemptsBeforeTelling = 4

// confirm tells whether the API server holds what was published, since
// publishing itself reports nothing.
func (p *Plugin) confirm(ctx context.Context, resources resourceslice.DriverResources, state *publication) bool {
	want := 0
	for _, slice := range resources.Pools[p.NodeName].Slices {
		want += len(slice.Devices)
	}
	stored, err := p.storedSlices(ctx)
	if err == nil {
		err = complete(stored, want)
	}
	if err != nil {
		state.attempts++
		if state.attempts >= attemptsBeforeTelling && ctx.Err() == nil {
			p.ready.setSlices(ctx, fmt.Sprintf("the ResourceSlices are not in the API server yet: %v", err))
		}
		return false
	}
	state.attempts, state.delay = 0, p.confirmDelay()
	if told := fmt.Sprint(len(stored), want); told != state.told {
		state.told = told
		klog.FromContext(ctx).Info("Published", "resourceSlices", len(stored), "devices", want)
	}
	p.ready.setSlices(ctx, "")
	return true
}

// storedSlices returns the newest generation of this node's pool.
func (p *Plugin) storedSlices(ctx context.Context) ([]resourceapi.ResourceSlice, error) {
	list, err := p.slices.ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   p.DriverName,
		resourceapi.ResourceSliceSelectorNodeName: p.NodeName,
	}.String()})
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	newest := int64(-1)
	var stored []resourceapi.ResourceSlice
	for _, slice := range list.Items {
		switch pool := slice.Spec.Pool; {
		case pool.Name != p.NodeName || pool.Generation < newest:
		case pool.Generation > newest:
			newest, stored = pool.Generation, []resourceapi.ResourceSlice{slice}
		default:
			stored = append(stored, slice)
		}
	}
	return stored, nil
}

func complete(stored []resourceapi.ResourceSlice, devices int) error {
	if len(stored) == 0 {
		return errors.New("there is none")
	}
	if want := stored[0].Spec.Pool.ResourceSliceCount; int64(len(stored)) != want {
		return fmt.Errorf("%d of %d are there", len(stored), want)
	}
	have := 0
	for _, slice := range stored {
		have += len(slice.Spec.Devices)
	}
	if have != devices {
		return fmt.Errorf("they hold %d devices instead of %d", have, devices)
	}
	return nil
}

// HandleError is called by the helper for what goes wrong in the background.
// What the helper retries is logged; anything else, such as a gRPC server that
// died, ends the driver.
func (p *Plugin) HandleError(ctx context.Context, err error, msg string) {
	logger := klog.FromContext(ctx)
	var dropped *resourceslice.DroppedFieldsError
	switch {
	case errors.As(err, &dropped):
		p.handleDropped(ctx, dropped)
	case errors.Is(err, kubeletplugin.ErrRecoverable):
		if ctx.Err() == nil {
			logger.Error(err, "Will be retried", "while", msg)
		}
	default:
		logger.Error(err, "Cannot go on", "while", msg)
		p.fatal(fmt.Errorf("%s: %w", msg, err))
	}
}

// handleDropped tells once per set of features. Slices that lost their counters
// would let a whole GPU and its partitions be allocated at the same time, so they
// are replaced at once by slices that need none.
func (p *Plugin) handleDropped(ctx context.Context, dropped *resourceslice.DroppedFieldsError) {
	features := dropped.DisabledFeatures()
	if _, told := p.droppedOnce.LoadOrStore(strings.Join(features, ","), true); !told {
		klog.FromContext(ctx).Info("The API server dropped fields of the published ResourceSlices because feature gates are off",
			"featureGates", features, "pool", dropped.PoolName)
	}
	if slices.Contains(features, featurePartitionable) && p.noCounters.CompareAndSwap(false, true) {
		p.logNoCounters(ctx, "the API server dropped the shared counters")
		signal(p.republish)
	}
}
