// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/policy"
)

// gpus are the GPUs of a box, behind its lock.
type gpus struct {
	box       *box
	instances []*placed
	enabled   map[string]bool
	processes map[string][]gpu.Process
	// fabric is how far the registration of GPUs with it is; without a text it is done.
	fabric map[string]string
	// processesErr is what a driver says that does not list them.
	processesErr error
	nextID       int
	// foreign are the places where somebody else makes partitions.
	foreign []partition.Address
	// out are calls that have not returned, broken is what a GPU answers to
	// everything, each by PCI address.
	out map[string]*gpu.PendingError
	// onGPU is called before an effect on a GPU.
	onGPU  func(pciAddress, effect string) error
	broken map[string]error
}

// placed is an instance on its GPU.
type placed struct {
	pciAddress string
	gpu.Instance
}

func (p *placed) at() partition.Address {
	return partition.Address{PCIAddress: p.pciAddress, ProfileID: p.ProfileID, Placement: p.Placement}
}

func newGPUs(b *box) gpus {
	return gpus{box: b, nextID: 7, enabled: map[string]bool{}, processes: map[string][]gpu.Process{}, fabric: map[string]string{}, out: map[string]*gpu.PendingError{}, broken: map[string]error{}}
}

// reset is what a reboot does.
func (g *gpus) reset() {
	g.box.mu.Lock()
	g.instances = nil
	clear(g.enabled)
	clear(g.processes)
	if err := os.RemoveAll(g.box.capabilities("")); err != nil {
		g.box.t.Fatal(err)
	}
	again := g.foreign
	g.foreign = nil
	g.box.mu.Unlock()
	for _, at := range again {
		g.makeForeign(at)
	}
}

// makeForeign is somebody else making a partition. It is no effect.
func (g *gpus) makeForeign(at partition.Address) {
	g.box.t.Helper()
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.enabled[at.PCIAddress] = true
	g.foreign = append(g.foreign, at)
	if err := g.place(at); err != nil {
		g.box.t.Fatal(err)
	}
	g.complete(g.find(at))
}

// removeForeign is somebody else removing one.
func (g *gpus) removeForeign(at partition.Address) {
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.foreign = slices.DeleteFunc(g.foreign, func(a partition.Address) bool { return a == at })
	g.remove(at)
}

// change is somebody doing anything else to an instance.
func (g *gpus) change(at partition.Address, do func(*gpu.Instance)) {
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	do(&g.find(at).Instance)
}

// hang makes a call on a GPU that does not return before the result is called.
func (g *gpus) hang(pciAddress string) (call *gpu.PendingError, comeBack func()) {
	done := make(chan struct{})
	call = &gpu.PendingError{Call: "nvmlGpuInstanceDestroy", PCIAddress: pciAddress, Done: done}
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.out[pciAddress] = call
	return call, func() {
		g.box.mu.Lock()
		delete(g.out, pciAddress)
		g.box.mu.Unlock()
		close(done)
	}
}

// breakDown makes a GPU answer everything with an error, nil repairs it.
func (g *gpus) breakDown(pciAddress string, err error) {
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.broken[pciAddress] = err
}

func (g *gpus) run(pciAddress string, processes ...gpu.Process) {
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.processes[pciAddress] = processes
}

// answer is what a GPU says before anything else. The caller holds the lock.
func (g *gpus) answer(pciAddress string) error {
	switch {
	case g.box.dead:
		return errKilled
	case g.out[pciAddress] != nil:
		return fmt.Errorf("on the way: %w", g.out[pciAddress])
	case g.broken[pciAddress] != nil:
		return &gpu.Error{Call: "nvmlAnything", PCIAddress: pciAddress, Text: "no", Err: g.broken[pciAddress]}
	}
	return nil
}

