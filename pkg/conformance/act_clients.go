// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/conformance/probe"
	"github.com/partage-dev/partage/pkg/gpu/nvml"
	"github.com/partage-dev/partage/pkg/util/wait"
)

// pipeFile is a file in the daemon's pipe folder.
type pipeFile struct {
	Name string      `json:"name"`
	Mode fs.FileMode `json:"mode"`
	// Socket is the type of a socket that takes connections.
	Socket string `json:"socket,omitempty"`
}

// pipeFiles are what transcripts of real nodes show.
const pipeFiles = "control: socket SOCK_SEQPACKET 0666, control_lock: file 0666, control_privileged: socket SOCK_SEQPACKET 0755, " +
	"log: FIFO 0777, nvidia-cuda-mps-control.pid: file 0666"

func (f pipeFile) String() string {
	kind := "file"
	switch f.Mode.Type() {
	case fs.ModeSocket:
		kind = strings.TrimSpace("socket " + f.Socket)
	case fs.ModeNamedPipe:
		kind = "FIFO"
	case fs.ModeDir:
		kind = "directory"
	}
	return fmt.Sprintf("%s: %s %04o", f.Name, kind, f.Mode.Perm())
}

// listPipe lists the files of the daemon's pipe folder, with what their types say of who can
// reach the daemon.
func listPipe(ctx context.Context, d *daemon) (files []pipeFile, err error) {
	entries, err := os.ReadDir(d.mps.DaemonPipe)
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		f := pipeFile{Name: e.Name(), Mode: info.Mode()}
		if f.Mode.Type() == fs.ModeSocket {
			f.Socket = socketType(ctx, filepath.Join(d.mps.DaemonPipe, f.Name))
		}
		files = append(files, f)
	}
	return files, err
}

// socketType finds out of what type a socket is by connecting to it.
func socketType(ctx context.Context, path string) string {
	for network, name := range map[string]string{"unixpacket": "SOCK_SEQPACKET", "unix": "SOCK_STREAM", "unixgram": "SOCK_DGRAM"} {
		if connection, err := (&net.Dialer{}).DialContext(ctx, network, path); err == nil {
			_ = connection.Close()
			return name
		}
	}
	return ""
}

// openLimits are how many files the processes of MPS may open.
type openLimits struct {
	Daemon uint64 `json:"daemon"`
	Server uint64 `json:"server"`
}

// readOpenLimits reads the limits that the kernel holds the processes to, which they may have
// raised or lowered themselves.
func readOpenLimits(_ context.Context, d *daemon) (openLimits, error) {
	control, err := d.control()
	if err != nil {
		return openLimits{}, err
	}
	var limits [2]unix.Rlimit
	for i, pid := range []int{control.PID, d.server.PID} {
		if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limits[i]); err != nil {
			return openLimits{}, fmt.Errorf("limit of open files of process %d: %w", pid, err)
		}
	}
	return openLimits{limits[0].Cur, limits[1].Cur}, nil
}

// noClients waits until the daemon lists no client of its server any more: it notices an end late.
func noClients(ctx context.Context, d *daemon) (bool, error) {
	return true, wait.Until(ctx, func() (bool, error) {
		clients, err := d.command(ctx, "get_client_list SERVER")
		return clients == "", err
	})
}

// What is so of a GPU before MPS and after it, other than what the read-only part has read.
var (
	listedBefore = processesOf("processes on GPU %s before MPS")
	modeAfter    = computeModeOf("compute mode of GPU %s after MPS")
	countAfter   = ofGPU("processes on GPU %s after MPS", func(c *nvml.Client, ctx context.Context, pciAddress string) (int, error) {
		found, err := c.Processes(ctx, pciAddress)
		return len(found), err
	})
)

// memoryInUse is what programs have of the memory, in bytes; nil where NVML does not tell.
func memoryInUse(moment string) gpuFact[*uint64] {
	return ofGPU("memory in use of GPU %s "+moment, func(c *nvml.Client, ctx context.Context, pciAddress string) (*uint64, error) {
		facts, err := c.Facts(ctx, pciAddress)
		return facts.UsedBytes, err
	})
}

// recognition is whom the daemon takes a client for.
type recognition struct {
	Servers []string `json:"servers"`
	Clients []string `json:"clients"`
	// Known is true if the client's process ID, as this process sees it, is among them.
	Known bool `json:"known"`
}

// recognize asks the daemon about a client while it runs.
func (d *daemon) recognize(ctx context.Context, s surroundings, user int) (who recognition, err error) {
	run, err := d.hold(ctx, s, probe.Options{User: user, Hold: true})
	if err != nil {
		return who, err
	}
	servers, err := d.command(ctx, "get_server_list")
	clients, clientsErr := d.command(ctx, "get_client_list SERVER")
	if err := errors.Join(err, clientsErr); err != nil {
		return who, err
	}
	who = recognition{Servers: strings.Fields(servers), Clients: strings.Fields(clients)}
	who.Known = slices.Contains(who.Clients, strconv.Itoa(run.PID()))
	_, err = run.Finish(ctx)
	return who, err
}

