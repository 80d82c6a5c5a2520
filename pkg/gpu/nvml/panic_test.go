// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// TestPanic: a panic is the error of its call, and the lane is free for what comes next, also where the call was left
// behind.
func TestPanic(t *testing.T) {
	const call = "nvmlDeviceGetUUID"
	synctest.Test(t, func(t *testing.T) {
		l := &lane{pci: pci, limit: defaultCallLimit}
		if err := do(t.Context(), l, call, func() nvml.Return { panic("wrong") }); err == nil || !strings.Contains(err.Error(), "wrong") {
			t.Errorf("after a panic: %v", err)
		}
		release := make(chan struct{})
		err := do(t.Context(), l, call, func() nvml.Return {
			<-release
			panic("wrong, and late")
		})
		hung := expectHung(t, err, call, pci)
		close(release)
		<-hung.Done
		if err := do(t.Context(), l, call, func() nvml.Return { return nvml.SUCCESS }); err != nil {
			t.Errorf("what comes next: %v", err)
		}
	})
}