// beforeEffect calls hook before each effect on a GPU from now on. Effects of
// rounds that outlive their Reconcile may be under way.
func (g *gpus) beforeEffect(hook func(pciAddress, effect string) error) {
	g.box.mu.Lock()
	defer g.box.mu.Unlock()
	g.onGPU = hook
}

// effect is one on a GPU.
func (g *gpus) effect(pciAddress, name string, do func() error) error {
	g.box.mu.Lock()
	hook := g.onGPU
	g.box.mu.Unlock()
	if hook != nil {
		if err := hook(pciAddress, name); err != nil {
			return err
		}
	}
	return g.box.effect(name, func() error {
		if err := g.answer(pciAddress); err != nil {
			return err
		}
		return do()
	})
}

// stateOf needs the lock.
func (g *gpus) stateOf(pciAddress string) gpu.MIGState {
	state := gpu.MIGState{Enabled: g.enabled[pciAddress]}
	for _, p := range g.instances {
		if p.pciAddress == pciAddress {
			i := p.Instance
			i.Compute = slices.Clone(i.Compute)
			state.Instances = append(state.Instances, i)
		}
	}
	return state
}

func (b *box) MIGState(_ context.Context, pciAddress string) (gpu.MIGState, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.answer(pciAddress); err != nil {
		return gpu.MIGState{}, err
	}
	if pciAddress == pciC {
		return gpu.MIGState{}, gpu.ErrNotSupported
	}
	return b.stateOf(pciAddress), nil
}

func (b *box) Processes(_ context.Context, pciAddress string) ([]gpu.Process, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.processesErr != nil {
		return nil, b.processesErr
	}
	return b.processes[pciAddress], b.answer(pciAddress)
}

// look is what is at an address now.
func (b *box) look(at partition.Address) (gpu.PartitionID, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return partition.Lookup(b.stateOf(at.PCIAddress), at)
}

// find needs the lock.
func (g *gpus) find(at partition.Address) *placed {
	for _, p := range g.instances {
		if p.at() == at {
			return p
		}
	}
	return nil
}

// SetMIGMode implements partition.ModeSwitch.
func (b *box) SetMIGMode(_ context.Context, pciAddress string, enabled bool) error {
	b.mu.Lock()
	err, same := b.answer(pciAddress), b.enabled[pciAddress] == enabled
	b.mu.Unlock()
	if err != nil || same {
		return err
	}
	name := "mode off"
	if enabled {
		name = "mode on"
	}
	return b.gpus.effect(pciAddress, name, func() error {
		if len(b.stateOf(pciAddress).Instances) > 0 {
			return gpu.ErrInUse
		}
		b.enabled[pciAddress] = enabled
		return nil
	})
}

// CreateInstance implements partition.Instances.
func (b *box) CreateInstance(_ context.Context, pciAddress string, profileID uint32, at gpu.Placement) (id int, err error) {
	err = b.gpus.effect(pciAddress, "create instance", func() error {
		switch {
		case !b.enabled[pciAddress]:
			return gpu.ErrNotSupported
		case len(b.stateOf(pciAddress).Instances) == 0 && len(b.processes[pciAddress]) > 0:
			// The mode changes under whoever has memory, and the first instance cannot be made.
			return gpu.ErrInUse
		}
		id = b.nextID
		return b.place(partition.Address{PCIAddress: pciAddress, ProfileID: profileID, Placement: at})
	})
	return id, err
}

// CreateComputeInstance implements partition.ComputeInstances.
func (b *box) CreateComputeInstance(_ context.Context, pciAddress string, instanceID int) (made gpu.ComputeInstance, err error) {
	err = b.gpus.effect(pciAddress, "create compute instance", func() error {
		p := b.withID(pciAddress, instanceID)
		switch {
		case p == nil:
			return gpu.ErrNotFound
		case len(p.Compute) > 0:
			return gpu.ErrNoRoom
		}
		b.complete(p)
		made = p.Compute[0]
		return nil
	})
	return made, err
}

