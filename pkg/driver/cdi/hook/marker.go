// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/partage-dev/partage/pkg/util/quote"
)

// A container has a variable for each device that was added to it, or one for several
// that belong together. Its name starts with one of these.
const (
	// MPSMarkerPrefix is for clients of MPS. The value is the session's name.
	MPSMarkerPrefix = "PARTAGE_MPS_"
	// LimitsMarkerPrefix is for devices with limits in software. The value is the
	// device's name.
	LimitsMarkerPrefix = "PARTAGE_LIMITS_"
	// DirectMarkerPrefix is for all other devices. The value is the device's name.
	DirectMarkerPrefix = "PARTAGE_GPU_"
	// MemoryMarkerPrefix is for a share whose memory the driver limits, beside one of the others. The value is the GPU's
	// PCI address.
	MemoryMarkerPrefix = "PARTAGE_MEMORY_"
)

// Marker returns the name of the variable for an owner. Variables of different owners
// have different names: of two with one name, a container would have the last only.
func Marker(prefix, owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return prefix + hex.EncodeToString(sum[:4])
}

// CheckMarkers refuses devices that one container cannot have, by the variables of
// all of them: a client of MPS sees the devices of one session only, limits in
// software are for all devices of a container, and the driver's limit is one for each GPU.
func CheckMarkers(env []string) error {
	var (
		sessions = valuesOf(env, MPSMarkerPrefix)
		limited  = valuesOf(env, LimitsMarkerPrefix)
		direct   = valuesOf(env, DirectMarkerPrefix)
		others   = slices.Concat(limited, direct)
		held     = slices.Sorted(slices.Values(valuesOf(env, MemoryMarkerPrefix)))
	)
	switch {
	case len(sessions) > 1:
		return fmt.Errorf("this container has %d MPS shares, of %s: a process can be a client of one MPS share only: "+
			"give each container one, or ask for one share with the sum", len(sessions), list(sessions))
	case len(sessions) == 1 && len(others) > 0:
		return fmt.Errorf("this container is a client of the MPS session %s and also has %s: "+
			"CUDA shows a client of MPS the devices of its session only: "+
			"give them different containers", list(sessions), list(others))
	case len(limited) > 1:
		return fmt.Errorf("this container has %d shares with limits in software, %s: the limits of one would be for all: "+
			"give each container one, or ask for one share with the sum", len(limited), list(limited))
	case len(limited) == 1 && len(direct) > 0:
		return fmt.Errorf("this container has %s with limits in software and also %s: the limits would be for all of them: "+
			"give them different containers", list(limited), list(direct))
	case len(slices.Compact(slices.Clone(held))) < len(held):
		return fmt.Errorf("this container has several shares of one GPU, of %s: the driver limits its memory to one of them: "+
			"give each container one, or ask for one share with the sum", list(held))
	}
	return nil
}

// valuesOf returns the values of the variables whose names start with the prefix. A
// container that lists the same variable more than once has one of it.
func valuesOf(env []string, prefix string) []string {
	var values []string
	seen := map[string]bool{}
	for _, variable := range env {
		name, value, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, prefix) && !seen[name] {
			seen[name] = true
			values = append(values, value)
		}
	}
	return values
}

// list names values, each once.
func list(values []string) string {
	return quote.Names(slices.Compact(slices.Sorted(slices.Values(values))))
}
