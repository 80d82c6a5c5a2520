// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/partage-dev/partage/pkg/conformance/probe"
)

const (
	// limitedMiB and limitedPercent are limits that tell a client of MPS from a program outside
	// of it.
	limitedMiB     = 4096
	limitedPercent = 50
	gib            = 1 << 30
)

// setLimits sets what the next clients of the server get.
func setLimits(ctx context.Context, n *Node, percentage int, memoryMiB uint64) error {
	_, err := sendCommand(ctx, n, fmt.Sprintf("set_active_thread_percentage SERVER %d", percentage))
	if err == nil {
		_, err = sendCommand(ctx, n, fmt.Sprintf("set_device_pinned_mem_limit SERVER 0 %dM", memoryMiB))
	}
	return err
}

// trial is a client under limits, and what is to become of it.
type trial struct {
	subject, question string
	// percentage and memoryMiB are limits to set before; none where they are 0.
	percentage int
	memoryMiB  uint64
	// around is what the client finds, and options are what it does.
	around  surroundings
	options probe.Options
	// expected and so are those of the check unless they are set.
	expected, so string
	judge        func(*Node, []probe.Event) Finding
}

// run runs the client to its end.
func (t *trial) run(ctx context.Context, n *Node) ([]probe.Event, error) {
	if t.percentage > 0 {
		if err := setLimits(ctx, n, t.percentage, t.memoryMiB); err != nil {
			return nil, err
		}
	}
	return onDaemon(ctx, n, Client, t.question, func(ctx context.Context, d *daemon) ([]probe.Event, error) {
		return d.run(ctx, t.around, t.options)
	})
}

// finding is what became of it.
func (t *trial) finding(ctx context.Context, n *Node) Finding {
	var f Finding
	if events, err := t.run(ctx, n); err != nil {
		f = failed(err)
	} else {
		f = t.judge(n, events)
	}
	if t.so != "" && !f.failed {
		f = f.because("%s", t.so)
	}
	f.Subject, f.Expected = t.subject, t.expected
	return f
}

// trials runs trials one after the other.
func trials(list func(*Node) []trial) func(context.Context, *Node) []Finding {
	return func(ctx context.Context, n *Node) (findings []Finding) {
		for _, t := range list(n) {
			findings = append(findings, t.finding(ctx, n))
		}
		return findings
	}
}

// refusal is what CUDA did not do for a client, or nil.
func refusal(events []probe.Event) error {
	if e, failed := probe.Find(events, probe.Failed); failed {
		return errors.New(strings.TrimSpace(e.Call + " " + e.Result))
	}
	return nil
}

// granted judges what a client got. One that CUDA refused is an error.
func granted(judge func(*Node, []probe.Event) Finding) func(*Node, []probe.Event) Finding {
	return func(n *Node, events []probe.Event) Finding {
		if err := refusal(events); err != nil {
			return failed(err)
		}
		return judge(n, events)
	}
}

// taken is how much memory a client took, in bytes.
func taken(events []probe.Event) uint64 {
	done, _ := probe.Find(events, probe.Done)
	return done.AllocatedBytes
}

// memoryTrial expects all memory up to the limit, less that of the context, and measures the
// latter.
func memoryTrial(limitMiB uint64) trial {
	// beyond is how much more than its limit the client tries to take, and the most that its
	// context may take of it: a context is some hundred MiB.
	const beyond = gib
	subject := fmt.Sprintf("%d MiB", limitMiB)
	return trial{
		subject: subject, question: "a client that takes all memory under a limit of " + subject, percentage: 100, memoryMiB: limitMiB,
		options: probe.Options{FillUpTo: limitMiB*mib + beyond},
		judge: granted(func(n *Node, events []probe.Event) Finding {
			got := taken(events)
			contextMemory(&n.measuredOf(n.gpu).mps.ContextMiB, limitMiB*mib, got)
			return expect(got <= limitMiB*mib && got+beyond >= limitMiB*mib, "%d MiB", got/mib)
		}),
	}
}

