// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/driver/partition"
	"github.com/partage-dev/partage/pkg/driver/sharing"
	"github.com/partage-dev/partage/pkg/gpu"
)

var walkSeeds = flag.Uint64("walk.seeds", 20, "from how many seeds TestWalk takes its steps")

// walkClaims are the devices of the claims.
var walkClaims = [][]string{
	{sliceA0, sliceB0},
	{sliceA1 + "-mps", wholeB + "-mig-1g10gb-1-mps"},
	{sliceA1 + "-mps", turnsC},
	{halfA4, turnsC},
	{wholeB + "-mig-1g10gb-3-timeslice", sliceA1 + "-mps"},
	{turnsC},
	{wholeB + "-mig-3g40gb-4"},
	{wholeB + "-mig-1g10gb-3-timeslice", wholeA + "-mig-1g10gb-2"},
	{wholeB + "-mig-1g10gb-1-mps"},
}

// walk is one random walk.
type walk struct {
	*box
	rng     *rand.Rand
	m       []*Manager
	log     []string
	foreign map[partition.Address]string // UUID
	failed  bool
	claims  [16]chan bool
	slowly  slowWalk
}

func walkClaim(i int) *resourceapi.ResourceClaim {
	return newClaim("u"+strconv.Itoa(i), walkClaims[i]...)
}

func (w *walk) note(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

func (w *walk) fail(t *testing.T, format string, args ...any) {
	t.Helper()
	if w.failed {
		return
	}
	w.failed = true
	t.Errorf(format, args...)
	for _, l := range w.log[max(0, len(w.log)-14):] {
		t.Log("   ", l)
	}
}

func (w *walk) step(t *testing.T) {
	w.pass(time.Second)
	b, r := w.box, w.rng
	effects := []error{errors.New("x"), gpu.ErrInUse, gpu.ErrTimeout, gpu.ErrLost, sharing.ErrNoSupervisor, unix.ENOSPC}
	fault := "none"
	switch r.IntN(6) {
	case 0:
		n := 1 + r.IntN(14)
		b.strike(r.IntN(2) > 0, at(n, b.die))
		fault = fmt.Sprint("kill ", n)
	case 1, 2:
		n, e := 1+r.IntN(14), effects[r.IntN(len(effects))]
		times := 1 + r.IntN(3)
		after := r.IntN(3) == 0
		count := 0
		hook := func(name string) error {
			b.mu.Lock()
			defer b.mu.Unlock()
			if name == "remove spec" || errors.Is(e, unix.ENOSPC) && !strings.HasPrefix(name, "write") {
				return nil
			}
			count++
			if count >= n && count < n+times {
				return e
			}
			return nil
		}
		b.strike(after, hook)
		fault = fmt.Sprintf("fault %d x%d %v after=%v", n, times, e, after)
	}
	ctx, cancel := w.nextSlow(t.Context())
	defer cancel()
	var mu sync.Mutex
	var comeBack func()
	switch r.IntN(8) {
	case 0:
		b.hooks(nil, at(1+r.IntN(10), func() error { cancel(); return nil }))
		fault = "cancel"
	case 1:
		b.hooks(at(1+r.IntN(10), func() error { panic("attack") }), nil)
		fault = "panic"
	case 2:
		n, count, life := 1+r.IntN(8), 0, time.Duration(r.IntN(100))*time.Second
		b.beforeEffect(func(address, _ string) error {
			mu.Lock()
			defer mu.Unlock()
			if count++; count != n {
				return nil
			}
			call, back := b.hang(address)
			comeBack = sync.OnceFunc(back)
			time.AfterFunc(life, comeBack)
			return call
		})
		fault = fmt.Sprintf("hang %d for %s", n, life)
	}
	var wg sync.WaitGroup
	n := 1 + r.IntN(4)
	for range n {
		i, k, c, away := r.IntN(len(w.m)), r.IntN(20), r.IntN(len(walkClaims)), r.IntN(3) == 0
		if n > 1 && k >= 17 {
			k = 13
		}
		wg.Go(func() { w.act(ctx, t, i, k, c, away, fault) })
	}
	wg.Wait()
	i, m := 0, w.m[0]
	b.beforeEffect(nil)
	mu.Lock()
	hung := comeBack
	mu.Unlock()
	if hung != nil {
		if r.IntN(2) == 0 {
			w.note("   reconcile %v", w.m[1].cleanUp(t.Context()))
			w.note("   prepare %v", runPrepare(t.Context(), w.m[1], walkClaim(r.IntN(len(walkClaims)))))
		}
		hung()
		synctest.Wait()
		time.Sleep(100 * time.Second)
	}
	if b.killed() {
		b.hooks(nil, nil)
		w.m[i] = b.manager()
		w.m[1-i] = b.manager()
		if r.IntN(2) == 0 {
			w.note("   reconcile %v", w.m[i].cleanUp(t.Context()))
		}
	}
	b.hooks(nil, nil)
	w.check(t, m)
}

func (w *walk) act(ctx context.Context, t *testing.T, i, k, c int, away bool, fault string) {
	b, m := w.box, w.m[i]
	uid := types.UID("u" + strconv.Itoa(c))
	op, err := "", error(nil)
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic %v", p)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		w.log = append(w.log, fmt.Sprintf("[%d] %s, %s: %v %v", i, op, fault, err, b.effects))
	}()
	switch {
	case k < 8:
		op = "prepare " + string(uid)
		w.claims[c] <- true
		defer func() { <-w.claims[c] }()
		_, err = m.Prepare(ctx, walkClaim(c))
		if err == nil && !b.killed() {
			w.checkPrepared(t, m, uid)
		}
	case k < 13:
		w.claims[c] <- true
		defer func() { <-w.claims[c] }()
		op = "unprepare " + string(uid)
		err = m.Unprepare(ctx, uid)
	case k < 15:
		op = "reconcile"
		err = m.cleanUp(ctx)
	case k < 16:
		op = "survey"
		survey(ctx, m)
	case k < 17:
		op = "away"
		b.away(away)
	case k < 19:
		op = w.lose(m)
	default:
		op = "sessions lost"
		b.locked(func() { clear(b.sessions) })
	}
}

