// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"cmp"
	"slices"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// counters are amounts by the name of the counter.
type counters map[string]int64

// take takes what a device consumes, or gives it back with -1.
func (c counters) take(d *fleet.Device, times int64) {
	for _, set := range d.Published.ConsumesCounters {
		for name, use := range set.Counters {
			c[name] -= times * use.Value.Value()
		}
	}
}

func (c counters) fit(d *fleet.Device) bool {
	for _, set := range d.Published.ConsumesCounters {
		for name, use := range set.Counters {
			if c[name] < use.Value.Value() {
				return false
			}
		}
	}
	return true
}

// most returns how many of the devices fit together.
func (c counters) most(devices []*fleet.Device) int {
	best := 0
	for i, d := range devices {
		if len(devices)-i <= best {
			break
		}
		if c.fit(d) {
			c.take(d, 1)
			best = max(best, 1+c.most(devices[i+1:]))
			c.take(d, -1)
		}
	}
	return best
}

// board is what a GPU can be, and what it is used as.
type board struct {
	gpu *fleet.GPU
	// held are the devices that claims have, in published order.
	held []*fleet.Device
	// partitions are the devices of each profile that a claim could have.
	partitions map[string][]*fleet.Device
	// profiles are the names of these, in published order.
	profiles []string
}

func newBoard(g *fleet.GPU) *board {
	b := &board{gpu: g, partitions: map[string][]*fleet.Device{}}
	for _, d := range g.Devices {
		if len(d.Held()) > 0 {
			b.held = append(b.held, d)
		}
		if d.Type != fleet.TypeMIG || d.Tainted() {
			continue
		}
		if b.partitions[d.Profile] == nil {
			b.profiles = append(b.profiles, d.Profile)
		}
		b.partitions[d.Profile] = append(b.partitions[d.Profile], d)
	}
	return b
}

// left returns the counters without what these devices have.
func (b *board) left(held []*fleet.Device) counters {
	left := counters(b.gpu.Counters())
	for _, d := range held {
		left.take(d, 1)
	}
	return left
}

// free returns the partitions of a profile that nobody has.
func (b *board) free(profile string, held []*fleet.Device) []*fleet.Device {
	return slices.DeleteFunc(slices.Clone(b.partitions[profile]), func(d *fleet.Device) bool { return slices.Contains(held, d) })
}

// count returns how many partitions of a profile fit beside these devices.
func (b *board) count(profile string, held []*fleet.Device) int {
	return b.left(held).most(b.free(profile, held))
}

// places returns the devices that can stand for one that a claim has: itself, or another of
// the same type and profile.
func (b *board) places(d *fleet.Device) []*fleet.Device {
	if !movable(d) {
		return []*fleet.Device{d}
	}
	var all []*fleet.Device
	for _, other := range b.gpu.Devices {
		if other.Type == d.Type && other.Profile == d.Profile && movable(other) {
			all = append(all, other)
		}
	}
	return all
}

// movable reports whether a device is a partition, or shares of one, that could as well be
// elsewhere. What somebody made by hand stays where it is, and so does what is tainted.
func movable(d *fleet.Device) bool {
	return d.Profile != "" && (d.Type != fleet.TypeMIG || d.UUID == "") && !d.Tainted()
}

// pack finds places for devices so that as many partitions of a profile as possible fit beside
// them. It returns the places in the order of the devices, which must be sorted, and whether
// there are any for them all.
func (b *board) pack(profile string, devices []*fleet.Device) (places []*fleet.Device, count int, ok bool) {
	p := &packer{board: b, devices: devices, left: b.left(nil), count: -1}
	p.visit = func() bool {
		if n := p.left.most(b.free(profile, p.at)); n > p.count {
			p.best, p.count = slices.Clone(p.at), n
		}
		return true
	}
	p.try(0)
	return p.best, max(0, p.count), p.count >= 0
}

// hold reports whether there are places for devices, which must be sorted.
func (b *board) hold(devices []*fleet.Device) bool {
	found := false
	p := &packer{board: b, devices: devices, left: b.left(nil), visit: func() bool {
		found = true
		return false
	}}
	p.try(0)
	return found
}

// packer visits all ways to place devices.
type packer struct {
	board   *board
	devices []*fleet.Device
	left    counters
	at      []*fleet.Device
	// visit is called for each. It reports whether to go on.
	visit func() bool
	best  []*fleet.Device
	count int
}

func (p *packer) try(i int) (goOn bool) {
	if i == len(p.devices) {
		return p.visit()
	}
	places := p.board.places(p.devices[i])
	// Devices that are alike can change places with each other: one order of them is enough.
	if i > 0 && alike(p.devices[i-1], p.devices[i]) {
		places = places[slices.Index(places, p.at[i-1])+1:]
	}
	for _, d := range places {
		if !p.left.fit(d) || slices.Contains(p.at, d) {
			continue
		}
		p.left.take(d, 1)
		p.at = append(p.at, d)
		goOn := p.try(i + 1)
		p.at = p.at[:len(p.at)-1]
		p.left.take(d, -1)
		if !goOn {
			return false
		}
	}
	return true
}

// alike reports whether the same places are open to two devices of one GPU.
func alike(a, b *fleet.Device) bool {
	return movable(a) && movable(b) && a.Type == b.Type && a.Profile == b.Profile
}

// sorted brings devices that are alike together: first those that cannot move, then the largest.
func sorted(devices []*fleet.Device) []*fleet.Device {
	out := slices.Clone(devices)
	slices.SortStableFunc(out, func(a, b *fleet.Device) int {
		fixed := func(d *fleet.Device) int {
			if movable(d) {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(fixed(a), fixed(b)), cmp.Compare(len(b.Placement), len(a.Placement)), cmp.Compare(a.Type, b.Type), cmp.Compare(a.Profile, b.Profile))
	})
	return out
}

// state identifies boards for which the answers are the same: the same devices, held and
// tainted alike.
func (b *board) state() string { return b.shape(true) }

// shape is the state, or, without what is held, that of the GPU if claims had nothing of it.
func (b *board) shape(held bool) string {
	var text []byte
	for _, d := range b.gpu.Devices {
		text = append(text, d.Type...)
		text = append(text, '/')
		text = append(text, d.Profile...)
		for _, s := range d.Placement {
			text = append(text, ',', byte('0'+s))
		}
		flags := byte('0')
		if held && len(d.Held()) > 0 {
			flags++
		}
		if d.Tainted() {
			flags += 2
		}
		if !movable(d) {
			flags += 4
		}
		text = append(text, flags, ';')
	}
	return b.gpu.ProductName + ":" + string(text)
}