// withID needs the lock.
func (g *gpus) withID(pciAddress string, id int) *placed {
	for _, p := range g.instances {
		if p.pciAddress == pciAddress && p.ID == id {
			return p
		}
	}
	return nil
}

// place and complete need the lock.
func (g *gpus) place(at partition.Address) error {
	for _, other := range g.instances {
		if other.pciAddress == at.PCIAddress && other.Placement.Overlaps(at.Placement) {
			return gpu.ErrNoRoom
		}
	}
	g.instances = append(g.instances, &placed{at.PCIAddress, gpu.Instance{ID: g.nextID, ProfileID: at.ProfileID, Placement: at.Placement}})
	g.nextID++
	return nil
}

// migUUID follows from the place, as that of NVIDIA's driver does: whoever makes a partition there gets the same.
func migUUID(pciAddress string, at gpu.Placement) string {
	return fmt.Sprintf("MIG-%s-%d-%d", pciAddress, at.Start, at.Size)
}

func (g *gpus) complete(p *placed) {
	p.Compute = []gpu.ComputeInstance{{UUID: migUUID(p.pciAddress, p.Placement)}}
	g.nextID++
	g.box.put(capability(p, "access"), "DeviceFileMinor: "+strconv.Itoa(100+10*p.ID)+"\n")
	g.box.put(capability(p, "ci0/access"), "DeviceFileMinor: "+strconv.Itoa(101+10*p.ID)+"\n")
}

func capability(p *placed, file string) string {
	minor := slices.IndexFunc([]string{pciB, pciC, pciA}, func(pci string) bool { return pci == p.pciAddress })
	return fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi%d/%s", minor, p.ID, file)
}

// DestroyComputeInstance implements partition.ComputeInstances.
func (b *box) DestroyComputeInstance(_ context.Context, pciAddress string, instanceID, computeID int) error {
	return b.gpus.effect(pciAddress, "destroy compute instance", func() error {
		p := b.withID(pciAddress, instanceID)
		if p == nil || !slices.ContainsFunc(p.Compute, func(c gpu.ComputeInstance) bool { return c.ID == computeID }) {
			return gpu.ErrNotFound
		}
		if b.runs(p) || b.serves(p.Compute) {
			return gpu.ErrInUse
		}
		p.Compute = slices.DeleteFunc(p.Compute, func(c gpu.ComputeInstance) bool {
			if c.ID != computeID {
				return false
			}
			// The mode of a MIG device goes with it.
			delete(b.exclusive, c.UUID)
			return true
		})
		return nil
	})
}

// DestroyInstance implements partition.Instances.
func (b *box) DestroyInstance(_ context.Context, pciAddress string, instanceID int) error {
	return b.gpus.effect(pciAddress, "destroy instance", func() error {
		p := b.withID(pciAddress, instanceID)
		switch {
		case p == nil:
			return gpu.ErrNotFound
		case len(p.Compute) > 0 || b.runs(p):
			return gpu.ErrInUse
		}
		b.remove(p.at())
		return nil
	})
}

// runs reports whether there are processes on an instance. It needs the lock.
func (g *gpus) runs(p *placed) bool {
	return slices.ContainsFunc(g.processes[p.pciAddress], func(process gpu.Process) bool { return process.InstanceID == p.ID })
}

// remove needs the lock.
func (g *gpus) remove(at partition.Address) {
	g.instances = slices.DeleteFunc(g.instances, func(p *placed) bool {
		if p.at() != at {
			return false
		}
		for _, compute := range p.Compute {
			// The mode of a MIG device goes with it.
			delete(g.box.exclusive, compute.UUID)
		}
		if err := os.RemoveAll(filepath.Join(g.box.root, filepath.Dir(capability(p, "access")))); err != nil {
			g.box.t.Fatal(err)
		}
		return true
	})
}

func (b *box) count(pciAddress string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.stateOf(pciAddress).Instances)
}

