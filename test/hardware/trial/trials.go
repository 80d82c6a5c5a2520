// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package trial

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/conformance/probe"
)

const (
	mebibyte = 1 << 20
	gibibyte = 1 << 30
	// ordinary are the limits under which clients are told from programs without MPS.
	ordinaryMiB, ordinaryPercentage = 1536, 50
)

// trials in the order in which they are made.
var trials = slices.Concat(
	[]trial{
		{"server", "what does the server say, and what has a client without limits?", tryServer},
		{"command client", "does the command client work in the daemon's /dev/shm?", tryCommands},
		{"command client, own shm", "does the command client work with another /dev/shm than the daemon's?", tryCommandsElsewhere},
	},
	memoryTrials("512M", "1100M", "1536M", "5G"), percentageTrials(10, 25, 33, 50),
	[]trial{
		{"control alone", "is a program a client where the pipe directory has nothing but control?", tryControlAlone},
		{"client, own shm", "is a program a client with another /dev/shm than the server's?", tryOtherMemory},
		{"same PID twice", "are two programs that both are process 1 of their PID namespace told apart?", trySamePID},
		{"uid 1000", "is a program of another user a client?", tryOtherUser},
		{"absent device", "what memory has a client whose own limits name a device that is not there?", tryAbsentDevice},
		{"idle client ends", "what do others notice of a client that ends?", tryEnd(finish)},
		{"idle client killed", "what do others notice of a client that is killed while it has nothing to do?", tryEnd(kill)},
		{"terminate_client", "what do client and others notice of terminate_client?", tryEnd(terminate)},
	},
)

// limit sets what the server's next clients get.
func (l *lab) limit(ctx context.Context, percentage int, memory string) (string, error) {
	p, err := l.ask(ctx, fmt.Sprintf("set_active_thread_percentage %s %d", l.server, percentage))
	if err != nil {
		return "", err
	}
	m, err := l.ask(ctx, fmt.Sprintf("set_device_pinned_mem_limit %s 0 %s", l.server, memory))
	return fmt.Sprintf("set: %q %q", p, m), err
}

func (l *lab) ordinary(ctx context.Context) error {
	_, err := l.limit(ctx, ordinaryPercentage, strconv.Itoa(ordinaryMiB)+"M")
	return err
}

// said is what a CUDA program got.
func said(events []probe.Event, err error) string {
	if err != nil {
		return "fails: " + err.Error()
	}
	if e, failed := probe.Find(events, probe.Failed); failed {
		return strings.TrimSpace("fails: " + e.Call + " " + e.Result)
	}
	c, _ := probe.Find(events, probe.Context)
	done, _ := probe.Find(events, probe.Done)
	text := fmt.Sprintf("%d multiprocessors; took %d MiB", c.Multiprocessors, done.AllocatedBytes/mebibyte)
	if c.ContextMultiprocessors > 0 {
		text = fmt.Sprintf("%d multiprocessors of the context; %s", c.ContextMultiprocessors, text)
	}
	if i := slices.IndexFunc(events, func(e probe.Event) bool { return e.Kind == probe.Memory }); i >= 0 {
		text += fmt.Sprintf("; memory before that: free %d MiB, total %d MiB", events[i].FreeBytes/mebibyte, events[i].TotalBytes/mebibyte)
	}
	return text
}

// upTo takes memory up to more than a limit.
func upTo(limit uint64) probe.Options {
	return probe.Options{FillUpTo: limit + gibibyte}
}

// membership says whether a program is a client, which the limits tell.
func (l *lab) membership(ctx context.Context, c client) (string, error) {
	if err := l.ordinary(ctx); err != nil {
		return "", err
	}
	shm, user := c.SharedMemory, c.User
	c.Options = upTo(ordinaryMiB * mebibyte)
	c.SharedMemory, c.User = shm, user
	events, err := l.run(ctx, c)
	text := said(events, err)
	done, ok := probe.Find(events, probe.Done)
	switch {
	case !ok:
		return text, nil
	case done.AllocatedBytes <= ordinaryMiB*mebibyte:
		return "a client with the limits: " + text, nil
	}
	return "not within the limit of memory: " + text, nil
}

