// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"k8s.io/klog/v2"
)

// control talks to a session's control daemon.
type control struct {
	view
	// limit is how long one run of the client may take.
	limit time.Duration
}

// run sends commands, one a line, and returns the lines of all answers. NVIDIA's
// client succeeds as soon as it has reached the daemon: what became of a command is
// in its answer, or must be asked for.
func (c control) run(ctx context.Context, commands ...string) ([]string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.limit, fmt.Errorf("no answer within %s", c.limit))
	defer cancel()
	cmd := c.client(ctx)
	cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
	var output bounded
	cmd.Stdout, cmd.Stderr = &output, &output
	err := cmd.Run()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	klog.FromContext(ctx).V(4).Info("MPS command", "commands", commands, "answer", output.String(), "failure", err)
	if err != nil {
		return nil, fmt.Errorf("MPS command %q: %w%s", strings.Join(commands, "; "), err, said(output.String()))
	}
	var lines []string
	for line := range strings.Lines(output.String()) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines, nil
}

// bounded keeps the beginning of what is written to it. Whoever is root in a
// container can put a daemon of their own in the place of the right one.
type bounded struct{ buffer bytes.Buffer }

// maxOutput has room for everything that a daemon can have to say.
const maxOutput = 64 << 10

func (b *bounded) Write(data []byte) (int, error) {
	_, _ = b.buffer.Write(data[:min(len(data), maxOutput-b.buffer.Len())])
	return len(data), nil
}

func (b *bounded) String() string { return b.buffer.String() }

// said is what a program printed, as the end of an error.
func said(output string) string {
	const most = 300
	if output = strings.TrimSpace(output); output == "" {
		return ""
	}
	if len(output) > most {
		output = output[:most] + "…"
	}
	return fmt.Sprintf(": it says %q", output)
}

// ask sends commands that have one line of answer each.
func (c control) ask(ctx context.Context, commands ...string) ([]string, error) {
	answers, err := c.run(ctx, commands...)
	if err != nil {
		return nil, err
	}
	if len(answers) != len(commands) {
		return nil, fmt.Errorf("MPS command %q: want %d answers%s", strings.Join(commands, "; "), len(commands), said(strings.Join(answers, "\n")))
	}
	return answers, nil
}

// servers asks which servers there are.
func (c control) servers(ctx context.Context) ([]int, error) {
	lines, err := c.run(ctx, "get_server_list")
	if err != nil {
		return nil, err
	}
	pids, rest := leadingPIDs(lines)
	if len(rest) > 0 {
		return nil, fmt.Errorf(`MPS command "get_server_list": want PIDs%s`, said(strings.Join(lines, "\n")))
	}
	return pids, nil
}

// state is a server's.
type state string

// The states of MPS that matter here. There is also INITIALIZING.
const (
	stateActive state = "ACTIVE"
	stateFault  state = "FAULT"
)

// maxState bounds what is told of a state that is not known.
const maxState = 64

func parseState(answer string) state {
	for _, s := range []state{stateActive, stateFault} {
		if strings.Contains(strings.ToUpper(answer), string(s)) {
			return s
		}
	}
	return state(answer[:min(len(answer), maxState)])
}

func (c control) state(ctx context.Context, server int) (state, error) {
	answer, err := c.ask(ctx, "get_server_status "+strconv.Itoa(server))
	if err != nil {
		return "", err
	}
	return parseState(answer[0]), nil
}

func (c control) clients(ctx context.Context, server int) ([]int, error) {
	lines, err := c.run(ctx, "get_client_list "+strconv.Itoa(server))
	if err != nil {
		return nil, err
	}
	pids, _ := leadingPIDs(lines)
	return pids, nil
}

// look is everything that a check of a session wants to know.
type look struct {
	servers []int
	// Of the one server that was asked for, if it is among them.
	state   state
	limits  limits
	clients []int
}

// look asks all with one run of the client, since it is done often. A server that
// is not there any more confuses the answers, as may an older driver; then ok is
// false and the caller asks one by one.
func (c control) look(ctx context.Context, server int, spec Spec) (l look, ok bool, err error) {
	queries := limitQueries(server, spec)
	commands := slices.Concat([]string{"get_server_list", "get_server_status " + strconv.Itoa(server)},
		queries, []string{"get_client_list " + strconv.Itoa(server)})
	lines, err := c.run(ctx, commands...)
	if err != nil {
		return look{}, false, err
	}
	servers, rest := leadingPIDs(lines)
	if !slices.Contains(servers, server) || len(rest) < 1+len(queries) {
		return look{}, false, nil
	}
	l = look{servers: servers, state: parseState(rest[0])}
	if l.limits, err = parseLimits(rest[1:1+len(queries)], spec); err != nil {
		return look{}, false, nil //nolint:nilerr // asked again, one by one
	}
	clients, rest := leadingPIDs(rest[1+len(queries):])
	l.clients = clients
	return l, len(rest) == 0, nil
}

