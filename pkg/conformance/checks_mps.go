// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
)

// mpsChecks start MPS on one GPU that nobody uses, in compute mode DEFAULT and in a
// folder of their own. They run in this order, in one session.
var mpsChecks = []Check{
	{
		ID:         "mps.start",
		Assumption: "nvidia-cuda-mps-control -f serves in the foreground, and start_server -uid 0 makes its server ACTIVE before the first client",
		Expected:   "daemon and server start within a minute",
		Code:       "pkg/mps/supervisor/act.go",
		Needed:     true,
		find:       one(checkMPSStart),
	},
	{
		ID:         "mps.files",
		Assumption: "a pipe directory has these files: clients reach control only, and nobody but root control_privileged",
		Expected:   pipeFiles,
		So:         "what clients need, and who can command the daemon, may be others than the driver takes for granted",
		Code:       "pkg/mps/supervisor/sockets.go",
		find: one(func(q *inquiry) Finding {
			var texts []string
			for _, f := range onDaemon(q, Daemon, "files of the pipe directory", listPipe) {
				texts = append(texts, f.String())
			}
			got := strings.Join(texts, ", ")
			return expect(got == pipeFiles, "%s", got)
		}),
	},
	{
		ID:         "mps.nofile",
		Assumption: "daemon and server may open the 16384 files that NVIDIA asks for",
		Expected:   fmt.Sprintf("at least %d", leastOpenFiles),
		So:         `with many clients the server fails with "failed to create/open SHM segment"`,
		Code:       "pkg/mps/supervisor/openfiles.go",
		find: one(func(q *inquiry) Finding {
			found := onDaemon(q, Daemon, "how many files daemon and server may open", readOpenLimits)
			return expect(min(found.Daemon, found.Server) >= leastOpenFiles, "daemon %d, server %d", found.Daemon, found.Server)
		}),
	},
	{
		ID:         "mps.answers",
		Assumption: "the daemon's answers have the form that the driver reads",
		Expected:   "each answer can be read",
		So:         "the driver cannot tell whether the limits of a session are in effect, and refuses MPS claims",
		Code:       "pkg/mps/control",
		find:       checkMPSAnswers,
	},
	{
		ID:         "mps.limits-read-back",
		Assumption: "a limit is read back as it was set, or rounded to the unit in which it is printed",
		Expected:   "the same amount, or what it is in the unit of the answer",
		So:         "the driver takes the limits of a session for somebody else's, and refuses MPS claims",
		Code:       "pkg/mps/control/limits.go",
		find:       readBack("get_device_pinned_mem_limit SERVER 0", "%s: %s", memorySettings()),
	},
	{
		ID:         "mps.client-priority",
		Assumption: "the daemon has a default priority of clients, which is read back as it was set",
		Expected:   "1 is below normal, and 0 normal",
		So:         "policies and claims cannot use client priorities on this node; claims that ask for one are refused",
		Code:       "pkg/mps/control/priority.go",
		// The last one is MPS's own default, so that the clients of later checks are as before.
		find: readBack("get_default_client_priority", "%s: %q", []exchange{
			{"set_default_client_priority 1", "1", is(control.ParsePriority, mps.PriorityBelowNormal)},
			{"set_default_client_priority 0", "0", is(control.ParsePriority, mps.PriorityNormal)},
		}),
	},
	{
		ID:         "mps.memory-limit",
		Assumption: "a client gets its memory limit, less what its context takes, and nothing beyond it",
		Expected:   "less than the limit by at most 1024 MiB, and never more",
		So:         "shares of memory do not bound programs, or programs get less than the driver offers",
		Code:       "pkg/device/share.go",
		find:       trials(memoryTrial(2048), memoryTrial(4096)),
	},
	{
		ID:         "mps.memory-info",
		Assumption: "cuMemGetInfo tells a client its limit as what is free, and the whole device as the total",
		Expected:   "free: the limit of 4096 MiB or less; total: the device's",
		So:         "what the documentation says about programs that size themselves by this is wrong",
		Code:       "docs/concepts/mps.md",
		find:       trials(infoTrial),
	},
	{
		ID:         "mps.multiprocessors",
		Assumption: "an active thread percentage gives a client whole multiprocessors, rounded down",
		Expected:   "the percentage of the multiprocessors, rounded down by less than 8",
		So:         "shares of multiprocessors are not what the driver publishes",
		Code:       "pkg/device/share.go",
		find:       checkMultiprocessors,
	},
	{
		ID:         "mps.client-environment",
		Assumption: "a client can lower its limits by its environment and not raise them, but can void that of memory",
		Expected:   "limits of the environment, up to the server's",
		So:         "what a claim's limits hold against is not what the documentation says",
		Code:       "pkg/driver/cdi/edit",
		find:       checkEnvironment,
	},
	{
		ID:         "mps.without-daemon",
		Assumption: "in compute mode DEFAULT a client that reaches no daemon runs without MPS and without limits; so the driver sets EXCLUSIVE_PROCESS",
		Expected:   isFree,
		So:         "programs that reach no daemon may fail instead, or the daemon is found in another way",
		Code:       "pkg/driver/sharing/effects.go",
		find: trials(
			greedy("another pipe directory", "a client that names a pipe directory without a daemon", surroundings{pipe: nowhere}, equals(isFree)),
		),
	},
	{
		ID:         "mps.control-alone",
		Assumption: "a client needs the socket control, perhaps the server's /dev/shm, and no other file of the daemon",
		Expected:   isLimited,
		Code:       "pkg/mps/supervisor/sockets.go",
		find:       checkControlAlone,
	},
	{
		ID:         "mps.clients",
		Assumption: "programs of other users and in namespaces of their own are clients of the same server, which knows them by their process ID on the host",
		Expected:   isLimited + ", as a client of the one server, by its process ID",
		So:         "the driver cannot tell whose clients the server has",
		Code:       "pkg/mps/supervisor/clients.go",
		find: trials(
			clientTrial("root", 0, 0), clientTrial("another user", 0, nobody),
			clientTrial("namespaces of a container", container, 0), clientTrial("another user in a container", container, nobody),
		),
	},
	{
		ID:         "mps.user-namespace",
		Assumption: "MPS may not work for programs in a user namespace, so the driver refuses such pods; where it does, its limits hold",
		Expected:   bounded,
		So:         "programs get around their limits by a user namespace",
		Code:       "docs/concepts/mps.md",
		find: one(func(q *inquiry) Finding {
			t := greedy("", "a client in a user namespace", surroundings{namespaces: container | syscall.CLONE_NEWUSER}, isBounded)
			f := t.run(q)
			if q.err != nil { // the node may not allow user namespaces
				f, q.err = cannot("%v", q.err), nil
			}
			return f
		}),
	},
	{
		ID:         "mps.ends",
		Assumption: "terminate_client makes the end of a client safe for the others; without it anything may happen",
		Expected:   "server ACTIVE, other client goes on, next client goes on",
		So:         "a pod's end harms others on the same device",
		Code:       "pkg/mps/supervisor/watch.go",
		find:       checkMPSEnds,
	},
	{
		ID:         "mps.server-lost",
		Assumption: "when its server dies, the daemon starts another one for the next client, with the limits of future servers",
		Expected:   "its client gets an error; the next one has another server, and the limit of 4096 MiB",
		So:         "after the end of a server its clients are not told, or the next ones have no limits",
		Code:       "pkg/mps/supervisor/rules/decide.go",
		find:       one(checkMPSServerLost),
	},
	{
		ID:         "mps.quit",
		Assumption: "quit -t 1 ends server and daemon, and nothing of them stays on the GPU",
		Expected:   "both have ended; compute mode and processes are as before",
		So:         "after the last claim a session would keep its device",
		Code:       "pkg/mps/supervisor/daemon.go",
		find:       one(checkMPSQuit),
	},
}

