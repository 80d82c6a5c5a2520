// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"errors"
	"fmt"

	"github.com/partage-dev/partage/pkg/gpu"
)

// ErrForeign means that the instance at an address is not the caller's.
var ErrForeign = errors.New("it was not made by this driver and is left alone")

// Expect says which instance, if any, may already be at an address when a
// partition is created there. No instance at all is always accepted.
type Expect struct {
	ours bool
	uuid string
}

var (
	// ExpectNothing accepts no instance: this is the first attempt to create
	// the partition. It is the zero value.
	ExpectNothing = Expect{}
	// ExpectOurs accepts a partition, complete or not: an earlier attempt may
	// have created it, and its UUID was never recorded.
	ExpectOurs = Expect{ours: true}
)

// ExpectUUID accepts the partition with this UUID, and a GPU instance without
// compute instance, which has none.
func ExpectUUID(uuid string) Expect { return Expect{ours: true, uuid: uuid} }

// Check returns an error that wraps ErrForeign and names the instance unless it
// is accepted. A GPU instance with several compute instances never is, since
// this driver makes one in each.
func (e Expect) Check(instance gpu.Instance) error {
	if !e.ours {
		return fmt.Errorf("%s is there already: %w", name(instance), ErrForeign)
	}
	return withUUID(e.uuid)(instance)
}

// check returns an error that wraps ErrForeign for an instance that is not ours.
type check func(gpu.Instance) error

// withUUID accepts a partition with this UUID, any partition if uuid is empty,
// and a GPU instance without compute instance.
func withUUID(uuid string) check {
	return func(instance gpu.Instance) error {
		switch compute := instance.Compute; {
		case len(compute) > 1:
			return fmt.Errorf("GPU instance %d is divided into %d compute instances: %w", instance.ID, len(compute), ErrForeign)
		case len(compute) == 1 && uuid != "" && compute[0].UUID != uuid:
			return fmt.Errorf("%s is in the place of %s: %w", name(instance), uuid, ErrForeign)
		}
		return nil
	}
}

// withID accepts the GPU instance with this id.
func withID(id int) check {
	return func(instance gpu.Instance) error {
		if instance.ID != id {
			return fmt.Errorf("%s is in the place of GPU instance %d: %w", name(instance), id, ErrForeign)
		}
		return withUUID("")(instance)
	}
}

// withoutCompute accepts a GPU instance without compute instance. It is for a
// creation that failed before it knew an id: one with a compute instance was
// made by somebody else in the meantime.
func withoutCompute(instance gpu.Instance) error {
	if len(instance.Compute) > 0 {
		return fmt.Errorf("%s was made in the meantime: %w", name(instance), ErrForeign)
	}
	return nil
}

// name identifies an instance in messages: "GPU instance 7 (MIG-…)".
func name(instance gpu.Instance) string {
	if len(instance.Compute) != 1 {
		return fmt.Sprintf("GPU instance %d", instance.ID)
	}
	return fmt.Sprintf("GPU instance %d (%s)", instance.ID, instance.Compute[0].UUID)
}
