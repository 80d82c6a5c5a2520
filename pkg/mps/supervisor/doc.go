// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package supervisor runs MPS sessions on a node: it starts their control daemons
// and servers, watches them, and repairs them. It knows nothing about
// claims or NVML, nor about Kubernetes but when pods end, and does not touch compute modes.
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
//	shm           a tmpfs, /dev/shm of daemon, server and clients
//	session.json  what is wanted, what runs, what was lost
//
// Its phases:
//
//	(none) --Ensure--> Starting --> Running <--> Faulted
//	                      ^           |
//	                      +-----------+ daemon or server ended: one loss more
//	                      |
//	                    Failed: retried with growing delays
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
// user. Such a replacement is not a loss, since it waits for the last client; with
// clients at the last look it counts as one, since only the log would tell.
//
// # What survives what
//
//   - The plugin ends: nothing happens here.
//   - A server ends: its clients end. A new server is started, limits are set and
//     read back. Containers that wait or start over reach it without a restart. A
//     server that ends again and again is restarted with growing delays, unless a
//     client is faster or Ensure asks for it.
//   - A client's fault: all clients of the session end (FAULT). MPS accepts no new
//     ones until the faulting ones have ended, and then goes on by itself. If that
//     takes too long, the daemon is replaced.
//   - A pod is about to be killed: its clients are terminated before, so that others
//     are not harmed. The kubelet says when, see package podend.
//   - A client is killed: nobody knows whether its server still works. The server is
//     replaced when it has no clients, or at once if the session's spec says so.
//   - A daemon ends: what is left of it is killed, then as above.
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
// The folder of a session is recognized by session.json, or by containing nothing
// that a session's folder does not. Other folders are left alone, whatever folder
// the supervisor was told to use.
//
// Clients need the session's /dev/shm only if the server has something there; then all of
// them have the same one. What nobody uses is removed while others go on, see leftover.
//
// Root in a container that is a client can connect to the daemon, and do nothing to
// its sockets. That they are those that the daemon made is checked all the same, before
// and after each command, and a daemon of which that is not true is replaced. Nor is a
// process taken for a server unless the daemon started it.
//
// session.json is written before each effect that it describes: before the mounts
// and the daemon, and before anything is removed. A daemon and all its descendants
// carry an environment variable that names the session's folder, so that they are
// found even if their PID was never written down.
//
// # The host
//
// The supervisor's folder must have the same path on the host and, in a container,
// be mounted with Bidirectional propagation, so that the container runtime sees the
// tmpfs. The supervisor needs root, Linux 5.10, and the host's PID namespace so that
// MPS knows its clients by their PIDs.
package supervisor
