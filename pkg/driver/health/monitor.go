// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/logchange"
	"github.com/partage-dev/partage/pkg/util/panics"
)

// Hardware reads the health of GPUs. A GPU that hangs delays no call on another. All methods return when a call into the NVIDIA driver hangs,
// with an error that wraps gpu.ErrHung. A GPU that answers each call is slow, however long they take together, which is no fault.
type Hardware interface {
	// Events returns what the driver reports, until ctx ends; then it closes the channel.
	Events(ctx context.Context) <-chan gpu.Event
	// Unmonitored returns why the events of a GPU are not received, or nil.
	Unmonitored(pciAddress string) error
	// Health reads the health of a GPU. With an error parts of it may be missing.
	Health(ctx context.Context, pciAddress string) (gpu.Health, error)
	// MIGState reads which partitions a GPU has.
	MIGState(ctx context.Context, pciAddress string) (gpu.MIGState, error)
	// FabricPending reads the value that Health has, but in any MIG mode.
	FabricPending(ctx context.Context, pciAddress string) (string, error)
}

// ProgramError is an error of a program on a GPU. The GPU is in order.
type ProgramError struct {
	PCIAddress string
	// Place is the partition on which the program runs, or nil if it is on all of the GPU.
	Place *gpu.Placement
	// Text says what it was, and what to do about it.
	Text string
}

// Hold says that a fault is over, and that the GPU is held back all the same, because it has had
// the fault before.
type Hold struct {
	PCIAddress string
	Reason     device.Reason
	// Earlier is how often it has happened before, and Until when the GPU is offered again, unless it
	// happens once more.
	Earlier int
	Until   time.Time
}

// Options are all mandatory.
type Options struct {
	Hardware Hardware
	// DataDir is where the history is kept, BootID that of this boot of the machine.
	DataDir, BootID string
	// Interval is the time between two readings of a GPU.
	Interval time.Duration
	// Changed is called when the conditions may have changed.
	Changed func()
	// Report is called for errors of programs, at most once in reportEvery for the same.
	Report func(ctx context.Context, e ProgramError)
	// HeldBack is called when a GPU works again and is not offered yet.
	HeldBack func(ctx context.Context, h Hold)
	// ObserveEvent is called for every event of a GPU in order.
	ObserveEvent func(e gpu.Event)
	// ObserveHealth is called for every reading of a GPU. With an error parts of it may be
	// missing.
	ObserveHealth func(pciAddress string, h gpu.Health, err error)
}

const (
	// placeLimit is how long place may take to read the partitions. If it takes longer, the partition
	// of the event is not known.
	placeLimit = 5 * time.Second
	// readPause is how long a GPU is left alone after a reading: programs may cause as many
	// events as they like.
	readPause = time.Second
	// queueLength is how many different events of a GPU may wait.
	queueLength = 256
	// reportEvery is how often the same error of programs is reported.
	reportEvery = 5 * time.Minute
)

// Monitor follows the GPUs of a node. All methods may be called concurrently.
type Monitor struct {
	o       Options
	history historyFile

	mu       sync.Mutex
	judge    *judge
	reaction policy.Health
	watches  map[string]*watch
	run      func(*watch)
	reported map[string]time.Time
	// passedOn are the conditions for which Changed was called.
	passedOn []device.Condition

	// saving orders writes of the history.
	saving         sync.Mutex
	historyProblem logchange.Problem
	panics         panics.Repeated
}

// watch is the monitoring of one GPU.
type watch struct {
	pci string
	// stop is nil before Run.
	stop context.CancelFunc
	// events is the queue, with one event of each kind, without its times. waiting has the last event
	// of each kind that is in the queue.
	events  chan gpu.Event
	waiting map[gpu.Event]gpu.Event
	// readNow asks for a reading.
	readNow chan struct{}
}

// New reads the history. Nothing is followed before Run and Follow are called.
func New(o Options) *Monitor {
	m := &Monitor{
		o: o, history: historyFile{path: filepath.Join(o.DataDir, FileName), bootID: o.BootID},
		judge: newJudge(), reaction: policy.Builtin().Health, watches: map[string]*watch{}, reported: map[string]time.Time{},
	}
	gpus, err := m.history.read(time.Now())
	if err != nil {
		klog.Background().Error(err, "What was wrong with GPUs before is not known")
	}
	m.judge.gpus = gpus
	return m
}

// Run follows the GPUs until ctx ends.
func (m *Monitor) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	m.mu.Lock()
	m.run = func(w *watch) {
		ctx, stop := context.WithCancel(ctx)
		w.stop = stop
		running.Go(func() { m.readAgainAndAgain(ctx, w) })
		running.Go(func() { m.handleEvents(ctx, w) })
	}
	for _, w := range m.watches {
		m.run(w)
	}
	m.mu.Unlock()
	for e := range m.o.Hardware.Events(ctx) {
		m.receive(ctx, e)
	}
	<-ctx.Done()
	m.mu.Lock()
	m.run = nil
	m.mu.Unlock()
}