// aftermath is what is to be seen after the end of one client, while another one runs, or of the server.
type aftermath struct {
	// Victim is what the client noticed that ended, or whose server did, "" if nothing.
	Victim string `json:"victim,omitempty"`
	// Server is the server's state.
	Server string `json:"server"`
	// Bystander is what became of the other client, and Next of one that came after, which could take Taken bytes of memory.
	Bystander string `json:"bystander,omitempty"`
	Next      string `json:"next"`
	Taken     uint64 `json:"taken,omitempty"`
}

func (a aftermath) String() string {
	text := fmt.Sprintf("server %s, other client %s, next client %s", a.Server, a.Bystander, a.Next)
	if a.Bystander == "" {
		text = fmt.Sprintf("server %s, next client %s with %d MiB", a.Server, a.Next, a.Taken/mib)
	}
	if a.Victim != "" {
		text = "the client gets " + a.Victim + "; " + text
	}
	return text
}

const (
	goesOn = "goes on"
	// replaced is the state of a server that was lost and of which there is another one.
	replaced = "replaced"
)

// harmless reports whether nobody but the client that ended has noticed its end.
func (a aftermath) harmless() bool {
	return isActive(a.Server) && a.Bystander == goesOn && a.Next == goesOn
}

// end is a way in which a client ends. It returns what the client said.
type end struct {
	subject string
	safe    bool // whether NVIDIA documents it as such
	do      func(context.Context, *daemon, *probe.Process) ([]probe.Event, error)
}

// ends are those that pods come to: by themselves, by the driver, and by the kernel or the kubelet.
var ends = []end{
	{"at its own wish", true, func(ctx context.Context, _ *daemon, run *probe.Process) ([]probe.Event, error) {
		return run.Finish(ctx)
	}},
	{"terminate_client, then SIGKILL", true, func(ctx context.Context, d *daemon, run *probe.Process) ([]probe.Event, error) {
		if _, err := d.command(ctx, "terminate_client SERVER "+strconv.Itoa(run.PID())); err != nil {
			return nil, err
		}
		events, err := run.Until(ctx, probe.Failed)
		if err == nil {
			_, err = run.Kill(ctx)
		}
		return events, err
	}},
	{"SIGKILL in the middle of its work", false, func(ctx context.Context, _ *daemon, run *probe.Process) ([]probe.Event, error) {
		_, err := run.Kill(ctx)
		return nil, err
	}},
}

// said is the error that a client noticed.
func said(events []probe.Event) string {
	e, _ := probe.Find(events, probe.Failed)
	return e.Result
}

// outcome says what became of a client, as the end of "the client …".
func outcome(events []probe.Event, err error) string {
	if err != nil {
		return "fails: " + err.Error()
	}
	if result := said(events); result != "" {
		return "gets " + result
	}
	return goesOn
}

// atWork is a client that is at work until it ends.
var atWork = probe.Options{Allocate: 64 * mib, Busy: true}

// endClient runs two clients, ends one, and looks at what is left. The next question gets
// another daemon if that one did not bear it.
func endClient(ctx context.Context, d *daemon, e end) (after aftermath, err error) {
	running, kill := context.WithCancel(ctx)
	defer func() {
		kill()
		if err != nil || !after.harmless() {
			_, startErr := d.start(ctx, d.device)
			err = errors.Join(err, startErr)
		}
	}()
	other, err := d.hold(running, surroundings{}, atWork)
	if err != nil {
		return after, fmt.Errorf("start the other client: %w", err)
	}
	client, err := d.hold(running, surroundings{}, atWork)
	if err != nil {
		return after, fmt.Errorf("start the client: %w", err)
	}
	events, err := e.do(ctx, d, client)
	if err != nil {
		return after, err
	}
	after.Victim = said(events)
	if after.Server, err = d.command(ctx, "get_server_status SERVER"); err != nil {
		after.Server = err.Error()
	}
	after.Next = outcome(d.run(ctx, surroundings{}, probe.Options{Allocate: 64 * mib}))
	after.Bystander = outcome(other.Finish(ctx))
	return after, nil
}

// loseServer kills the server while it has a client.
func loseServer(ctx context.Context, d *daemon) (after aftermath, err error) {
	client, err := d.hold(ctx, surroundings{}, atWork)
	if err != nil {
		return after, err
	}
	old := d.server
	if err := old.Signal(unix.SIGKILL); err != nil {
		return after, fmt.Errorf("kill the server: %w", err)
	}
	if events, err := client.Until(ctx, probe.Failed); err == nil {
		after.Victim = said(events)
	}
	if _, err := client.Kill(ctx); err != nil {
		return after, err
	}
	next, err := d.run(ctx, surroundings{}, probe.Options{FillUpTo: unlimitedMiB * mib})
	after.Next, after.Taken = outcome(next, err), taken(next)
	if err = d.awaitServer(ctx); d.server != old {
		after.Server = replaced
	}
	return after, err
}