func tryServer(ctx context.Context, l *lab) (string, error) {
	status, err := l.ask(ctx, "get_server_status "+l.server)
	if err != nil {
		return "", err
	}
	events, err := l.run(ctx, client{})
	c, _ := probe.Find(events, probe.Context)
	l.whole = c.Multiprocessors
	return fmt.Sprintf("status %q; a client: %s", status, said(events, err)), nil
}

var commands = []string{"get_server_list", "get_server_status SERVER", "get_default_active_thread_percentage", "get_client_list SERVER"}

func (l *lab) converse(ask func(command string) (string, error)) string {
	var texts []string
	for _, command := range commands {
		answer, err := ask(strings.ReplaceAll(command, "SERVER", l.server))
		if err != nil {
			texts = append(texts, fmt.Sprintf("%s: %v", command, err))
			continue
		}
		if answer == l.server {
			answer = "SERVER"
		}
		texts = append(texts, fmt.Sprintf("%s: %q", command, answer))
	}
	return strings.Join(texts, "; ")
}

func tryCommands(ctx context.Context, l *lab) (string, error) {
	return l.converse(func(command string) (string, error) { return l.ask(ctx, command) }), nil
}

func tryCommandsElsewhere(ctx context.Context, l *lab) (string, error) {
	if l.private != nil {
		return "", cannotError{l.private}
	}
	return l.converse(func(command string) (string, error) { return l.askFrom(ctx, l.otherShm(), command) }), nil
}

func memoryTrials(limits ...string) []trial {
	var all []trial
	for _, limit := range limits {
		all = append(all, trial{"memory " + limit, "how is this limit set, read back and applied?", func(ctx context.Context, l *lab) (string, error) {
			set, err := l.limit(ctx, 100, limit)
			if err != nil {
				return "", err
			}
			got, err := l.ask(ctx, "get_device_pinned_mem_limit "+l.server+" 0")
			if err != nil {
				return "", err
			}
			events, err := l.run(ctx, client{Options: upTo(bytesOf(limit))})
			return fmt.Sprintf("%s, get: %q; a client: %s", set, got, said(events, err)), nil
		}})
	}
	return all
}

// bytesOf reads an amount such as 512M or 5G.
func bytesOf(limit string) uint64 {
	unit := uint64(mebibyte)
	if strings.HasSuffix(limit, "G") {
		unit = gibibyte
	}
	n, err := strconv.ParseUint(strings.TrimRight(limit, "MG"), 10, 32)
	if err != nil {
		return 0
	}
	return n * unit
}

func percentageTrials(percentages ...int) []trial {
	var all []trial
	for _, percentage := range percentages {
		name := fmt.Sprintf("percentage %d", percentage)
		all = append(all, trial{name, "how is this percentage set, read back and applied?", func(ctx context.Context, l *lab) (string, error) {
			set, err := l.limit(ctx, percentage, "2G")
			if err != nil {
				return "", err
			}
			got, err := l.ask(ctx, "get_active_thread_percentage "+l.server)
			if err != nil {
				return "", err
			}
			events, err := l.run(ctx, client{})
			return fmt.Sprintf("%s, get: %q; a client, of %d: %s", set, got, l.whole, said(events, err)), nil
		}})
	}
	return all
}

func tryControlAlone(ctx context.Context, l *lab) (string, error) {
	err := os.Link(filepath.Join(l.pipe(), "control"), filepath.Join(l.alonePipe(), "control"))
	if err != nil && !errors.Is(err, os.ErrExist) {
		return "", cannotError{err}
	}
	return l.membership(ctx, client{pipe: l.alonePipe()})
}

func tryOtherMemory(ctx context.Context, l *lab) (string, error) {
	if l.private != nil {
		return "", cannotError{l.private}
	}
	return l.membership(ctx, client{Options: probe.Options{SharedMemory: l.otherShm()}})
}

func tryOtherUser(ctx context.Context, l *lab) (string, error) {
	const user = 1000
	if os.Geteuid() != 0 {
		return "", cannotError{errors.New("only root can become another user")}
	}
	return l.membership(ctx, client{Options: probe.Options{User: user}})
}