// lose removes a claim's partition. Perhaps somebody makes another in its place, and ids
// begin anew.
func (w *walk) lose(m *Manager) string {
	b := w.box
	for at := range w.foreign {
		if w.rng.IntN(2) == 0 {
			b.removeForeign(at)
			delete(w.foreign, at)
			return "remove foreign"
		}
	}
	s := m.store.Snapshot()
	var held []record.Held
	for _, r := range s.Records {
		for i := range r.Devices {
			d := &r.Devices[i]
			if owned(d) && d.Mark == record.Started && d.Partition.Made != nil {
				held = append(held, record.Held{Record: r, Device: d})
			}
		}
	}
	if len(held) == 0 {
		return "lose nothing"
	}
	d := held[w.rng.IntN(len(held))]
	at := d.Address()
	for _, h := range s.Records {
		for i := range h.Devices {
			if o := &h.Devices[i]; o.Partition != nil && o.Address() == at && o.Partition.Made == nil {
				return "lose nothing certain"
			}
		}
	}
	live, found := b.look(at)
	if _, foreign := w.foreign[at]; foreign {
		return "lose nothing, it is foreign"
	}
	b.removeForeign(at)
	if found && w.rng.IntN(2) == 0 {
		b.mu.Lock()
		used := slices.ContainsFunc(b.instances, func(p *placed) bool { return p.ID >= live.InstanceID })
		if !used {
			b.nextID = live.InstanceID
		}
		b.mu.Unlock()
	}
	return "lose " + at.String() + " of " + string(d.Record.Claim.UID)
}

// owned reports whether a device is, or is in, a partition that the driver made.
func owned(d *record.Device) bool {
	return d.Partition != nil && d.Type != record.Static && !d.Admin
}

func (w *walk) checkPrepared(t *testing.T, m *Manager, uid types.UID) {
	r, err := m.store.Read(uid)
	if err != nil || r == nil || r.State != record.Prepared {
		w.fail(t, "%s is prepared and recorded as %+v, %v", uid, r, err)
		return
	}
	if n := len(walkClaims[uid[1]-'0']); len(r.Devices) != n || len(w.spec(uid)) != n {
		w.fail(t, "%s has %d devices, %d in its spec", uid, len(r.Devices), len(w.spec(uid)))
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if d.Partition != nil {
			if live, found := w.look(d.Address()); !found || d.Partition.Made == nil || live != *d.Partition.Made {
				w.fail(t, "%s is prepared and its partition is %+v %v, recorded %+v", uid, live, found, d.Partition.Made)
			}
		}
		if strings.HasSuffix(d.Device, "-mps") && (d.Sharing == nil || w.running(d.Sharing.Session) == nil) {
			w.fail(t, "%s is prepared and has no session: %+v", uid, d)
		}
		if d.Device == turnsC && w.intervals["GPU-c"] == "" {
			w.fail(t, "%s is prepared and has no interval", uid)
		}
	}
}

