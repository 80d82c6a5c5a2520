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
func setLimits(q *inquiry, percentage int, memoryMiB uint64) {
	sendCommand(q, fmt.Sprintf("set_active_thread_percentage SERVER %d", percentage))
	sendCommand(q, fmt.Sprintf("set_device_pinned_mem_limit SERVER 0 %dM", memoryMiB))
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
	// greedy is true for a client that CUDA may refuse. To others a refusal is an error.
	greedy bool
	judge  func(*inquiry, []probe.Event) Finding
}

// run runs the client to its end, and judges what became of it.
func (t *trial) run(q *inquiry) Finding {
	if t.percentage > 0 {
		setLimits(q, t.percentage, t.memoryMiB)
	}
	events := onDaemon(q, Client, t.question, func(ctx context.Context, d *daemon) ([]probe.Event, error) {
		return d.run(ctx, t.around, t.options)
	})
	if q.err == nil && !t.greedy {
		q.err = refusal(events)
	}
	f := t.judge(q, events)
	if f.Expected = t.expected; t.so != "" {
		f = f.because("%s", t.so)
	}
	return f
}

// trials runs trials one after the other.
func trials(list ...trial) func(*inquiry) []Finding {
	return func(q *inquiry) (findings []Finding) {
		for _, t := range list {
			findings = append(findings, q.on(t.subject, t.run)...)
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
		judge: func(q *inquiry, events []probe.Event) Finding {
			got := taken(events)
			contextMemory(&q.measuredOf(q.gpu).mps.ContextMiB, limitMiB*mib, got)
			return expect(got <= limitMiB*mib && got+beyond >= limitMiB*mib, "%d MiB", got/mib)
		},
	}
}

// infoTrial is about what programs read that size themselves by the memory that is free.
var infoTrial = trial{
	question: "a client that takes 64 MiB under a limit of 4096 MiB", percentage: 100, memoryMiB: limitedMiB,
	options: probe.Options{Allocate: 64 * mib},
	judge: func(_ *inquiry, events []probe.Event) Finding {
		device, _ := probe.Find(events, probe.Device)
		memory, _ := probe.Find(events, probe.Memory)
		right := memory.FreeBytes <= limitedMiB*mib && memory.TotalBytes == device.TotalBytes && memory.TotalBytes > limitedMiB*mib
		return expect(right, "after 64 MiB: free %d MiB, total %d MiB", memory.FreeBytes/mib, memory.TotalBytes/mib)
	},
}

// multiprocessors are those of the client's context, where CUDA can tell.
func multiprocessors(events []probe.Event) (sms, whole int, text string) {
	e, _ := probe.Find(events, probe.Context)
	if e.ContextMultiprocessors == 0 {
		return e.Multiprocessors, e.Multiprocessors, ""
	}
	return e.ContextMultiprocessors, e.Multiprocessors, fmt.Sprintf(" for the context, %d for the device", e.Multiprocessors)
}

// checkMultiprocessors begins with the whole device, of which the others get a percentage.
func checkMultiprocessors(q *inquiry) []Finding {
	// coarsest is how many multiprocessors a device may give together: eight is a chunk of
	// static partitions, and two of them are a unit of the hardware.
	const coarsest = 8
	whole := 0 // the device's, which the first client is told
	var list []trial
	for _, percentage := range []int{100, 50, 25, 10} {
		subject := fmt.Sprintf("%d %%", percentage)
		list = append(list, trial{
			subject: subject, question: "a client with an active thread percentage of " + subject, percentage: percentage, memoryMiB: 2048,
			judge: func(_ *inquiry, events []probe.Event) Finding {
				got, device, of := multiprocessors(events)
				if percentage == 100 {
					whole = device
				}
				most := max(1, whole*percentage/100)
				return expect(got <= most && got > most-coarsest, "%d of %d%s", got, whole, of)
			},
		})
	}
	return trials(list...)(q)
}

// checkEnvironment is about clients that set something for themselves under limits of 4096 MiB and 50 %.
func checkEnvironment(q *inquiry) []Finding {
	setLimits(q, limitedPercent, limitedMiB)
	return trials(
		environmentTrial("lower limits", "its own: 2048 MiB, 25 %", 0, 2048, 25, "0=2G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"),
		environmentTrial("higher limits", "the server's: 4096 MiB, 50 %", 0, limitedMiB, limitedPercent, "0=8G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"),
		// Limits of memory are applied by the client's own library, as users have found out.
		environmentTrial("a limit for a device that is not there", "no limit of memory, not even the server's, and 50 %", limitedMiB+1, unlimitedMiB, limitedPercent, "0=2G,7=1G"),
	)(q)
}

// unlimitedMiB is how much memory a client tries to take that may have no limit, in MiB.
const unlimitedMiB = 6 * gib / mib

// environmentTrial expects a client to get from least to most MiB, and a percentage of the
// multiprocessors at most.
func environmentTrial(subject, expected string, leastMiB, mostMiB uint64, percent int, memory string, more ...string) trial {
	return trial{
		subject: subject, question: "a client whose environment has " + subject, expected: expected,
		around:  surroundings{env: append(more, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="+memory)},
		options: probe.Options{FillUpTo: unlimitedMiB * mib},
		judge: func(q *inquiry, events []probe.Event) Finding {
			got, whole := taken(events)/mib, q.gpu.Resources.Multiprocessors
			sms, _, _ := multiprocessors(events)
			right := got >= leastMiB && got <= mostMiB && (whole == 0 || sms <= whole*percent/100) // NVML may not know
			return expect(right, "%d MiB, %d multiprocessors", got, sms)
		},
	}
}

const (
	isLimited = "runs with the limits"
	isFree    = "runs without limits"
	bounded   = "fails, or " + isLimited
)

// isBounded is what the driver needs at least: who fails harms nobody, who has no limits does.
func isBounded(became string) bool { return became != isFree }

// greedy is a client that tries to take more than the limit.
func greedy(subject, question string, around surroundings, right func(became string) bool) trial {
	return trial{
		subject: subject, question: question, percentage: limitedPercent, memoryMiB: limitedMiB, around: around, greedy: true,
		options: probe.Options{Allocate: limitedMiB*mib + 64*mib},
		judge: func(_ *inquiry, events []probe.Event) Finding {
			became := isFree
			if _, refused := probe.Find(events, probe.Refused); refused {
				became = isLimited
			}
			if err := refusal(events); err != nil {
				became = "fails: " + err.Error()
			}
			return expect(right(became), "%s", became)
		},
	}
}

// checkControlAlone finds out what a container must get of the daemon. The less it gets, the less
// it can do to the daemon and to other clients.
func checkControlAlone(q *inquiry) []Finding {
	onDaemon(q, Daemon, "link control into an empty directory", func(_ context.Context, d *daemon) (bool, error) {
		return true, os.Link(filepath.Join(d.mps.DaemonPipe, "control"), filepath.Join(d.mps.ClientPipe, "control"))
	})
	alone := greedy("a directory with control only", "a client in whose pipe directory is control only", surroundings{pipe: controlAlone}, equals(isLimited))
	alone.so = "containers need more of the daemon's files: --extra-container-files of the MPS supervisor gives them"
	// Where the server's memory has no name, as with driver 580, nobody needs the folder.
	own := greedy("another /dev/shm", "a client with a /dev/shm of its own", surroundings{ownMemory: true}, isBounded)
	own.expected, own.so = bounded, "programs get around their limits by another /dev/shm"
	return trials(alone, own)(q)
}

const (
	// container are the namespaces that a pod has of its own.
	container = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET
	nobody    = 65534 // a user
)

// clientTrial also asks whom the daemon takes a client for: the driver ends clients of a pod by
// their process IDs.
func clientTrial(subject string, namespaces uintptr, user int) trial {
	around := surroundings{namespaces: namespaces}
	t := greedy(subject, "a client: "+subject, around, equals(isLimited))
	t.options.User = user
	isClient := t.judge
	t.judge = func(q *inquiry, events []probe.Event) Finding {
		if f := isClient(q, events); f.Verdict == Differs {
			return f.because("such pods cannot use MPS shares")
		}
		who := onDaemon(q, Daemon, "whom it takes a client for: "+subject, func(ctx context.Context, d *daemon) (recognition, error) {
			return d.recognize(ctx, around, user)
		})
		known := map[bool]string{true: "known by its process ID", false: "not known by its process ID"}[who.Known]
		return expect(who.Known && len(who.Servers) == 1, "%s, %s, %d server(s), %d client(s)", isLimited, known, len(who.Servers), len(who.Clients))
	}
	return t
}

// checkMPSEnds ends clients at work. A server that does not bear one end is replaced before the next.
func checkMPSEnds(q *inquiry) (findings []Finding) {
	setLimits(q, limitedPercent, limitedMiB)
	for _, e := range ends {
		findings = append(findings, q.on(e.subject, func(q *inquiry) Finding {
			after := onDaemon(q, Client, "the end of a client: "+e.subject, func(ctx context.Context, d *daemon) (aftermath, error) {
				return endClient(ctx, d, e)
			})
			f := expect(after.harmless(), "%s", after)
			if !e.safe {
				f = f.because("NVIDIA documents it as undefined: a pod that is killed, as by the OOM killer, harms others on the same device")
			}
			return f
		})...)
	}
	return findings
}

// checkMPSServerLost sets limits of future servers first: the one that comes next must have them.
func checkMPSServerLost(q *inquiry) Finding {
	sendCommand(q, "set_default_device_pinned_mem_limit 0 4096M")
	sendCommand(q, "set_default_active_thread_percentage 50")
	after := onDaemon(q, Client, "the end of the server", loseServer)
	right := after.Victim != "" && after.Server == replaced && after.Next == goesOn && after.Taken > 0 && after.Taken <= limitedMiB*mib
	return expect(right, "%s", after)
}
