// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/cuda/probe"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/wait"
)

// finish asks a program that is held to end, and returns what it said.
func (l *lab) finish(ctx context.Context, name string) ([]probe.Event, error) {
	run, err := l.release(name)
	if err != nil {
		return nil, err
	}
	return run.Finish(ctx)
}

// aftermath is what is to be seen after the end of one client, while another one runs.
type aftermath struct {
	// Victim is what the client noticed that ended, "" if nothing.
	Victim string `json:"victim,omitempty"`
	// Server is the server's state.
	Server string `json:"server"`
	// Bystander is what became of the other client, and Next of one that came after.
	Bystander string `json:"bystander"`
	Next      string `json:"next"`
}

func (a aftermath) String() string {
	text := fmt.Sprintf("server %s, other client %s, next client %s", a.Server, a.Bystander, a.Next)
	if a.Victim != "" {
		text = "the client gets " + a.Victim + "; " + text
	}
	return text
}

const (
	goesOn = "goes on"
	active = "ACTIVE"
)

func (a aftermath) harmless() bool {
	return a.Server == active && a.Bystander == goesOn && a.Next == goesOn
}

// end is a way in which a client ends. It returns what the client noticed of it.
type end struct {
	subject string
	safe    bool // whether NVIDIA documents it as such
	do      func(ctx context.Context, l *lab) (string, error)
}

const victim, bystander = "client", "other client"

var ends = []end{
	{"at its own wish", true, func(ctx context.Context, l *lab) (string, error) {
		events, err := l.finish(ctx, victim)
		return said(events), err
	}},
	{"terminate_client, then SIGKILL", true, func(ctx context.Context, l *lab) (string, error) {
		run, err := l.release(victim)
		if err != nil {
			return "", err
		}
		if _, err := l.command(ctx, "terminate_client SERVER "+strconv.Itoa(run.PID())); err != nil {
			return "", errors.Join(err, unix.Kill(run.PID(), unix.SIGKILL))
		}
		events, err := run.Until(ctx, probe.Failed)
		if err != nil {
			return "", err
		}
		_, err = run.Kill(ctx)
		return said(events), err
	}},
	{"SIGKILL in the middle of its work", false, func(ctx context.Context, l *lab) (string, error) {
		run, err := l.release(victim)
		if err != nil {
			return "", err
		}
		_, err = run.Kill(ctx)
		return "", err
	}},
}

// said is the error that a client noticed.
func said(events []probe.Event) string {
	if e, failed := probe.Find(events, probe.Failed); failed {
		return e.Result
	}
	return ""
}

func checkMPSEnds(ctx context.Context, n *Node) []Finding {
	if f := n.started("server ACTIVE, others go on"); f != nil {
		return f
	}
	err := n.limit(ctx, 50, limited)
	var findings []Finding
	for _, e := range ends {
		const expected = "server ACTIVE, other client goes on, next client goes on"
		if err != nil {
			return []Finding{Failed(e.subject, expected, err)}
		}
		after, err := inLab(ctx, n, Client, "the end of a client: "+e.subject, func(ctx context.Context, l *lab) (aftermath, error) {
			return l.end(ctx, e)
		})
		if err != nil {
			findings = append(findings, Failed(e.subject, expected, err))
			continue
		}
		f := Expect(e.subject, after.harmless(), expected, after.String())
		if e.safe {
			f = f.Because("a pod's end harms others on the same device")
		} else {
			f = f.Because("NVIDIA documents it as undefined: a pod that is killed, as by the OOM killer, harms others on the same device")
		}
		findings = append(findings, f)
	}
	return findings
}

// end runs two clients, ends one, and looks at what is left.
func (l *lab) end(ctx context.Context, e end) (aftermath, error) {
	work := probe.Options{Allocate: probe.Sizes{64 * mebibyte}, Busy: true}
	for _, name := range []string{bystander, victim} {
		if err := l.hold(ctx, name, surroundings{}, work); err != nil {
			return aftermath{}, errors.Join(fmt.Errorf("start the %s: %w", name, err), l.recover(ctx))
		}
	}
	var after aftermath
	var err error
	if after.Victim, err = e.do(ctx, l); err != nil {
		return aftermath{}, errors.Join(err, l.recover(ctx))
	}
	after.Server = l.state(ctx)
	next, err := l.probe(ctx, surroundings{}, probe.Options{Allocate: probe.Sizes{64 * mebibyte}})
	after.Next = outcome(next, err)
	other, err := l.finish(ctx, bystander)
	after.Bystander = outcome(other, err)
	if after.harmless() {
		return after, nil
	}
	return after, l.recover(ctx)
}

// state is the server's, once the daemon has noticed what happened.
func (l *lab) state(ctx context.Context) string {
	answer, err := l.command(ctx, "get_server_status "+serverWord)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(answer, strconv.Itoa(l.server.PID), serverWord)
}

func outcome(events []probe.Event, err error) string {
	if err != nil {
		return "fails: " + err.Error()
	}
	if result := said(events); result != "" {
		return "gets " + result
	}
	return goesOn
}

// recover replaces the server, since it may not be as it was and yet say that it is.
func (l *lab) recover(ctx context.Context) error {
	for name := range l.held {
		if run, err := l.release(name); err == nil {
			_, _ = run.Kill(ctx)
		}
	}
	if err := l.server.Signal(unix.SIGKILL); err != nil {
		return fmt.Errorf("replace the server: %w", err)
	}
	gone := func() (bool, error) { return !l.server.Alive(), nil }
	if err := wait.Until(ctx, gone); err != nil {
		return fmt.Errorf("the server does not end: %w", err)
	}
	if err := l.startServer(ctx); err != nil {
		return fmt.Errorf("replace the server: %w", err)
	}
	return nil
}

