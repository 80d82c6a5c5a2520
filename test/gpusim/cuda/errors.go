// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cuda

import "fmt"

// Error is a CUresult that is not success.
type Error int

// The codes that a program meets here, from cuda.h.
const (
	InvalidValue         Error = 1
	OutOfMemory          Error = 2
	DeviceUnavailable    Error = 46
	NoDevice             Error = 100
	InvalidDevice        Error = 101
	InvalidContext       Error = 201
	LaunchFailed         Error = 719
	SystemNotReady       Error = 802
	MPSConnectionFailed  Error = 805
	MPSRPCFailure        Error = 806
	MPSServerNotReady    Error = 807
	MPSMaxClientsReached Error = 808
	MPSClientTerminated  Error = 810
	Unknown              Error = 999
)

var texts = map[Error]struct{ name, text string }{
	InvalidValue:         {"INVALID_VALUE", "invalid argument"},
	OutOfMemory:          {"OUT_OF_MEMORY", "out of memory"},
	DeviceUnavailable:    {"DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
	NoDevice:             {"NO_DEVICE", "no CUDA-capable device is detected"},
	InvalidDevice:        {"INVALID_DEVICE", "invalid device ordinal"},
	InvalidContext:       {"INVALID_CONTEXT", "invalid device context"},
	LaunchFailed:         {"LAUNCH_FAILED", "unspecified launch failure"},
	SystemNotReady:       {"SYSTEM_NOT_READY", "system not yet initialized"},
	MPSConnectionFailed:  {"MPS_CONNECTION_FAILED", "MPS client failed to connect to the MPS control daemon or the MPS server"},
	MPSRPCFailure:        {"MPS_RPC_FAILURE", "the remote procedural call between the MPS server and the MPS client failed"},
	MPSServerNotReady:    {"MPS_SERVER_NOT_READY", "MPS server is not ready to accept new MPS client requests"},
	MPSMaxClientsReached: {"MPS_MAX_CLIENTS_REACHED", "the hardware resources required to create MPS client have been exhausted"},
	MPSClientTerminated:  {"MPS_CLIENT_TERMINATED", "the MPS client has been terminated by the MPS server"},
	Unknown:              {"UNKNOWN", "unknown error"},
}

// Error is the code's name in cuda.h and what CUDA says about it.
func (e Error) Error() string {
	if t, ok := texts[e]; ok {
		return "CUDA_ERROR_" + t.name + ": " + t.text
	}
	return fmt.Sprintf("CUDA error %d", int(e))
}
