// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/partage-dev/partage/pkg/cuda/probe"
)

// limited is a limit that tells a client of MPS from a program outside of it, in MiB.
const limited = 4096

// greedy is a client that tries to take more than the limit.
var greedy = probe.Sizes{limited*mebibyte + 64*mebibyte}

// attempt runs a greedy client and returns what became of it.
func (n *Node) attempt(ctx context.Context, question string, s surroundings, o probe.Options) (string, error) {
	return n.attemptBy(ctx, question, func(ctx context.Context, l *lab) ([]probe.Event, error) {
		o.Allocate = greedy
		return l.probe(ctx, s, o)
	})
}

func (n *Node) attemptBy(ctx context.Context, question string, live func(context.Context, *lab) ([]probe.Event, error)) (string, error) {
	if err := n.limit(ctx, 50, limited); err != nil {
		return "", err
	}
	events, err := inLab(ctx, n, Client, question, live)
	if err != nil {
		return "", err
	}
	if e, failed := probe.Find(events, probe.Failed); failed {
		return fails + ": " + refusal(e).Error(), nil
	}
	if _, refused := probe.Find(events, probe.Refused); refused {
		return isLimited, nil
	}
	return isFree, nil
}

const (
	isLimited = "runs with the limits"
	isFree    = "runs without limits"
	fails     = "fails"
	bounded   = "fails, or " + isLimited
)

func checkMPSWithoutDaemon(ctx context.Context, n *Node) []Finding {
	const subject, expected = "another pipe directory", isFree
	if f := n.started(expected); f != nil {
		return f
	}
	got, err := n.attempt(ctx, "a client that names a pipe directory without a daemon", surroundings{pipe: "/nonexistent"}, probe.Options{})
	if err != nil {
		return []Finding{Failed(subject, expected, err)}
	}
	return []Finding{Expect(subject, got == isFree, expected, got).
		Because("programs that reach no daemon may fail instead, or the daemon is found in another way")}
}

func checkMPSControlAlone(ctx context.Context, n *Node) []Finding {
	if f := n.started(isLimited); f != nil {
		return f
	}
	_, err := inLab(ctx, n, Daemon, "link control into an empty directory", func(_ context.Context, l *lab) (bool, error) {
		return true, os.Link(filepath.Join(l.mps.DaemonPipe, "control"), filepath.Join(l.mps.ClientPipe, "control"))
	})
	if err != nil {
		return []Finding{Failed("", isLimited, err)}
	}
	var findings []Finding
	add := func(subject, expected, consequence, got string, err error) {
		if err != nil {
			findings = append(findings, Failed(subject, expected, err))
			return
		}
		findings = append(findings, Expect(subject, strings.HasPrefix(got, expected), expected, got).Because("%s", consequence))
	}
	got, err := n.attemptBy(ctx, "a client in whose pipe directory is control only", func(ctx context.Context, l *lab) ([]probe.Event, error) {
		return l.probe(ctx, surroundings{pipe: l.mps.ClientPipe}, probe.Options{Allocate: greedy})
	})
	add("a directory with control only", isLimited, "containers need more of the daemon's files: --extra-container-files of the MPS supervisor gives them", got, err)
	got, err = n.attempt(ctx, "a client with a /dev/shm of its own", surroundings{ownMemory: true}, probe.Options{})
	if err != nil {
		return append(findings, Failed("another /dev/shm", bounded, err))
	}
	// Where the server's memory has no name, as with driver 580, nobody needs the folder.
	return append(findings, Expect("another /dev/shm", got != isFree, bounded, got).Because("programs get around their limits by another /dev/shm"))
}

const (
	nobody = 65534
	// container are the namespaces that a pod has of its own.
	container = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET
)

// kinds of clients that pods can be.
var clientKinds = []struct {
	subject      string
	surroundings surroundings
	options      probe.Options
}{
	{"root", surroundings{}, probe.Options{}},
	{"another user", surroundings{}, probe.Options{User: nobody}},
	{"namespaces of a container", surroundings{namespaces: container}, probe.Options{}},
	{"another user in a container", surroundings{namespaces: container}, probe.Options{User: nobody}},
}

// acquaintance is whom the daemon takes a client for.
type acquaintance struct {
	Servers []string `json:"servers"`
	Clients []string `json:"clients"`
	// Known is true if the client's process ID, as this process sees it, is among them.
	Known bool `json:"known"`
}

func checkMPSClients(ctx context.Context, n *Node) []Finding {
	const expected = isLimited + ", as a client of the one server, by its process ID"
	if f := n.started(expected); f != nil {
		return f
	}
	var findings []Finding
	for _, kind := range clientKinds {
		got, err := n.attempt(ctx, "a client: "+kind.subject, kind.surroundings, kind.options)
		if err != nil {
			findings = append(findings, Failed(kind.subject, expected, err))
			continue
		}
		if got != isLimited {
			findings = append(findings, Expect(kind.subject, false, expected, got).Because("such pods cannot use MPS shares"))
			continue
		}
		who, err := n.acquaint(ctx, kind.subject, kind.surroundings, kind.options)
		if err != nil {
			findings = append(findings, Failed(kind.subject, expected, err))
			continue
		}
		right := who.Known && len(who.Servers) == 1
		findings = append(findings, Expect(kind.subject, right, expected, who.String()).
			Because("the driver cannot tell whose clients the server has"))
	}
	return findings
}

func (a acquaintance) String() string {
	known := "known by its process ID"
	if !a.Known {
		known = "not known by its process ID"
	}
	return fmt.Sprintf("%s, %s, %d server(s), %d client(s)", isLimited, known, len(a.Servers), len(a.Clients))
}

// acquaint asks the daemon about a client while it runs.
func (n *Node) acquaint(ctx context.Context, subject string, s surroundings, o probe.Options) (acquaintance, error) {
	return inLab(ctx, n, Daemon, "whom it takes a client for: "+subject, func(ctx context.Context, l *lab) (acquaintance, error) {
		o.Hold = true
		if err := l.hold(ctx, subject, s, o); err != nil {
			return acquaintance{}, err
		}
		pid := strconv.Itoa(l.held[subject].PID())
		var who acquaintance
		servers, err := l.run(ctx, "get_server_list")
		if err != nil {
			return acquaintance{}, err
		}
		who.Servers = strings.Fields(servers)
		clients, err := l.command(ctx, "get_client_list "+serverWord)
		if err != nil {
			return acquaintance{}, err
		}
		who.Clients = strings.Fields(clients)
		who.Known = slices.Contains(who.Clients, pid)
		_, err = l.finish(ctx, subject)
		return who, err
	})
}

func checkMPSUserNamespace(ctx context.Context, n *Node) []Finding {
	const expected = bounded
	if f := n.started(expected); f != nil {
		return f
	}
	got, err := n.attempt(ctx, "a client in a user namespace", surroundings{namespaces: container | syscall.CLONE_NEWUSER}, probe.Options{})
	if err != nil { // the node may not allow user namespaces
		return []Finding{Cannot("", expected, "%v", err)}
	}
	return []Finding{Expect("", got != isFree, expected, got).Because("programs get around their limits by a user namespace")}
}