func (w *walk) check(t *testing.T, m *Manager) {
	for at, uuid := range w.foreign {
		if live, found := w.look(at); !found || live.UUID != uuid {
			w.fail(t, "somebody else's partition %s at %s is gone", uuid, at)
		}
	}
	s := m.store.Snapshot()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.instances {
		_, foreign := w.foreign[p.at()]
		explained := slices.ContainsFunc(s.On(p.pciAddress), func(d record.Held) bool { return owned(d.Device) && d.Mark == record.Started && d.Address() == p.at() })
		if !foreign && !explained {
			w.fail(t, "nobody knows of %s %+v: %+v", p.at(), p.Instance, s.On(p.pciAddress))
		}
	}
	for uuid, on := range w.exclusive {
		if on && strings.HasPrefix(uuid, "GPU") { // no claim of these has one
			w.fail(t, "exclusive %s", uuid)
		}
	}
	if w.intervals["GPU-c"] != "" && !slices.ContainsFunc(s.On(pciC), func(d record.Held) bool { return d.Shared().Interval != "" }) {
		w.fail(t, "nobody knows of the interval")
	}
	// No spec names a partition that is another's, or somebody else's.
	for uid, devices := range w.specs {
		i := slices.IndexFunc(s.Records, func(r *record.Record) bool { return r.Claim.UID == uid })
		for _, d := range devices {
			name := d.Name
			for _, node := range d.Nodes {
				for _, p := range w.instances {
					cap := fmt.Sprintf("nvidia-cap%d", 100+10*p.ID)
					elsewhere := i >= 0 && !slices.ContainsFunc(s.Records[i].Devices, func(d record.Device) bool { return d.Key() == name && d.PCIAddress == p.pciAddress })
					if !strings.HasSuffix(node.Path, cap) || len(p.Compute) != 1 || elsewhere {
						continue
					}
					if i < 0 {
						w.fail(t, "the spec of %s, which has no record, names %s", uid, p.at())
						continue
					}
					own := slices.ContainsFunc(s.Records[i].Devices, func(d record.Device) bool {
						return d.Partition != nil && d.Address() == p.at() && d.Mark != record.Lost
					})
					_, foreign := w.foreign[p.at()]
					if !own && !foreign {
						w.fail(t, "the spec of %s names partition %s %s", uid, p.at(), p.Compute[0].UUID)
					}
				}
			}
		}
	}
}

func (w *walk) end(t *testing.T) {
	b := w.box
	w.endSlow()
	b.hooks(nil, nil)
	time.Sleep(2 * time.Minute) // what is at work on a GPU has its lock
	b.away(false)
	for at := range w.foreign {
		b.removeForeign(at)
	}
	clear(w.foreign)
	m := b.manager()
	for i := range walkClaims {
		b.pass(time.Second)
		if err := m.Unprepare(t.Context(), walkClaim(i).UID); err != nil {
			w.fail(t, "unprepare u%d: %v", i, err)
		}
	}
	_ = m.cleanUp(t.Context())
	if err := m.cleanUp(t.Context()); err != nil {
		w.fail(t, "reconcile: %v", err)
	}
	left := slices.DeleteFunc(b.state(), func(s string) bool {
		return strings.HasPrefix(s, "MIG mode") || strings.HasPrefix(s, "exclusive mode of MIG")
	})
	if len(left) > 0 {
		w.fail(t, "left behind: %v", left)
	}
}

// TestWalk takes random steps from fixed seeds: several claims on several GPUs in two
// processes, that are killed, struck by faults and lose partitions and sessions at the same
// time. In nearly half of the steps something is slow.
func TestWalk(t *testing.T) {
	var counts slowCounts
	for seed := range *walkSeeds {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { counts.add(walkFrom(t, seed)) })
		})
	}
	counts.check(t)
}

func walkFrom(t *testing.T, seed uint64) *walk {
	b := newBox(t)
	w := &walk{box: b, rng: rand.New(rand.NewPCG(seed, 1)), foreign: map[partition.Address]string{}}
	w.slowly = slowWalk{rng: rand.New(rand.NewPCG(seed, 2)), began: time.Now()}
	w.m = []*Manager{b.manager(), b.manager()}
	for i := range w.claims {
		w.claims[i] = make(chan bool, 1)
	}
	for range 60 {
		w.step(t)
		if w.failed {
			return w
		}
	}
	w.end(t)
	return w
}
