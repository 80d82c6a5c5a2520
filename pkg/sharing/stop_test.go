// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
)

func TestStop(t *testing.T) {
	const exclusive, prohibited, open = gpu.ComputeExclusiveProcess, gpu.ComputeProhibited, gpu.ComputeDefault
	failing := func(call string, err error) func(int, string) *fault {
		return func(_ int, made string) *fault {
			if strings.HasPrefix(made, call) {
				return &fault{err: err}
			}
			return nil
		}
	}
	unloaded := &gpu.Error{Call: "nvmlDeviceSetComputeMode", PCIAddress: firstPCI, Text: "Driver Not Loaded", Err: gpu.ErrDriverNotLoaded}
	tests := map[string]struct {
		devices []Device
		before  func(*node)
		is      error
		says    string
		modes   map[string]gpu.ComputeMode
		stays   bool // the session
	}{
		"two GPUs": {
			devices: []Device{first, second}, modes: map[string]gpu.ComputeMode{first.UUID: open, second.UUID: open, migUUID: open},
		},
		"partition": {devices: []Device{partition}, modes: map[string]gpu.ComputeMode{migUUID: open}},
		"no session": {
			devices: []Device{first}, before: func(n *node) { delete(n.sessions, id) }, modes: map[string]gpu.ComputeMode{first.UUID: open},
		},
		"partition that is gone": {devices: []Device{partition}, before: func(n *node) { delete(n.modes, migUUID) }},
		"GPU that is gone": {
			devices: []Device{first, second}, before: func(n *node) { delete(n.modes, first.UUID) },
			modes: map[string]gpu.ComputeMode{second.UUID: open},
		},
		"partition without a mode": {devices: []Device{partition}, before: func(n *node) { n.modeless = []string{migUUID} }},
		"mode that somebody else set since": {
			devices: []Device{first}, before: func(n *node) {
				delete(n.sessions, id)
				n.modes[first.UUID] = prohibited
			},
			modes: map[string]gpu.ComputeMode{first.UUID: prohibited},
		},
		"no supervisor": {
			devices: []Device{first}, before: func(n *node) { n.strike = failing("stop", fmt.Errorf("dial: %w", mps.ErrUnavailable)) },
			is: ErrNoSupervisor, says: "dial", stays: true, modes: map[string]gpu.ComputeMode{first.UUID: exclusive},
		},
		"session that does not stop": {
			devices: []Device{first}, before: func(n *node) { n.strike = failing("stop", errors.New("busy")) },
			says: "busy", stays: true, modes: map[string]gpu.ComputeMode{first.UUID: exclusive},
		},
		"GPU whose driver is not loaded": {
			devices: []Device{first, second}, before: func(n *node) { n.strike = failing("GPU-first to", unloaded) },
			is: gpu.ErrDriverNotLoaded, says: firstPCI, modes: map[string]gpu.ComputeMode{first.UUID: exclusive, second.UUID: open},
		},
		"GPU whose mode cannot be read": {
			devices: []Device{first, second}, before: func(n *node) { n.strike = failing("read GPU-first", unloaded) },
			is: gpu.ErrDriverNotLoaded, says: firstPCI, modes: map[string]gpu.ComputeMode{first.UUID: exclusive, second.UUID: open},
		},
		"GPU of which it is said that it has no mode": {
			devices: []Device{first}, before: func(n *node) {
				n.strike = failing("read", &gpu.Error{Text: "Not Supported", Err: gpu.ErrNotSupported})
			},
			is: gpu.ErrNotSupported, says: firstPCI, modes: map[string]gpu.ComputeMode{first.UUID: exclusive},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			s := session(40, test.devices...)
			if _, err := n.manager().Start(t.Context(), s, false); err != nil {
				t.Fatal(err)
			}
			if test.before != nil {
				test.before(n)
			}
			err := n.manager().Stop(t.Context(), s)
			if (err == nil) != (test.says == "") || (test.is != nil && !errors.Is(err, test.is)) {
				t.Errorf("got %v, want %v", err, test.is)
			}
			if err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("%q does not say %q", err, test.says)
			}
			for uuid, want := range test.modes {
				if n.modes[uuid] != want {
					t.Errorf("mode of %s is %s, want %s", uuid, n.modes[uuid], want)
				}
			}
			if _, runs := n.sessions[id]; runs != test.stays {
				t.Errorf("session runs: %t", runs)
			}
		})
	}
}
