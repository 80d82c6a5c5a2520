// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package supervisor runs MPS sessions on a node: it starts their control daemons
// and servers, watches them, and repairs them. It knows nothing about
// claims or NVML, nor about Kubernetes but when pods end, and does not touch compute modes.
//
// # How it works
//
//	observe   observe.go: the record, the keeper, the daemon's sockets, its servers and clients
//	decide    package rules: what to do next, what to write down, what to say. All rules are there
//	act       act.go: one thing at a time, whose result the next observation finds
//
// A session does that until nothing is due (session.go): when somebody calls, every two seconds, and
// at once when a process of it has ended.
//
// # A session
//
// A session is one control daemon with its server, and a folder named by the
// session's ID:
//
//	pipe          a small tmpfs, which is kept for the session's life
//	pipe/daemon   the daemon's CUDA_MPS_PIPE_DIRECTORY, in no container
//	pipe/client   the containers', mounted read-only: it has a link of the daemon's
//	              socket for programs, and in a running container that of the next
//	              daemon too
//	log           a small tmpfs, logs of daemon, server and launcher
//	memory        a tmpfs, which stays for the next session while somebody keeps something of it
//	memory/shm    /dev/shm of daemon, server and clients
//	session.json  what is wanted, what runs, what was lost
//	keeper.lock   locked by the keeper of the daemon
//
// A keeper starts each daemon, and ends with all that the daemon has started (package keeper).
//
// The first start belongs to the Ensure that asked for it: when it fails or is
// canceled, nothing is left. Later starts belong to the supervisor, because
// containers may be waiting for the session to come back.
//
// The server is started together with the daemon, not by the first client: until a
// server holds the GPU, EXCLUSIVE_PROCESS keeps no other process out, and there is
// no server to read limits back from. It runs as root. That does not exclude anyone:
// with MultiUser it serves all users, and without MultiUser MPS ends a server that
// has no clients as soon as a client of another user comes, and starts one for that
// user.
//
// # What survives what
//
//   - A server ends: its clients end, and another is started.
//   - A client's fault: all clients of the session end (FAULT). MPS accepts no new
//     ones until the faulting ones have ended, and then goes on by itself. If that
//     takes too long, the daemon is replaced.
//   - A pod is about to be killed: its clients are terminated before, so that others
//     are not harmed. The kubelet says when, see package podend.
//   - A client is killed: nobody knows whether its server still works. The server is
//     replaced when it has no clients, or at once if the session's spec says so.
//   - A daemon ends: its keeper ends what is left of it, and another is started. Containers that
//     wait or start over reach it without a restart.
//   - The supervisor is killed: its daemons live on, unless they are killed with it,
//     and the next supervisor adopts them. In a pod they are killed with the
//     container; then the next supervisor starts them again in the same folders, and
//     running containers can reconnect, because the tmpfs are still mounted on the
//     host.
//   - The supervisor is asked to end (SIGTERM): it quits its daemons and unmounts the
//     tmpfs, so that removing Partage leaves no mount. session.json stays for a
//     successor, which starts the sessions again. Running containers still have the
//     old tmpfs and must be restarted.
//   - The node reboots: sessions of another boot are removed.
//   - Any of these in the middle of a start: a session that never ran is removed.
//     In the middle of Stop: the removal is completed.
//
// Root in a container that is a client can connect to the daemon, and do nothing to
// its sockets. That they are those that the daemon made is checked all the same, before
// and after each command, and a daemon of which that is not true is replaced. Nor is a
// process taken for a server unless the daemon started it.
//
// # The host
//
// The supervisor's folder must have the same path on the host and, in a container,
// be mounted with Bidirectional propagation, so that the container runtime sees the
// tmpfs. The supervisor needs root, Linux 5.10, and the host's PID namespace so that
// MPS knows its clients by their PIDs.
package supervisor
