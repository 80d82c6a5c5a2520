// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package harness runs the driver as one process against a simulated machine: the
// real binary, the real NVML bindings, real gRPC sockets, real files. Only the
// kubelet and the API server are played by the test.
//
// A Node is a simulated machine with the folders of a kubelet and an API server. A
// Driver, a Supervisor of MPS and Programs in containers are processes on it, and end
// with the test. A Snapshot has everything that claims leave on a node, so that a
// test can compare what is there with what was there before.
//
// Methods that take a testing.TB end the test where they fail, in its own goroutine
// only. Those that return an error may be called from any goroutine.
package harness