// checkMPSStart also decides whether the other checks can run.
func checkMPSStart(q *inquiry) Finding {
	onDaemon(q, Daemon, "end what an earlier run left", func(ctx context.Context, d *daemon) (bool, error) { return true, d.sweep(ctx) })
	if q.err != nil {
		q.missing = cannot("what an earlier run left cannot be ended")
		return Finding{}
	}
	g, missing := q.chooseGPU()
	if g == nil {
		q.missing = cannot("%s", missing)
		return q.missing
	}
	q.gpu = g
	took := onDaemon(q, Daemon, "start daemon and server", func(ctx context.Context, d *daemon) (daemonStart, error) {
		return d.start(ctx, g.UUID)
	})
	if q.err != nil {
		q.missing = cannot("MPS could not be started")
	}
	q.measuredOf(g).serverStart, _ = time.ParseDuration(took.ServerTook)
	return expect(true, "daemon %s, server %s", took.DaemonTook, took.ServerTook).withSubject(g.PCIAddress)
}

// sendCommand sends a command of the driver to the daemon. In the answer, too, serverWord stands for the server.
func sendCommand(q *inquiry, text string) string {
	return onDaemon(q, Daemon, text, func(ctx context.Context, d *daemon) (string, error) {
		answer, err := d.command(ctx, text)
		return strings.ReplaceAll(answer, strconv.Itoa(d.server.PID), serverWord), err
	})
}

