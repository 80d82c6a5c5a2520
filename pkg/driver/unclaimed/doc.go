// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package unclaimed finds out who has, or can have, GPUs of this node without a claim of this driver.
//
//	claims.go    pods with claims that another driver of the same name has prepared
//	software.go  a device plugin, NVIDIA's DRA driver, a MIG manager
//	runtime.go   NVIDIA's container runtime, which gives GPUs to containers that ask for them
//	annotations.go  its NRI plugin, which does so where annotations of a pod name them
//	pods.go      pods that may have the devices of a claim that is not in the cluster any more
//
// Processes that use a GPU although no claim explains it are found by package users. What is found here uses no GPU yet, or
// not at every moment. It reads and changes nothing.
package unclaimed