// hardware is what is on the GPUs.
func (b *box) hardware() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []string
	for _, p := range b.instances {
		all = append(all, fmt.Sprintf("instance %s complete=%v", p.at(), len(p.Compute) > 0))
	}
	for pciAddress, on := range b.enabled {
		if on {
			all = append(all, "MIG mode of "+pciAddress)
		}
	}
	all = append(all, b.list()...)
	slices.Sort(all)
	return all
}

// shares is what is done to share the devices of a box, behind its lock.
type shares struct {
	sessions map[string]*runningSession
	// exclusive are the compute modes and intervals the time slices, by UUID.
	exclusive map[string]bool
	intervals map[string]sharing.Interval
	// absent: there is no supervisor. mute: it takes calls and does not answer.
	absent, mute bool
	// onSessions runs before each answer, with the lock.
	onSessions func()
}

// runningSession is one that the supervisor runs.
type runningSession struct {
	mps.Spec
	phase   mps.Phase
	losses  int
	kills   int
	starts  int
	clients []int
}

func (s *runningSession) status() mps.Status {
	return mps.Status{
		Spec: s.Spec, PipeDir: pipeOf(s.ID), ShmDir: shmOf(s.ID), Phase: s.phase, Servers: []int{4242}, Clients: s.clients,
		History: mps.History{Losses: s.losses, LastLoss: "the daemon ended", Kills: s.kills, LastKill: "one was killed"},
	}
}

func pipeOf(session string) string { return "/mps/" + session + "/pipe" }

func shmOf(session string) string { return "/mps/" + session + "/shm" }

func newShares() shares {
	return shares{sessions: map[string]*runningSession{}, exclusive: map[string]bool{}, intervals: map[string]sharing.Interval{}}
}