// infoTrial is about what programs read that size themselves by the memory that is free.
var infoTrial = trial{
	question: "a client that takes 64 MiB under a limit of 4096 MiB", percentage: 100, memoryMiB: limitedMiB,
	options: probe.Options{Allocate: 64 * mib},
	judge: granted(func(_ *Node, events []probe.Event) Finding {
		device, _ := probe.Find(events, probe.Device)
		memory, _ := probe.Find(events, probe.Memory)
		right := memory.FreeBytes <= limitedMiB*mib && memory.TotalBytes == device.TotalBytes && memory.TotalBytes > limitedMiB*mib
		return expect(right, "after 64 MiB: free %d MiB, total %d MiB", memory.FreeBytes/mib, memory.TotalBytes/mib)
	}),
}

// multiprocessors are those of the client's context, where CUDA can tell.
func multiprocessors(events []probe.Event) (sms int, text string) {
	e, _ := probe.Find(events, probe.Context)
	if e.ContextMultiprocessors == 0 {
		return e.Multiprocessors, ""
	}
	return e.ContextMultiprocessors, fmt.Sprintf(" for the context, %d for the device", e.Multiprocessors)
}

// coarsest is how many multiprocessors a device may give together: eight is a chunk of
// static partitions, and two of them are a unit of the hardware.
const coarsest = 8

// multiprocessorTrials begins with the whole device, of which the others get a percentage.
func multiprocessorTrials(*Node) (list []trial) {
	whole := 0 // the device's, which the first client is told
	for _, percentage := range []int{100, 50, 25, 10} {
		subject := fmt.Sprintf("%d %%", percentage)
		list = append(list, trial{
			subject: subject, question: "a client with an active thread percentage of " + subject, percentage: percentage, memoryMiB: 2048,
			judge: granted(func(_ *Node, events []probe.Event) Finding {
				if e, _ := probe.Find(events, probe.Context); percentage == 100 {
					whole = e.Multiprocessors
				}
				got, of := multiprocessors(events)
				most := max(1, whole*percentage/100)
				return expect(got <= most && got > most-coarsest, "%d of %d%s", got, whole, of)
			}),
		})
	}
	return list
}

// environmentTrials are of clients that set something for themselves under limits of 4096 MiB
// and 50 %.
func environmentTrials(n *Node) []trial {
	return []trial{
		n.environmentTrial("lower limits", "its own: 2048 MiB, 25 %", 0, 2048, 25, "0=2G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"),
		n.environmentTrial("higher limits", "the server's: 4096 MiB, 50 %", 0, limitedMiB, limitedPercent, "0=8G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"),
		// Limits of memory are applied by the client's own library, as users have found out.
		n.environmentTrial("a limit for a device that is not there", "no limit of memory, not even the server's, and 50 %", limitedMiB+1, unlimitedMiB, limitedPercent, "0=2G,7=1G"),
	}
}

// unlimitedMiB is how much memory a client tries to take that may have no limit, in MiB.
const unlimitedMiB = 6 * gib / mib

