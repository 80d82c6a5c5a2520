// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/pkg/cuda/probe"
	"github.com/partage-dev/partage/pkg/mps/control"
)

// ask sends a command of the driver to the daemon.
func (n *Node) ask(ctx context.Context, command string) (string, error) {
	return inLab(ctx, n, Daemon, command, func(ctx context.Context, l *lab) (string, error) {
		answer, err := l.command(ctx, command)
		// So that an answer can be compared: the PID is another one each time.
		return strings.ReplaceAll(answer, strconv.Itoa(l.server.PID), serverWord), err
	})
}

// exchange is a command that the driver sends, and what it reads of the answer.
type exchange struct {
	command, form string
	right         func(answer string) bool
}

func percentageIs(want float64) func(string) bool {
	return func(answer string) bool {
		got, err := control.ParsePercentage(answer)
		return err == nil && got == want
	}
}

func memoryIs(want int64) func(string) bool {
	return func(answer string) bool {
		got, err := control.ParseMemory(answer)
		return err == nil && got.Bytes == want
	}
}

func anything(string) bool { return true }

const (
	mebibyte = 1 << 20
	gibibyte = 1 << 30
)

// exchanges are all commands that set or query something. The limits are such that every
// driver can express them.
var exchanges = []exchange{
	{"get_server_list", "the server's PID", func(a string) bool { return a == serverWord }},
	{"get_server_status SERVER", "ACTIVE", func(a string) bool { return strings.Contains(strings.ToUpper(a), string(control.StateActive)) }},
	{"get_client_list SERVER", "nothing, without clients", func(a string) bool { return a == "" }},
	{"set_default_active_thread_percentage 50", "anything", anything},
	{"get_default_active_thread_percentage", "50 as a number", percentageIs(50)},
	{"set_active_thread_percentage SERVER 50", "anything", anything},
	{"get_active_thread_percentage SERVER", "50 as a number", percentageIs(50)},
	{"set_default_device_pinned_mem_limit 0 2048M", "anything", anything},
	{"get_default_device_pinned_mem_limit 0", "2 GiB with a unit", memoryIs(2 * gibibyte)},
	{"set_device_pinned_mem_limit SERVER 0 2048M", "anything", anything},
	{"get_device_pinned_mem_limit SERVER 0", "2 GiB with a unit", memoryIs(2 * gibibyte)},
}

func checkMPSAnswers(ctx context.Context, n *Node) []Finding {
	if f := n.started("each answer can be read"); f != nil {
		return f
	}
	var findings []Finding
	for _, x := range exchanges {
		answer, err := n.ask(ctx, x.command)
		if err != nil {
			findings = append(findings, Failed(x.command, x.form, err))
			continue
		}
		findings = append(findings, Expect(x.command, x.right(answer), x.form, fmt.Sprintf("%q", answer)).
			Because("the driver cannot tell whether the limits of a session are in effect, and refuses MPS claims"))
	}
	return findings
}

// readBack are limits in MiB: whole gibibytes, and such that no coarser unit expresses.
var readBack = []int64{512, 1000, 1536, 5120, 20350}

func checkMPSReadBack(ctx context.Context, n *Node) []Finding {
	const expected = "the same amount, or what it is in the unit of the answer"
	if f := n.started(expected); f != nil {
		return f
	}
	var texts []string
	confirmed := true
	for _, size := range readBack {
		if _, err := n.ask(ctx, fmt.Sprintf("set_device_pinned_mem_limit SERVER 0 %dM", size)); err != nil {
			return []Finding{Failed("", expected, err)}
		}
		answer, err := n.ask(ctx, "get_device_pinned_mem_limit SERVER 0")
		if err != nil {
			return []Finding{Failed("", expected, err)}
		}
		got, err := control.ParseMemory(answer)
		confirmed = confirmed && err == nil && got.Confirms(size*mebibyte)
		texts = append(texts, fmt.Sprintf("%dM: %s", size, answer))
	}
	return []Finding{Expect("", confirmed, expected, strings.Join(texts, ", ")).
		Because("the driver takes the limits of a session for somebody else's, and refuses MPS claims")}
}

