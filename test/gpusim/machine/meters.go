// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package machine

// Meters are what a GPU draws and moves. With its zero value it cannot tell its power, and moves nothing.
type Meters struct {
	PowerMilliwatts int
	// NVLinkTx and NVLinkRx are KiB on all links together since the driver was loaded.
	NVLinkTx, NVLinkRx uint64
	PCIeTx, PCIeRx     int // KB/s; -1: not reported, as in a vGPU guest
}
