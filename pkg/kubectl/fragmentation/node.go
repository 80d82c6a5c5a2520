// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fragmentation

import (
	"context"
	"slices"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// layout are places for the devices that claims have of a GPU, and how many partitions of a
// profile fit beside them.
type layout struct {
	board  *board
	places []*fleet.Device
	count  int
}

// load are devices that a GPU would have, which may have come from others of its node.
type load struct {
	board   *board
	devices []*fleet.Device
}

// packNode returns how many partitions of a profile fit if partitions may move between the GPUs
// of a node. It is atLeast where that is no more, or where the allocator did not confirm it.
func (f *finder) packNode(ctx context.Context, loads []load, profile string, atLeast int) (count int, confirmed bool) {
	var all []layout
	total := 0
	for _, l := range loads {
		places, count, ok := l.board.pack(profile, l.devices)
		if !ok {
			return atLeast, true
		}
		total += count
		all = append(all, layout{l.board, places, count})
	}
	if total <= atLeast {
		return atLeast, true
	}
	if !f.judge.packed(ctx, profile, all) {
		return atLeast, false
	}
	return total, true
}

// gatherAll moves partitions so that some GPUs of a node are full and others empty. It is nil
// where nothing would come of it. Only GPUs of one model can take each other's partitions.
func gatherAll(boards []*board) []load {
	byModel := map[string][]*board{}
	var models []string
	for _, b := range boards {
		model := b.gpu.ProductName
		if byModel[model] == nil {
			models = append(models, model)
		}
		byModel[model] = append(byModel[model], b)
	}
	var all []load
	for _, model := range models {
		loads, ok := gather(byModel[model])
		if !ok {
			return nil
		}
		all = append(all, loads...)
	}
	return all
}

// gather fills one GPU after the other, with the largest partitions first. It does not try all
// ways to do so. What cannot move stays where it is.
func gather(boards []*board) (loads []load, ok bool) {
	var loose []*fleet.Device
	for _, b := range boards {
		l := load{board: b}
		for _, d := range b.held {
			if movable(d) {
				loose = append(loose, d)
			} else {
				l.devices = append(l.devices, d)
			}
		}
		loads = append(loads, l)
	}
	loose = sorted(loose)
	for i := range loads {
		l := &loads[i]
		loose = slices.DeleteFunc(loose, func(d *fleet.Device) bool {
			image := l.board.image(d)
			if image == nil {
				return false
			}
			more := sorted(append(slices.Clone(l.devices), image))
			if !l.board.hold(more) {
				return false
			}
			l.devices = more
			return true
		})
	}
	return loads, len(loose) == 0
}

// image returns a device of this GPU that is like one of another GPU, or nil.
func (b *board) image(d *fleet.Device) *fleet.Device {
	for _, own := range b.gpu.Devices {
		if own.Type == d.Type && own.Profile == d.Profile && movable(own) {
			return own
		}
	}
	return nil
}
