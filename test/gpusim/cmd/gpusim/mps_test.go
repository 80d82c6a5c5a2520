// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// serverOn plays an MPS server with two clients on a GPU and an idle one on the
// other; package mps tests real ones.
func serverOn(t *testing.T, root string) (f *state.File, owner uint64) {
	t.Helper()
	f, err := state.Open(sysroot.StatePath(root))
	must.Do(t, err)
	t.Cleanup(f.Close)
	if owner, err = f.Own(); err != nil {
		t.Fatal(err)
	}
	change(t, root, func(m *machine.Machine) {
		for i, p := range []machine.Process{
			{PID: 500, GPU: 0, Name: "nvidia-cuda-mps-server", Kind: machine.MPSServer, Status: machine.MPSFault, MemoryBytes: 28 << 20},
			{PID: 501, GPU: 0, Name: "python3", Kind: machine.MPSClient, MemoryBytes: 1 << 30},
			{PID: 502, GPU: 0, Name: "python3", Kind: machine.MPSClient, MemoryBytes: 2 << 30},
			{PID: 500, GPU: 1, Name: "nvidia-cuda-mps-server", Kind: machine.MPSServer, Status: machine.MPSFault, MemoryBytes: 28 << 20},
		} {
			p.Owner, p.Pipe, p.InstanceID, p.ComputeID = owner, "/run/partage/mps/gpu-0/pipe", -1, -1
			if i == 2 {
				p.Name = "train"
			}
			m.Processes = append(m.Processes, p)
		}
	})
	return f, owner
}

func TestMPS(t *testing.T) {
	root := newNode(t, "l4x2")
	expect.Equal(t, mustRun(t, "mps", "list", root), "", "without servers")
	if out := mustRun(t, "mps", "list", "-o", "json", root); strings.TrimSpace(out) != "[]" {
		t.Errorf("without servers: %q", out)
	}
	f, owner := serverOn(t, root)
	golden(t, "mps.txt", mustRun(t, "mps", "list", root))
	golden(t, "show-mps.txt", mustRun(t, "show", root))
	var s shown
	must.Do(t, json.Unmarshal([]byte(mustRun(t, "show", "-o", "json", root)), &s))
	if len(s.MPS) != 2 || len(s.MPS[0].Clients) != 2 || s.MPS[0].Clients[1] != (shownClient{502, "train", 2048}) || s.MPS[0].Status != "FAULT" {
		t.Errorf("%+v", s.MPS)
	}

	refuses(t, "mps fault", map[string]string{
		"":                  "gpu",
		"--gpu 2":           "there is no such MPS server on GPU 2, the machine has 500 on GPU 0, 500 on GPU 1",
		"--gpu 0 --pid 501": "there is no such MPS server on GPU 0",
	})
	// It returns when the server has obeyed, or is no more.
	for _, end := range []func(){
		func() {
			change(t, root, func(m *machine.Machine) {
				for i := range m.Processes {
					m.Processes[i].Fault = false
				}
			})
		},
		f.Close,
	} {
		done := make(chan error)
		go func() {
			_, err := gpusim("mps", "fault", "--gpu", "1", "--pid", "500", root)
			done <- err
		}()
		for wanted := false; !wanted; {
			gpus := must.Get(f.WantedFaults(owner))(t)
			wanted = len(gpus) == 1 && gpus[0] == 1
		}
		select {
		case err := <-done:
			t.Errorf("it did not wait: %v", err)
		default:
		}
		end()
		expect.Do(t, <-done)
	}
	expect.Equal(t, mustRun(t, "mps", "list", root), "", "when the server is gone")
}

func TestMPSFaults(t *testing.T) {
	newNode(t, "l4x2")
	for _, args := range []string{
		"--function mps_server_start --gpu 1 --times 1 --effect fail",
		"--function mps_control_start --delay 2s",
		"--function mps_quit --effect kill-after",
		"--function mps_get_server_list --effect fail-after --skip 3",
	} {
		mustRun(t, append([]string{"fault", "add"}, strings.Fields(args)...)...)
	}
	golden(t, "faults-mps.txt", mustRun(t, "fault", "list"))
	refuses(t, "fault add", map[string]string{
		"--function mps_make_coffee --hang":           `--function "mps_make_coffee" is not one of mps_client_alloc, mps_client_connect,`,
		"--function mps_quit --effect fail --code 19": "mps_quit has no codes: use --effect fail",
		"--function mps_quit --code 19":               "mps_quit has no codes: use --effect fail",
		"--function mps_quit":                         "this fault would do nothing",
		"--function mps_quit --effect explode":        `--effect "explode" is not one of`,
	})
}

func TestMPSSettings(t *testing.T) {
	root := newNode(t, "l4x2")
	settings := func() (mps machine.MPS) {
		change(t, root, func(m *machine.Machine) { mps = m.MPS })
		return mps
	}
	expect.Equal(t, settings(), (machine.MPS{}), "a new machine")
	mustRun(t, "mps", "set", "--killed-client", "harmless", "--shared-memory", "file", "--open-files", "any", root)
	mustRun(t, "mps", "set", "--killed-client", "undefined", "--control-shm", "daemon", root)
	expect.Equal(t, settings(), (machine.MPS{NamedSharedMemory: true, FewFiles: true, ControlNeedsSharedMemory: true}))
	refuses(t, "mps set", map[string]string{
		"--open-files few": `--open-files "few" is not needed or any`,
		"":                 "say what to set",
	})
}