// limit sets what the next clients of the server get.
func (n *Node) limit(ctx context.Context, percentage int, memoryMiB int64) error {
	_, err := n.ask(ctx, fmt.Sprintf("set_active_thread_percentage SERVER %d", percentage))
	if err != nil {
		return err
	}
	_, err = n.ask(ctx, fmt.Sprintf("set_device_pinned_mem_limit SERVER 0 %dM", memoryMiB))
	return err
}

// probed runs a client with limits and returns what it said. A client that CUDA refused
// is an error.
func (n *Node) probed(ctx context.Context, question string, s surroundings, o probe.Options) ([]probe.Event, error) {
	events, err := inLab(ctx, n, Client, question, func(ctx context.Context, l *lab) ([]probe.Event, error) {
		return l.probe(ctx, s, o)
	})
	if err != nil {
		return nil, err
	}
	if e, failed := probe.Find(events, probe.Failed); failed {
		return events, refusal(e)
	}
	return events, nil
}

// refusedError says that CUDA did not do what a client wanted.
type refusedError struct{ text string }

func (e refusedError) Error() string { return e.text }

func refusal(e probe.Event) error { return refusedError{strings.TrimSpace(e.Call + " " + e.Result)} }

// taken is how much memory a client took.
func taken(events []probe.Event) uint64 {
	done, _ := probe.Find(events, probe.Done)
	return done.AllocatedBytes
}

// beyond is how much more than its limit a client tries to take, and the most that its
// context may take of it: a context is some hundred MiB.
const beyond = gibibyte

func checkMPSMemoryLimit(ctx context.Context, n *Node) []Finding {
	const expected = "less than the limit by at most 1024 MiB, and never more"
	if f := n.started(expected); f != nil {
		return f
	}
	var findings []Finding
	for _, limit := range []int64{2048, 4096} {
		subject := fmt.Sprintf("%d MiB", limit)
		err := n.limit(ctx, 100, limit)
		if err != nil {
			findings = append(findings, Failed(subject, expected, err))
			continue
		}
		events, err := n.probed(ctx, "a client that takes all memory under a limit of "+subject, surroundings{},
			probe.Options{FillUpTo: probe.Sizes{uint64(limit*mebibyte + beyond)}})
		if err != nil {
			findings = append(findings, Failed(subject, expected, err))
			continue
		}
		bytes := limit * mebibyte
		got := int64(taken(events))
		contextMemory(&n.measuredOf(n.labGPU(ctx).gpu).mps.ContextMiB, limit, uint64(got))
		findings = append(findings, Expect(subject, got <= bytes && got >= bytes-beyond, expected, fmt.Sprintf("%d MiB", got/mebibyte)).
			Because("shares of memory do not bound programs, or programs get less than the driver offers"))
	}
	return findings
}

func checkMPSMemoryInfo(ctx context.Context, n *Node) []Finding {
	const expected = "free: the limit of 4096 MiB or less; total: the device's"
	if f := n.started(expected); f != nil {
		return f
	}
	if err := n.limit(ctx, 100, limited); err != nil {
		return []Finding{Failed("", expected, err)}
	}
	events, err := n.probed(ctx, "a client that takes 64 MiB under a limit of 4096 MiB", surroundings{}, probe.Options{Allocate: probe.Sizes{64 * mebibyte}})
	if err != nil {
		return []Finding{Failed("", expected, err)}
	}
	device, _ := probe.Find(events, probe.Device)
	memory, _ := probe.Find(events, probe.Memory)
	observed := fmt.Sprintf("after 64 MiB: free %d MiB, total %d MiB", memory.FreeBytes/mebibyte, memory.TotalBytes/mebibyte)
	return []Finding{Expect("", memory.FreeBytes <= limited*mebibyte && memory.TotalBytes == device.TotalBytes && memory.TotalBytes > limited*mebibyte, expected, observed).
		Because("what the documentation says about programs that size themselves by this is wrong")}
}