// Ensure makes a session run, or changes its limits. GPUs have to be in mode EXCLUSIVE_PROCESS before.
func (b *box) Ensure(ctx context.Context, s mps.Spec, devices []sharing.Device) (mps.Status, error) {
	if err := b.hear(ctx); err != nil {
		return mps.Status{}, err
	}
	b.mu.Lock()
	err := b.startable(s, devices)
	b.mu.Unlock()
	if err == nil {
		err = b.start(s)
	}
	if err != nil {
		return mps.Status{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sessions[s.ID].status(), nil
}

// startable needs the lock.
func (b *box) startable(s mps.Spec, devices []sharing.Device) error {
	if b.absent {
		return sharing.ErrNoSupervisor
	}
	for _, d := range devices {
		if err := b.answer(d.PCIAddress); err != nil {
			return err
		}
		if d.UUID == "" {
			return errors.New("a device without UUID")
		}
		if !b.exclusive[d.UUID] && !strings.HasPrefix(d.UUID, "MIG-") {
			return errors.New("the compute mode is not EXCLUSIVE_PROCESS")
		}
	}
	was := b.sessions[s.ID]
	if was != nil && (!slices.Equal(was.Devices, s.Devices) || was.MultiUser != s.MultiUser) {
		return fmt.Errorf("it runs with %v: %w", was.Devices, mps.ErrDiffers)
	}
	return nil
}

func (b *box) start(s mps.Spec) error {
	b.mu.Lock()
	was := b.sessions[s.ID]
	if was != nil {
		was.OnClientKilled = s.OnClientKilled
	}
	b.mu.Unlock()
	if was == nil {
		return b.effect("start session", func() error {
			b.sessions[s.ID] = &runningSession{Spec: s, phase: mps.Running, starts: 1}
			return nil
		})
	}
	if was.ClientPriority == s.ClientPriority && was.ThreadPercentage == s.ThreadPercentage && maps.Equal(was.Memory, s.Memory) {
		return nil
	}
	return b.effect("set limits", func() error { was.Spec = s; return nil })
}

// End ends a session.
func (b *box) End(ctx context.Context, id string) error {
	if err := b.hear(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	absent, dead := b.absent, b.dead
	was := b.sessions[id]
	b.mu.Unlock()
	switch {
	case dead:
		return errKilled
	case absent:
		return sharing.ErrNoSupervisor
	case was == nil:
		return nil
	}
	return b.effect("stop session", func() error { delete(b.sessions, id); return nil })
}

// Mode implements converge.Sharing.
func (b *box) Mode(_ context.Context, d sharing.Device) (gpu.ComputeMode, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.answer(d.PCIAddress); err != nil {
		return "", err
	}
	if b.exclusive[d.UUID] {
		return gpu.ComputeExclusiveProcess, nil
	}
	return gpu.ComputeDefault, nil
}

// SetExclusive implements converge.Sharing.
func (b *box) SetExclusive(_ context.Context, d sharing.Device, exclusive bool) error {
	b.mu.Lock()
	err := b.answer(d.PCIAddress)
	b.mu.Unlock()
	if err != nil {
		return err
	}
	name := "default mode"
	if exclusive {
		name = "exclusive mode"
	}
	return b.effect(name, func() error { b.exclusive[d.UUID] = exclusive; return nil })
}

// hear waits for as long as the caller does for a supervisor that does not answer.
func (b *box) hear(ctx context.Context) error {
	b.mu.Lock()
	mute := b.mute
	b.mu.Unlock()
	if !mute {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (b *box) Sessions(ctx context.Context) (map[string]mps.Status, error) {
	if err := b.hear(ctx); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.onSessions != nil {
		b.onSessions()
	}
	if b.absent {
		return nil, sharing.ErrNoSupervisor
	}
	found := map[string]mps.Status{}
	for id, s := range b.sessions {
		found[id] = s.status()
	}
	return found, nil
}

func (b *box) SetInterval(_ context.Context, d sharing.Device, interval sharing.Interval) error {
	b.mu.Lock()
	err := b.answer(d.PCIAddress)
	same := b.intervals[d.UUID] == interval || interval == policy.IntervalDefault && b.intervals[d.UUID] == ""
	b.mu.Unlock()
	if err != nil || same {
		return err
	}
	if d.UUID == "" {
		return fmt.Errorf("no UUID: %w", gpu.ErrInvalid)
	}
	return b.effect("interval "+string(interval), func() error {
		b.intervals[d.UUID] = interval
		if interval == policy.IntervalDefault {
			delete(b.intervals, d.UUID)
		}
		return nil
	})
}

// serves tells whether a server holds a partition. It needs the lock.
func (s *shares) serves(compute []gpu.ComputeInstance) bool {
	for _, session := range s.sessions {
		if slices.ContainsFunc(compute, func(c gpu.ComputeInstance) bool { return slices.Contains(session.Devices, c.UUID) }) {
			return true
		}
	}
	return false
}

// running finds a session, or nil.
func (b *box) running(id string) *runningSession {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.sessions[id]
}

// lose makes the clients of a session lose their server.
func (b *box) lose(id string, phase mps.Phase) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sessions[id].losses++
	b.sessions[id].phase = phase
}

func (b *box) away(absent bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.absent = absent
}

// list is what is there for people to compare. It needs the lock. Of a session the
// number of starts counts: its clients must not notice others.
func (s *shares) list() []string {
	var all []string
	for id, session := range s.sessions {
		all = append(all, fmt.Sprintf("session %s %v %d%% %v, start %d", id, session.Devices, session.ThreadPercentage, session.Memory, session.starts))
	}
	for uuid, exclusive := range s.exclusive {
		if exclusive {
			all = append(all, "exclusive mode of "+uuid)
		}
	}
	for uuid, interval := range s.intervals {
		all = append(all, fmt.Sprintf("interval %s of %s", interval, uuid))
	}
	return all
}

// silence keeps the supervisor from answering, or lets it.
func (b *box) silence(mute bool) { b.locked(func() { b.mute = mute }) }