// Follow sets the GPUs to monitor, UUIDs by PCI address, and the policy for their faults.
func (m *Monitor) Follow(uuids map[string]string, reaction policy.Health) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reaction = reaction
	for pci, uuid := range uuids {
		m.judge.follow(pci, uuid)
		if m.watches[pci] != nil {
			continue
		}
		w := &watch{pci: pci, events: make(chan gpu.Event, queueLength), waiting: map[gpu.Event]gpu.Event{}, readNow: make(chan struct{}, 1)}
		m.watches[pci] = w
		if m.run != nil {
			m.run(w)
		}
	}
	for pci, w := range m.watches {
		if _, still := uuids[pci]; !still {
			if w.stop != nil {
				w.stop()
			}
			delete(m.watches, pci)
		}
	}
	m.passedOn = m.judge.conditions(&m.reaction) // the caller asks for them
}

// Conditions returns what is wrong with the GPUs that are followed.
func (m *Monitor) Conditions() []device.Condition {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.DeleteFunc(m.judge.conditions(&m.reaction), func(c device.Condition) bool { return m.watches[c.PCIAddress] == nil })
}

// change lets the judge work, saves the histories, and calls Changed if the conditions are
// others.
func (m *Monitor) change(ctx context.Context, do func(j *judge)) {
	m.mu.Lock()
	do(m.judge)
	now := m.judge.conditions(&m.reaction)
	changed, touched, held := !slices.EqualFunc(m.passedOn, now, same), m.judge.touched, m.judge.held
	m.passedOn, m.judge.held = now, nil
	m.mu.Unlock()
	if changed || touched {
		m.save(ctx)
	}
	if changed {
		m.o.Changed()
	}
	for _, h := range held {
		m.o.HeldBack(ctx, h)
	}
}

// same compares conditions, of which the text may say something else each time. That of an XID has the driver's verdict.
func same(a, b device.Condition) bool {
	if a.Reason != device.XID {
		a.Message = b.Message
	}
	return reflect.DeepEqual(a, b)
}

// save writes the histories as they are now. Several goroutines ask for it, so they are not those of the
// moment when it was asked for.
func (m *Monitor) save(ctx context.Context) {
	m.saving.Lock()
	defer m.saving.Unlock()
	m.mu.Lock()
	data, err := m.history.encode(m.judge.gpus)
	m.judge.touched = false
	m.mu.Unlock()
	written := false
	if err == nil {
		written, err = m.history.write(data)
	}
	if !written {
		m.mu.Lock()
		m.judge.touched = true // the next reading tries again
		m.mu.Unlock()
	}
	m.historyProblem.Log(ctx, err, "After a restart it will not be known what is wrong with GPUs", "It is written down again what is wrong with GPUs")
}

// readAgainAndAgain reads one GPU until ctx ends.
func (m *Monitor) readAgainAndAgain(ctx context.Context, w *watch) {
	ticker := time.NewTicker(m.o.Interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		m.readSafely(ctx, w)
		select {
		case <-ctx.Done():
		case <-time.After(min(readPause, m.o.Interval)):
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		case <-w.readNow:
		}
	}
}

func (m *Monitor) readSafely(ctx context.Context, w *watch) {
	var err error
	defer m.panics.Recover(ctx, &err)
	now := reading{Began: time.Now()}
	now.Health, now.Err = m.o.Hardware.Health(ctx, w.pci)
	now.Unmonitored = m.o.Hardware.Unmonitored(w.pci)
	instances, known := m.readPartitions(ctx, w.pci, &now)
	if ctx.Err() != nil {
		// The reading may have failed only because ctx has ended.
		return
	}
	now.Ended = time.Now()
	m.o.ObserveHealth(w.pci, now.Health, now.Err)
	m.change(ctx, func(j *judge) {
		j.read(w.pci, now)
		if known {
			j.dropGonePartitions(w.pci, instances, now.Began)
		}
		j.settle(w.pci, m.reaction.QuietPeriod, now.Ended)
	})
}

// readPartitions reads which partitions a GPU has, if one of them has a fault or the state of the fabric is needed, which
// Health does not have in MIG mode. With partitions the NVIDIA driver does not register the GPU, so that the state means nothing.
func (m *Monitor) readPartitions(ctx context.Context, pciAddress string, now *reading) (instances []gpu.Instance, known bool) {
	m.mu.Lock()
	faults, fabric := m.judge.hasPartitionFaults(pciAddress), now.Err == nil && m.judge.watchesFabric(pciAddress)
	m.mu.Unlock()
	if !faults && !fabric {
		return nil, false
	}
	state, err := m.o.Hardware.MIGState(ctx, pciAddress)
	if fabric {
		asked := err
		if err == nil && state.Enabled && len(state.Instances) == 0 {
			now.Health.FabricPending, asked = m.o.Hardware.FabricPending(ctx, pciAddress)
		}
		now.FabricNotAsked = asked != nil || len(state.Instances) > 0
	}
	return state.Instances, err == nil
}