func leadingPIDs(lines []string) (pids []int, rest []string) {
	for i, line := range lines {
		pid, err := strconv.Atoi(line)
		if err != nil {
			return pids, lines[i:]
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// limits of one server, or of servers to come.
type limits struct {
	// percentage is 100 without a limit.
	percentage float64
	// memory is in bytes by the device's place. What a device has that is not to be
	// limited is not asked for.
	memory map[int]int64
}

// wantedLimits are a spec's.
func wantedLimits(spec Spec) limits {
	l := limits{percentage: 100, memory: map[int]int64{}}
	if spec.ThreadPercentage > 0 {
		l.percentage = float64(spec.ThreadPercentage)
	}
	for i := range spec.Devices {
		if limit := spec.memoryLimit(i); limit > 0 {
			l.memory[i] = limit * mebibyte
		}
	}
	return l
}

// places of the devices that have a limit, in order.
func (l limits) places() []int { return slices.Sorted(maps.Keys(l.memory)) }

// scope is the part of commands' names that tells a server's limits from those of
// servers to come, which are meant by 0, and the first of their arguments.
func scope(server int) (name, argument string) {
	if server == 0 {
		return "default_", ""
	}
	return "", " " + strconv.Itoa(server)
}

// limitQueries ask for limits, with one line of answer each.
func limitQueries(server int, spec Spec) []string {
	name, argument := scope(server)
	queries := []string{"get_" + name + "active_thread_percentage" + argument}
	for _, place := range wantedLimits(spec).places() {
		queries = append(queries, fmt.Sprintf("get_%sdevice_pinned_mem_limit%s %d", name, argument, place))
	}
	return queries
}

// limitCommands set limits. The percentage is always set, since it may have been
// lower.
func limitCommands(server int, l limits) []string {
	name, argument := scope(server)
	commands := []string{fmt.Sprintf("set_%sactive_thread_percentage%s %g", name, argument, l.percentage)}
	for _, place := range l.places() {
		commands = append(commands, fmt.Sprintf("set_%sdevice_pinned_mem_limit%s %d %dM", name, argument, place, l.memory[place]/mebibyte))
	}
	return commands
}

func (c control) limits(ctx context.Context, server int, spec Spec) (limits, error) {
	answers, err := c.ask(ctx, limitQueries(server, spec)...)
	if err != nil {
		return limits{}, err
	}
	return parseLimits(answers, spec)
}

// parseLimits reads the answers to limitQueries.
func parseLimits(answers []string, spec Spec) (limits, error) {
	l := limits{memory: map[int]int64{}}
	var err error
	if l.percentage, err = strconv.ParseFloat(strings.TrimSuffix(answers[0], "%"), 64); err != nil {
		return limits{}, fmt.Errorf("active thread percentage: want a number%s", said(answers[0]))
	}
	for i, place := range wantedLimits(spec).places() {
		if l.memory[place], err = parseMemory(answers[1+i]); err != nil {
			return limits{}, fmt.Errorf("memory limit of device %d (%s): %w", place, spec.Devices[place], err)
		}
	}
	return l, nil
}

// parseMemory reads an answer about a memory limit: a number with G or M, as drivers
// give it, with another unit, or in bytes.
func parseMemory(answer string) (int64, error) {
	word, _, _ := strings.Cut(strings.TrimSpace(answer), " ")
	digits := strings.TrimRightFunc(word, unicode.IsLetter)
	name := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(word[len(digits):]), "B"), "I")
	unit, ok := map[string]int64{"": 1, "K": 1 << 10, "M": mebibyte, "G": 1 << 30, "T": 1 << 40}[name]
	number, err := strconv.ParseFloat(digits, 64)
	if err != nil || !ok {
		return 0, fmt.Errorf("want a size such as 512M%s", said(answer))
	}
	return int64(number * float64(unit)), nil
}

// compare says where limits are not what was wanted.
func (l limits) compare(spec Spec) error {
	wanted := wantedLimits(spec)
	if l.percentage != wanted.percentage {
		return fmt.Errorf("active thread percentage is %g, want %g", l.percentage, wanted.percentage)
	}
	for _, place := range wanted.places() {
		if l.memory[place] != wanted.memory[place] {
			return fmt.Errorf("memory limit of device %d (%s) is %d MiB, want %d MiB",
				place, spec.Devices[place], l.memory[place]/mebibyte, wanted.memory[place]/mebibyte)
		}
	}
	return nil
}

// setLimits applies the limits of a spec to servers, where 0 means those to come, and
// reads them back. One run of the client does it all: what the commands have to say
// comes before the answers to the queries.
func (c control) setLimits(ctx context.Context, spec Spec, servers ...int) error {
	var commands, queries []string
	for _, server := range servers {
		commands = append(commands, limitCommands(server, wantedLimits(spec))...)
		queries = append(queries, limitQueries(server, spec)...)
	}
	lines, err := c.run(ctx, slices.Concat(commands, queries)...)
	if err != nil {
		return fmt.Errorf("set limits: %w", err)
	}
	if len(lines) < len(queries) {
		return fmt.Errorf("read limits: MPS command %q: want %d answers%s", strings.Join(queries, "; "), len(queries), said(strings.Join(lines, "\n")))
	}
	answers, each := lines[len(lines)-len(queries):], len(queries)/len(servers)
	for i, server := range servers {
		got, err := parseLimits(answers[i*each:(i+1)*each], spec)
		if err == nil {
			err = got.compare(spec)
		}
		if err != nil {
			whose := "servers to come"
			if server != 0 {
				whose = "the server with PID " + strconv.Itoa(server)
			}
			return fmt.Errorf("the limits of %s are not in effect: %w%s", whose, err, said(strings.Join(lines, "\n")))
		}
	}
	return nil
}
