// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/mps"
	"github.com/partage-dev/partage/test/must"
)

// longestSocket is how many bytes the path of a unix socket may have.
const longestSocket = 107

// TestLongMPSDir: a supervisor whose folder is so long that no daemon could make its sockets there says so when it starts, and
// names the flag. Otherwise the first claims would find out.
func TestLongMPSDir(t *testing.T) {
	n := harness.NewNode(t, "h100x1")
	// The supervisor's own socket still fits, and no control_privileged in a folder, however short that folder's name is.
	n.MPSDir += strings.Repeat("d", longestSocket-len("/x/control_privileged")+1-len(n.MPSDir))
	cmd := exec.CommandContext(t.Context(), harness.Built.Supervisor, "--mps-dir="+n.MPSDir, "--driver-root="+n.DriverRoot())
	out := &harness.LogBuffer{}
	cmd.Stdout, cmd.Stderr = out, out
	must.Do(t, cmd.Start())
	ended := make(chan error)
	go func() { ended <- cmd.Wait() }()
	serves := make(chan error)
	go func() {
		serves <- harness.Eventually(t.Context(), func() error {
			_, err := n.TrySessions(t.Context())
			return err
		})
	}()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(out.String(), "--mps-dir (MPS_DIR)") {
			t.Errorf("the supervisor ends, and does not say which flag is wrong: %v: %s", err, out)
		}
	case err := <-serves:
		if err != nil {
			t.Errorf("the supervisor neither ends nor serves: %v: %s", err, out)
		} else {
			t.Error("the supervisor serves in a folder in which no MPS daemon can make its sockets")
		}
		_ = cmd.Process.Kill()
		t.Logf("the supervisor: %v", <-ended)
	}
}

// TestControlClientBesideDaemon: a share is prepared where NVIDIA's program for commands needs the /dev/shm of the daemon, as it
// is given to those who command MPS elsewhere.
func TestControlClientBesideDaemon(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1", func(m *machine.Machine) { m.MPS.ControlNeedsSharedMemory = true })
	n.StartSupervisor(t)
	p := n.Start(t)
	c := n.Allocate(t, []harness.Device{{Kind: harness.MPS, Memory: 10 << 30}})
	answer := make(chan error, 1)
	go func() {
		_, err := p.TryPrepare(t.Context(), c, harness.KubeletTimeout)
		answer <- err
	}()
	p.Until(t, "an answer, or a command that is refused", func(context.Context) error {
		calls, err := n.State.Calls()
		if err != nil || len(answer) > 0 || calls[mps.CommandElsewhere] > 0 {
			return err
		}
		return errors.New("there is none")
	})
	if len(answer) == 0 {
		t.Fatal("commands for MPS are sent without the daemon's /dev/shm, which they may need")
	}
	must.Do(t, <-answer)
	ids := p.MustPrepare(t, c)
	wantOutput(t, n, n.Container(t, ids...), []string{"as a client", "limit 10240 MiB"}, "info")
	p.MustUnprepare(t, c)
	p.UntilClean(t, n)
}

// TestForwardCompatibility: containers of MPS shares use the CUDA library of the node's driver. A newer one of the image, which
// those of other claims may use, would talk to an older server.
func TestForwardCompatibility(t *testing.T) {
	t.Parallel()
	n, ids := shareOf(t)
	if usesImagesLibrary(n.Container(t, ids...)) {
		t.Error("a client of MPS gets the newer CUDA library of its image, which the server of an older driver may refuse")
	}
}

// TestForwardCompatibilityOfGPU is the other side.
func TestForwardCompatibilityOfGPU(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	p := n.Start(t)
	if ids := p.MustPrepare(t, n.Allocate(t, []harness.Device{{}})); !usesImagesLibrary(n.Container(t, ids...)) {
		t.Error("a container with a whole GPU does not get the newer CUDA library of its image")
	}
}

// usesImagesLibrary reports whether a hook of NVIDIA's prefers the CUDA library of the image where that is newer.
func usesImagesLibrary(spec *oci.Spec) bool {
	return slices.ContainsFunc(hooks(spec), func(h *oci.Hook) bool { return slices.Contains(h.Args, "enable-cuda-compat") })
}

// TestProcessOfDaemon: what a control daemon has started ends with its session, whatever its name, its environment, its session
// and its process group are.
func TestProcessOfDaemon(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x1")
	pidFile := filepath.Join(n.Root, "helper.pid")
	startWithHelper(t, n, pidFile)
	n.StartSupervisor(t)
	p := n.Start(t)
	c, _ := p.NewClaim(t, n, harness.Device{Kind: harness.MPS})
	var helper int
	err := harness.Eventually(t.Context(), func() error {
		text, err := os.ReadFile(pidFile)
		if err == nil {
			helper, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	})
	must.Do(t, err)
	t.Cleanup(func() { _ = unix.Kill(helper, unix.SIGKILL) })
	p.MustUnprepare(t, c)
	p.UntilClean(t, n)
	expect.Fails(t, runs(helper), "a process that the MPS daemon had started goes on after the end of its session")
}

// startWithHelper makes the control daemon start another program first, which writes down its process ID.
func startWithHelper(t *testing.T, n *harness.Node, pidFile string) {
	t.Helper()
	program := filepath.Join(n.DriverRoot(), "usr/bin/nvidia-cuda-mps-control")
	harness.Rename(t, program, program+".real")
	script := fmt.Sprintf(`#!/bin/sh
if [ "$1" = -f ]; then
	/usr/bin/env -i /usr/bin/setsid /bin/sh -c 'echo $$ >%[1]s.new && mv %[1]s.new %[1]s && exec sleep infinity' &
fi
exec %[2]s.real "$@"
`, pidFile, program)
	must.Do(t, os.WriteFile(program, []byte(script), 0o755))
}

// runs fails unless there is a process with this ID that has not ended.
func runs(pid int) error {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err == nil && strings.Contains(string(stat), ") Z ") {
		err = errors.New("it is a zombie")
	}
	return err
}
