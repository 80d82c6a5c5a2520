// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package mps is the supervisor of MPS control daemons and its protocol.
//
// The supervisor runs on the node by itself, so that MPS outlives every restart
// and upgrade of the kubelet plugin: clients die with their server. Its clients
// speak gRPC to it over a unix socket. It knows nothing about Kubernetes, claims
// or NVML, and it does not touch compute modes.
//
// # A session
//
// A session is one control daemon with its server, and a folder named by the
// session's ID:
//
//	pipe          a small tmpfs, what CUDA_MPS_PIPE_DIRECTORY names; one for the
//	              session's life, so that a container that has it mounted finds the
//	              sockets of the next daemon too
//	log           logs of daemon, server and launcher
//	shm           a tmpfs, /dev/shm of daemon, server and clients
//	session.json  what is wanted, what runs, what was lost
//
// Its phases:
//
//	(none) --Ensure--> Starting --> Running <--> Faulted
//	                      ^           |
//	                      +-----------+ daemon or server ended: one loss more
//	                      |
//	                    Failed: tried again and again, with growing pauses
//
// The first start belongs to the Ensure that asked for it: when it fails or is
// cancelled, nothing is left. Later ones belong to the supervisor, because
// containers may be waiting for the session to come back.
//
// The server is started together with the daemon, not by the first client: as long
// as no server holds the GPU, EXCLUSIVE_PROCESS shuts nobody out, and limits could
// not be read back from it. It runs as root. That is in nobody's way: with
// MultiUser it serves all users, and without it MPS ends a server that has no
// clients as soon as a client of another user comes, and starts one for that user.
// Such a replacement is no loss, since it waits for the last client, unless the
// daemon's log says that the server did not end in order.
//
// Devices of a memory limit are named to MPS by their place among the session's
// devices, not by UUID: there are drivers that take a UUID and then do not apply
// the limit. CUDA_VISIBLE_DEVICES of the daemon has UUIDs, so the place is certain.
//
// # What survives what
//
//   - The plugin ends: nothing happens here.
//   - A server ends: its clients end. A new one is started, limits are set and read
//     back. Containers that wait or start over reach it without being restarted. One
//     that ends again and again is started with growing pauses, unless a client is
//     faster or Ensure asks for it.
//   - A client's fault: all clients of the session end (FAULT). MPS takes no new ones
//     before the faulting ones have gone, and then goes on by itself.
//   - A daemon ends: what is left of it is killed, then as above.
//   - The supervisor is killed: its daemons live on, where nobody kills them with it,
//     and the next supervisor adopts them. In a pod they are killed with the
//     container; then the next one starts them again in the same folders, and
//     containers that still run can connect anew, because both tmpfs are still
//     mounted on the host.
//   - The supervisor is told to end (SIGTERM): it ends its daemons in order and
//     unmounts both tmpfs, so that removing Partage leaves no mount. session.json
//     stays for a successor, which starts the sessions again. Containers that still
//     run have the old ones; they must be restarted.
//   - The node reboots: sessions of another boot are removed.
//   - Any of these in the middle of a start: a session that never ran is removed.
//     In the middle of Stop: the removal goes on.
//
// The folder of a session can be told from others by session.json, or by having
// nothing in it that a session does not have. Others are left alone, whatever the
// supervisor was told to work in.
//
// Whoever is root in a container that is a client can replace the daemon's sockets,
// and fill the tmpfs that they are in, but not the host's /run.
// What a daemon says is therefore read with care: it has a limited length, and is
// not believed when it calls a process its server that it did not start.
//
// session.json is written before each effect that it leads to: before the mount and
// the daemon, and before anything is removed. A daemon and all that it starts carry
// a variable in their environment that names the session's folder, so that they are
// found even when their PID was never written down.
//
// # The host
//
// The supervisor's folder must have the same path on the host and, in a container,
// be mounted with Bidirectional propagation, so that the container runtime sees both
// tmpfs. The supervisor needs the host's PID namespace for MPS to know its clients
// by their PIDs, root, and Linux 5.10.
package mps