func tryAbsentDevice(ctx context.Context, l *lab) (string, error) {
	if err := l.ordinary(ctx); err != nil {
		return "", err
	}
	var texts []string
	for _, value := range []string{"0=512M", "0=512M,7=512M"} {
		events, err := l.run(ctx, client{env: []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=" + value}, Options: upTo(ordinaryMiB * mebibyte)})
		texts = append(texts, value+": "+said(events, err))
	}
	return strings.Join(texts, "; "), nil
}

// trySamePID runs two clients, each of which is process 1 of a namespace of its own.
func trySamePID(ctx context.Context, l *lab) (string, error) {
	c := client{namespaces: syscall.CLONE_NEWPID}
	one, err := l.hold(ctx, c)
	if errors.Is(err, unix.EPERM) {
		return "", cannotError{err}
	}
	if err != nil {
		return "", fmt.Errorf("the first: %w", err)
	}
	two, err := l.hold(ctx, c)
	if err != nil {
		_, _ = one.Finish(ctx)
		return "", fmt.Errorf("the second: %w", err)
	}
	list, listErr := l.ask(ctx, "get_client_list "+l.server)
	clients := strings.Fields(list)
	known := func(p *probe.Process) bool { return slices.Contains(clients, strconv.Itoa(p.PID())) }
	text := fmt.Sprintf("%d clients are listed; by their process IDs on the host: %t, %t", len(clients), known(one), known(two))
	first, firstErr := one.Finish(ctx)
	second, secondErr := two.Finish(ctx)
	return fmt.Sprintf("%s; the first %s, the second %s", text, ended(first, firstErr), ended(second, secondErr)), listErr
}

// ended says how a client ended.
func ended(events []probe.Event, err error) string {
	if err != nil {
		return "fails: " + err.Error()
	}
	if e, failed := probe.Find(events, probe.Failed); failed {
		return strings.TrimSpace("gets " + e.Call + " " + e.Result)
	}
	return "ends well"
}

// A way in which an idle client ends. It returns what the client noticed.
type way func(context.Context, *lab, *probe.Process) (string, error)

func finish(ctx context.Context, _ *lab, p *probe.Process) (string, error) {
	events, err := p.Finish(ctx)
	return ended(events, err), nil
}

func kill(ctx context.Context, _ *lab, p *probe.Process) (string, error) {
	_, err := p.Kill(ctx)
	return "was killed", err
}

func terminate(ctx context.Context, l *lab, p *probe.Process) (string, error) {
	answer, err := l.ask(ctx, fmt.Sprintf("terminate_client %s %d", l.server, p.PID()))
	if err != nil {
		_, finishErr := p.Finish(ctx)
		return "", errors.Join(err, finishErr)
	}
	events, err := p.Until(ctx, probe.Failed)
	text := fmt.Sprintf("is answered %q, the client %s", answer, ended(events, err))
	_, _ = p.Finish(ctx)
	return text, nil
}

// tryEnd ends one of two idle clients, and looks at the server, the other one and a next one.
func tryEnd(end way) func(context.Context, *lab) (string, error) {
	return func(ctx context.Context, l *lab) (string, error) {
		if err := l.ordinary(ctx); err != nil {
			return "", err
		}
		some := client{Options: probe.Options{Allocate: 64 * mebibyte}}
		other, err := l.hold(ctx, some)
		if err != nil {
			return "", fmt.Errorf("the other client: %w", err)
		}
		one, err := l.hold(ctx, some)
		if err != nil {
			_, _ = other.Finish(ctx)
			return "", fmt.Errorf("the client: %w", err)
		}
		how, err := end(ctx, l, one)
		if err != nil {
			_, _ = other.Finish(ctx)
			return "", err
		}
		status, statusErr := l.ask(ctx, "get_server_status "+l.server)
		if statusErr != nil {
			status = statusErr.Error()
		}
		next, nextErr := l.run(ctx, some)
		events, err := other.Finish(ctx)
		return fmt.Sprintf("the client %s; server %q; the other client %s; the next one %s", how, status, ended(events, err), ended(next, nextErr)), nil
	}
}
