// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"crypto/sha256"
	"encoding/hex"
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
)

// PreloadFile is where the dynamic loader looks up what to load into every program of
// a container.
const PreloadFile = "/etc/ld.so.preload"

// Marker returns the name of the variable for an owner. Variables of different owners
// have different names: of two with one name, a container would have the last only.
func Marker(prefix, owner string) string {
	sum := sha256.Sum256([]byte(owner))
	return prefix + hex.EncodeToString(sum[:4])
}