// coarsest is how many multiprocessors a device may give together: eight is a chunk of
// static partitions, and two of them are a unit of the hardware.
const coarsest = 8

func checkMPSMultiprocessors(ctx context.Context, n *Node) []Finding {
	const expected = "the percentage of the multiprocessors, rounded down by less than 8"
	if f := n.started(expected); f != nil {
		return f
	}
	whole := 0
	var findings []Finding
	for _, percentage := range []int{100, 50, 25, 10} {
		subject := fmt.Sprintf("%d %%", percentage)
		err := n.limit(ctx, percentage, 2048)
		if err != nil {
			findings = append(findings, Failed(subject, expected, err))
			continue
		}
		events, err := n.probed(ctx, "a client with an active thread percentage of "+subject, surroundings{}, probe.Options{})
		if err != nil {
			findings = append(findings, Failed(subject, expected, err))
			continue
		}
		e, _ := probe.Find(events, probe.Context)
		if percentage == 100 {
			whole = e.Multiprocessors
		}
		got := e.Multiprocessors
		if e.ContextMultiprocessors > 0 {
			got = e.ContextMultiprocessors
		}
		most := max(1, whole*percentage/100)
		findings = append(findings, Expect(subject, got <= most && got > most-coarsest, expected, multiprocessors(e, whole)).
			Because("shares of multiprocessors are not what the driver publishes"))
	}
	return findings
}

func multiprocessors(e probe.Event, whole int) string {
	if e.ContextMultiprocessors == 0 {
		return fmt.Sprintf("%d of %d", e.Multiprocessors, whole)
	}
	return fmt.Sprintf("%d of %d for the context, %d for the device", e.ContextMultiprocessors, whole, e.Multiprocessors)
}

// environment is what a client sets for itself under limits of 4096 MiB and 50 %.
type environment struct {
	subject  string
	env      []string
	expected string
	least    uint64 // of the memory that it can take, in MiB
	most     uint64
	percent  int // of the multiprocessors at most
}

var environments = []environment{
	{"lower limits", []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"}, "its own: 2048 MiB, 25 %", 0, 2048, 25},
	{"higher limits", []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8G", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"}, "the server's: 4096 MiB, 50 %", 0, limited, 50},
	{
		// Limits of memory are applied by the client's own library, as users have found out.
		"a limit for a device that is not there", []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G,7=1G"},
		"no limit of memory, not even the server's, and 50 %", limited + 1, 6 * gibibyte / mebibyte, 50,
	},
}

func checkMPSEnvironment(ctx context.Context, n *Node) []Finding {
	if f := n.started("limits of the environment, up to the server's"); f != nil {
		return f
	}
	var findings []Finding
	err := n.limit(ctx, 50, limited)
	for _, e := range environments {
		if err != nil {
			return []Finding{Failed("", e.expected, err)}
		}
		events, err := n.probed(ctx, "a client whose environment has "+e.subject, surroundings{env: e.env}, probe.Options{FillUpTo: probe.Sizes{6 * gibibyte}})
		if err != nil {
			findings = append(findings, Failed(e.subject, e.expected, err))
			continue
		}
		context, _ := probe.Find(events, probe.Context)
		got := taken(events) / mebibyte
		sms := context.Multiprocessors
		if context.ContextMultiprocessors > 0 {
			sms = context.ContextMultiprocessors
		}
		right := got >= e.least && got <= e.most && sms <= n.wholeMultiprocessors()*e.percent/100
		findings = append(findings, Expect(e.subject, right, e.expected, fmt.Sprintf("%d MiB, %d multiprocessors", got, sms)).
			Because("what a claim's limits hold against is not what the documentation says"))
	}
	return findings
}

// wholeMultiprocessors are those of the GPU that part B works on.
func (n *Node) wholeMultiprocessors() int {
	const most = 1 << 16 // where NVML does not say
	if n.labChoice == nil || n.labChoice.gpu == nil || n.labChoice.gpu.Resources.Multiprocessors == 0 {
		return most
	}
	return n.labChoice.gpu.Resources.Multiprocessors
}
