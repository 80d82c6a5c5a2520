// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// TestSockets checks that nobody but root can connect to the driver or the supervisor: they
// listen on no port, and the files of their sockets let nobody else in. The probes work all
// the same.
func TestSockets(t *testing.T) {
	t.Parallel()
	seesPorts(t)
	n := harness.NewNode(t, "h100x1")
	health := filepath.Join(filepath.Dir(n.Root), "supervisor.sock")
	supervisor := n.StartSupervisor(t, "--health-socket="+health)
	driver := n.Start(t, harness.Frequent...)
	driver.Ready(t)

	for _, test := range []struct {
		name    string
		process *harness.Process
		// The last one is for health checks.
		sockets []string
	}{
		{"driver", driver.Process, []string{
			n.RegistrarDir + "/", n.DataDir() + "/dra", n.DataDir() + "/memory-limits/", filepath.Dir(n.Root) + "/uid-",
		}},
		{"supervisor", supervisor.Process, []string{n.MPSDir + "/", health}},
	} {
		listening := must.Get(listening(test.process.Cmd.Process.Pid))(t)
		for _, prefix := range test.sockets {
			if !slices.ContainsFunc(listening, func(socket string) bool { return strings.HasPrefix(socket, prefix) }) {
				t.Errorf("the %s has no socket %s…, only %q", test.name, prefix, listening)
			}
		}
		expect.Equal(t, len(listening), len(test.sockets), "the", test.name, "listens on", listening, "sockets")
		for _, path := range listening {
			if strings.HasPrefix(path, test.sockets[len(test.sockets)-1]) {
				wantProbes(t, path)
			}
			// To connect to a socket is to write to it.
			if info, err := os.Stat(path); err != nil || info.Mode().Perm()&0o022 != 0 {
				t.Errorf("others may connect to the %s's %s: %v, %v", test.name, path, info, err)
			}
		}
	}
}

// wantProbes fails unless the probes of the chart succeed.
func wantProbes(t *testing.T, socket string) {
	t.Helper()
	for _, question := range []string{"liveness", "readiness"} {
		cmd := exec.CommandContext(t.Context(), harness.Built.HealthProbe, question)
		cmd.Env = []string{"HEALTH_SOCKET=" + socket}
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s of %s: %v: %s", question, socket, err, out)
		}
	}
}

// seesPorts fails unless listening finds a port that the test listens on.
func seesPorts(t *testing.T) {
	t.Helper()
	listener := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer func() { _ = listener.Close() }()
	address, ok := listener.Addr().(*net.TCPAddr)
	if !ok {
		t.Fatalf("got the address %v", listener.Addr())
	}
	port := fmt.Sprintf(":%04X ", address.Port)
	all, err := listening(os.Getpid())
	if err != nil || !slices.ContainsFunc(all, func(socket string) bool { return strings.Contains(socket, port) }) {
		t.Fatalf("port %s is not among %q, %v", listener.Addr(), all, err)
	}
}

// listening returns what sockets a process listens on: the paths of unix sockets, and the
// lines of others in /proc.
func listening(pid int) ([]string, error) {
	proc := fmt.Sprintf("/proc/%d/", pid)
	files, err := os.ReadDir(proc + "fd")
	if err != nil {
		return nil, err
	}
	own := map[string]bool{}
	for _, file := range files {
		if link, err := os.Readlink(proc + "fd/" + file.Name()); err == nil && strings.HasPrefix(link, "socket:[") {
			own[strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")] = true
		}
	}
	var all []string
	// Which column has the inode, and which has what state for a socket that others may
	// send to: for UDP, that is any.
	for table, is := range map[string]struct {
		inode, state int
		listens      string
	}{
		"tcp": {9, 3, "0A"}, "tcp6": {9, 3, "0A"}, "udp": {9, 3, ""}, "udp6": {9, 3, ""}, "raw": {9, 3, ""}, "raw6": {9, 3, ""},
		// The flag is __SO_ACCEPTCON.
		"unix": {6, 3, "00010000"},
	} {
		data, err := os.ReadFile(proc + "net/" + table)
		if os.IsNotExist(err) {
			continue // no IPv6
		}
		if err != nil {
			return nil, err
		}
		for _, line := range strings.Split(string(data), "\n")[1:] {
			fields := strings.Fields(line)
			if len(fields) <= is.inode || !own[fields[is.inode]] || is.listens != "" && fields[is.state] != is.listens {
				continue
			}
			if table == "unix" && len(fields) > 7 {
				// The supervisor renames its socket.
				line = strings.TrimSuffix(fields[7], ".new")
			}
			all = append(all, line)
		}
	}
	return all, nil
}