// loss is what is to be seen after the end of a server.
type loss struct {
	// Client is what its client noticed.
	Client string `json:"client"`
	// Next is what became of the next client, and NewServer whether it has another one.
	Next      string `json:"next"`
	NewServer bool   `json:"newServer"`
	// Taken is how much memory it could take, in bytes.
	Taken uint64 `json:"taken"`
}

func (l loss) String() string {
	text := fmt.Sprintf("its client gets %s; the next one %s", l.Client, l.Next)
	if l.NewServer {
		text += " with another server"
	}
	return fmt.Sprintf("%s and %d MiB", text, l.Taken/mebibyte)
}

func checkMPSServerLost(ctx context.Context, n *Node) []Finding {
	const expected = "its client gets an error; the next one has another server, and the limit of 4096 MiB"
	if f := n.started(expected); f != nil {
		return f
	}
	for _, command := range []string{"set_default_device_pinned_mem_limit 0 4096M", "set_default_active_thread_percentage 50"} {
		if _, err := n.ask(ctx, command); err != nil {
			return []Finding{Failed("", expected, err)}
		}
	}
	got, err := inLab(ctx, n, Client, "the end of the server", func(ctx context.Context, l *lab) (loss, error) { return l.lose(ctx) })
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	right := got.Client != "nothing" && got.NewServer && got.Next == goesOn && got.Taken > 0 && got.Taken <= limited*mebibyte
	return []Finding{Expect("", right, expected, got.String()).
		Because("after the end of a server its clients are not told, or the next ones have no limits")}
}

// lose kills the server while it has a client.
func (l *lab) lose(ctx context.Context) (loss, error) {
	if err := l.hold(ctx, victim, surroundings{}, probe.Options{Allocate: probe.Sizes{64 * mebibyte}, Busy: true}); err != nil {
		return loss{}, err
	}
	old := l.server
	if err := old.Signal(unix.SIGKILL); err != nil {
		return loss{}, fmt.Errorf("kill the server: %w", err)
	}
	run, err := l.release(victim)
	if err != nil {
		return loss{}, err
	}
	got := loss{Client: "nothing"}
	events, err := run.Until(ctx, probe.Failed)
	if err == nil && said(events) != "" {
		got.Client = said(events)
	}
	if _, err := run.Kill(ctx); err != nil {
		return loss{}, err
	}
	next, err := l.probe(ctx, surroundings{}, probe.Options{FillUpTo: probe.Sizes{6 * gibibyte}})
	got.Next, got.Taken = outcome(next, err), taken(next)
	if err := l.awaitServer(ctx); err != nil {
		return got, err
	}
	got.NewServer = l.server != old
	return got, nil
}

func checkMPSQuit(ctx context.Context, n *Node) []Finding {
	const expected = "both have ended; compute mode and processes are as before"
	if f := n.started(expected); f != nil {
		return f
	}
	g := n.labGPU(ctx).gpu
	before, memoryErr := n.serverMemory(ctx, g)
	how, err := inLab(ctx, n, Daemon, "quit -t 1", func(ctx context.Context, l *lab) (string, error) { return l.quit(ctx) })
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	if after, err := n.memoryInUse(ctx, g, "after the end of MPS"); err == nil && memoryErr == nil && how == "" {
		n.measuredOf(g).server(before, after)
	}
	observed, same, err := n.asBefore(ctx, g)
	if err != nil {
		return []Finding{Failed(g.PCIAddress, expected, err)}
	}
	return []Finding{Expect(g.PCIAddress, how == "" && same, expected, strings.TrimPrefix(how+"; "+observed, "; ")).
		Because("after the last claim a session would keep its device")}
}

// quit ends the daemon, and says what did not end.
func (l *lab) quit(ctx context.Context) (string, error) {
	if _, err := l.run(ctx, "quit -t 1"); err != nil {
		return "", err
	}
	server := l.server
	err := wait.Until(ctx, func() (bool, error) {
		select {
		case <-l.ended:
		default:
			return false, nil
		}
		return !server.Alive(), nil
	})
	if err != nil {
		return "daemon or server go on", nil //nolint:nilerr // that is the answer
	}
	return "", nil
}

// asBefore compares who uses the GPU, and how, with what it was before MPS: nobody, in
// compute mode DEFAULT.
func (n *Node) asBefore(ctx context.Context, g *gpu.GPU) (observed string, same bool, err error) {
	mode, err := Ask(ctx, n, NVML, "compute mode of GPU "+g.PCIAddress+" after MPS", func(ctx context.Context) (gpu.ComputeMode, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return "", err
		}
		return hardware.ComputeMode(ctx, g.PCIAddress, "")
	})
	if err != nil {
		return "", false, err
	}
	count, err := Ask(ctx, n, NVML, "processes on GPU "+g.PCIAddress+" after MPS", func(ctx context.Context) (int, error) {
		hardware, err := n.Hardware(ctx)
		if err != nil {
			return 0, err
		}
		found, err := hardware.Processes(ctx, g.PCIAddress)
		return len(found), err
	})
	if err != nil {
		return "", false, err
	}
	return fmt.Sprintf("compute mode %s, %d processes", mode, count), mode == gpu.ComputeDefault && count == 0, nil
}