// exchange is a command that the driver sends, and whether an answer has what it reads: one of
// a form, or a value that was set.
type exchange struct {
	command, want string
	right         func(answer string) bool
}

func equals(want string) func(string) bool { return func(got string) bool { return got == want } }
func anything(string) bool                 { return true }

// is reports whether an answer has a value in the form that the driver reads.
func is[T comparable](parse func(string) (T, error), want T) func(string) bool {
	return func(answer string) bool {
		got, err := parse(answer)
		return err == nil && got == want
	}
}

// confirms is for amounts of memory, which may be rounded.
func confirms(want int64) func(string) bool {
	return func(answer string) bool {
		got, err := control.ParseMemory(answer)
		return err == nil && got.Confirms(want)
	}
}

// exchanges are all commands that set or query something. The limits are such that every
// driver can express them.
var exchanges = []exchange{
	{"get_server_list", "the server's PID", equals(serverWord)},
	{"get_server_status SERVER", "ACTIVE", isActive},
	{"get_client_list SERVER", "nothing, without clients", equals("")},
	{"set_default_active_thread_percentage 50", "anything", anything},
	{"get_default_active_thread_percentage", "50 as a number", is(control.ParsePercentage, 50)},
	{"set_active_thread_percentage SERVER 50", "anything", anything},
	{"get_active_thread_percentage SERVER", "50 as a number", is(control.ParsePercentage, 50)},
	{"set_default_device_pinned_mem_limit 0 2048M", "anything", anything},
	{"get_default_device_pinned_mem_limit 0", "2 GiB with a unit", confirms(2 * gib)},
	{"set_device_pinned_mem_limit SERVER 0 2048M", "anything", anything},
	{"get_device_pinned_mem_limit SERVER 0", "2 GiB with a unit", confirms(2 * gib)},
}

// checkMPSAnswers judges each answer by itself, so that a report names the command whose form has
// changed with the driver.
func checkMPSAnswers(q *inquiry) (findings []Finding) {
	for _, x := range exchanges {
		findings = append(findings, q.on(x.command, func(q *inquiry) Finding {
			answer := sendCommand(q, x.command)
			f := expect(x.right(answer), "%q", answer)
			f.Expected = x.want
			return f
		})...)
	}
	return findings
}

// memorySettings are limits in MiB: whole gibibytes, and such that no coarser unit expresses.
func memorySettings() (settings []exchange) {
	for _, size := range []int64{512, 1000, 1536, 5120, 20350} {
		value := fmt.Sprintf("%dM", size)
		settings = append(settings, exchange{"set_device_pinned_mem_limit SERVER 0 " + value, value, confirms(size * mib)})
	}
	return settings
}

// readBack sets and queries, and lists values and answers by a format.
func readBack(query, format string, settings []exchange) func(*inquiry) []Finding {
	return one(func(q *inquiry) Finding {
		var texts []string
		right := true
		for _, s := range settings {
			sendCommand(q, s.command)
			answer := sendCommand(q, query)
			right = right && s.right(answer)
			texts = append(texts, fmt.Sprintf(format, s.want, answer))
		}
		return expect(right, "%s", strings.Join(texts, ", "))
	})
}

// checkMPSQuit also compares who uses the GPU, and how, with what it was before MPS: nobody,
// in compute mode DEFAULT.
func checkMPSQuit(q *inquiry) Finding {
	g, measuring := q.gpu, q.anew() // nothing follows from an error of the latter
	onDaemon(measuring, Daemon, "end of the last client", noClients)
	before := memoryInUse("before the end of MPS")(g).of(measuring)
	left := onDaemon(q, Daemon, "quit -t 1", func(ctx context.Context, d *daemon) (string, error) { return d.quit(ctx) })
	after := memoryInUse("after the end of MPS")(g).of(measuring)
	if q.err == nil && left == "" && before != nil && after != nil && *before > *after {
		q.measuredOf(g).mps.ServerMiB = new((*before - *after) / mib)
	}
	mode, count := modeAfter(g).of(q), countAfter(g).of(q)
	observed := fmt.Sprintf("compute mode %s, %d processes", mode, count)
	if left != "" {
		observed = left + "; " + observed
	}
	return expect(left == "" && mode == gpu.ComputeDefault && count == 0, "%s", observed).withSubject(g.PCIAddress)
}