// environmentTrial expects a client to get from least to most MiB, and a percentage of the
// multiprocessors at most.
func (n *Node) environmentTrial(subject, expected string, leastMiB, mostMiB uint64, percent int, memory string, more ...string) trial {
	whole := n.gpu.Resources.Multiprocessors
	return trial{
		subject: subject, question: "a client whose environment has " + subject, expected: expected,
		around:  surroundings{env: append(more, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="+memory)},
		options: probe.Options{FillUpTo: unlimitedMiB * mib},
		judge: granted(func(_ *Node, events []probe.Event) Finding {
			got := taken(events) / mib
			sms, _ := multiprocessors(events)
			right := got >= leastMiB && got <= mostMiB && (whole == 0 || sms <= whole*percent/100) // NVML may not know
			return expect(right, "%d MiB, %d multiprocessors", got, sms)
		}),
	}
}

const (
	isLimited = "runs with the limits"
	isFree    = "runs without limits"
	fails     = "fails"
	bounded   = "fails, or " + isLimited
)

// isBounded is what the driver needs at least: who fails harms nobody, who has no limits does.
func isBounded(became string) bool { return became != isFree }

// became says what became of a greedy client.
func became(events []probe.Event) string {
	if err := refusal(events); err != nil {
		return fails + ": " + err.Error()
	}
	if _, refused := probe.Find(events, probe.Refused); refused {
		return isLimited
	}
	return isFree
}

// greedy is a client that tries to take more than the limit.
func greedy(subject, question string, around surroundings, right func(became string) bool) trial {
	return trial{
		subject: subject, question: question, percentage: limitedPercent, memoryMiB: limitedMiB, around: around,
		options: probe.Options{Allocate: limitedMiB*mib + 64*mib},
		judge: func(_ *Node, events []probe.Event) Finding {
			got := became(events)
			return expect(right(got), "%s", got)
		},
	}
}

// checkControlAlone finds out what a container must get of the daemon. The less it gets, the less
// it can do to the daemon and to other clients.
func checkControlAlone(ctx context.Context, n *Node) []Finding {
	_, err := onDaemon(ctx, n, Daemon, "link control into an empty directory", func(_ context.Context, d *daemon) (bool, error) {
		return true, os.Link(filepath.Join(d.mps.DaemonPipe, "control"), filepath.Join(d.mps.ClientPipe, "control"))
	})
	if err != nil {
		return []Finding{failed(err)}
	}
	alone := greedy("a directory with control only", "a client in whose pipe directory is control only", surroundings{pipe: controlAlone}, equals(isLimited))
	alone.so = "containers need more of the daemon's files: --extra-container-files of the MPS supervisor gives them"
	// Where the server's memory has no name, as with driver 580, nobody needs the folder.
	own := greedy("another /dev/shm", "a client with a /dev/shm of its own", surroundings{ownMemory: true}, isBounded)
	own.expected, own.so = bounded, "programs get around their limits by another /dev/shm"
	return []Finding{alone.finding(ctx, n), own.finding(ctx, n)}
}

const (
	nobody = 65534
	// container are the namespaces that a pod has of its own.
	container = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET
)

// clientTrials are the kinds of clients that pods can be.
var clientTrials = []trial{
	clientTrial("root", surroundings{}, 0),
	clientTrial("another user", surroundings{}, nobody),
	clientTrial("namespaces of a container", surroundings{namespaces: container}, 0),
	clientTrial("another user in a container", surroundings{namespaces: container}, nobody),
}

func clientTrial(subject string, around surroundings, user int) trial {
	t := greedy(subject, "a client: "+subject, around, equals(isLimited))
	t.options.User = user
	return t
}

// checkClient also asks whom the daemon takes a client for: the driver ends clients of a pod by
// their process IDs.
func checkClient(ctx context.Context, n *Node, t trial) (Finding, error) {
	events, err := t.run(ctx, n)
	if err != nil {
		return Finding{}, err
	}
	if f := t.judge(n, events); f.Verdict == Differs {
		return f.because("such pods cannot use MPS shares"), nil
	}
	who, err := onDaemon(ctx, n, Daemon, "whom it takes a client for: "+t.subject, func(ctx context.Context, d *daemon) (recognition, error) {
		return d.recognize(ctx, t.around, t.options.User)
	})
	known := "known by its process ID"
	if !who.Known {
		known = "not " + known
	}
	return expect(who.Known && len(who.Servers) == 1, "%s, %s, %d server(s), %d client(s)", isLimited, known, len(who.Servers), len(who.Clients)), err
}

// checkMPSEnds ends clients at work. A server that does not bear one end is replaced before the next.
func checkMPSEnds(ctx context.Context, n *Node) (findings []Finding) {
	if err := setLimits(ctx, n, limitedPercent, limitedMiB); err != nil {
		return []Finding{failed(err).withSubject(ends[0].subject)}
	}
	for _, e := range ends {
		after, err := onDaemon(ctx, n, Client, "the end of a client: "+e.subject, func(ctx context.Context, d *daemon) (aftermath, error) {
			return endClient(ctx, d, e)
		})
		f := expect(after.harmless(), "%s", after)
		if !e.safe {
			f = f.because("NVIDIA documents it as undefined: a pod that is killed, as by the OOM killer, harms others on the same device")
		}
		findings = append(findings, findingOf(f, err).withSubject(e.subject))
	}
	return findings
}

func checkMPSServerLost(ctx context.Context, n *Node) (Finding, error) {
	for _, text := range []string{"set_default_device_pinned_mem_limit 0 4096M", "set_default_active_thread_percentage 50"} {
		if _, err := sendCommand(ctx, n, text); err != nil {
			return Finding{}, err
		}
	}
	got, err := onDaemon(ctx, n, Client, "the end of the server", loseServer)
	right := got.Client != nothing && got.NewServer && got.Next == goesOn && got.Taken > 0 && got.Taken <= limitedMiB*mib
	return expect(right, "%s", got), err
}
