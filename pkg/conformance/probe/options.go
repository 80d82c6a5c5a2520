// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Options say what a run of cuda-probe does.
type Options struct {
	// Library is libcuda's path, or a name for the dynamic linker.
	Library string `json:"library"`
	// DevRoot is the root whose NVIDIA nodes are those of /dev, if it is not empty. That needs root.
	DevRoot string `json:"devRoot,omitempty"`
	// SharedMemory is bound over /dev/shm, if it is not empty. That needs root, too.
	SharedMemory string `json:"sharedMemory,omitempty"`
	// User is the user that the program becomes after that, unless it is 0.
	User int `json:"user,omitempty"`
	// Allocate is how much memory to take in one piece, in bytes.
	Allocate uint64 `json:"allocate,omitempty"`
	// FillUpTo takes as much memory as there is, but never more than this.
	FillUpTo uint64 `json:"fillUpTo,omitempty"`
	// Hold keeps the context until the program is asked to end; Busy gives the device
	// work meanwhile.
	Hold bool `json:"hold,omitempty"`
	Busy bool `json:"busy,omitempty"`
}

// Usage is what cuda-probe prints for -help.
const Usage = `cuda-probe makes a CUDA context, takes memory, and says what it got, as lines of JSON.
Its argument is an object of JSON with the fields of probe.Options, such as
{"library":"libcuda.so.1","allocate":67108864}
`

// Arguments returns the options as arguments of cuda-probe.
func (o Options) Arguments() []string {
	text, err := json.Marshal(o)
	if err != nil {
		return nil // it has nothing that JSON does not have
	}
	return []string{string(text)}
}

// Parse reads the arguments of cuda-probe: the inverse of Arguments.
func Parse(args []string) (o Options, err error) {
	if len(args) != 1 {
		return o, fmt.Errorf("got %d arguments: want one, an object of JSON with options", len(args))
	}
	decoder := json.NewDecoder(strings.NewReader(args[0]))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&o); err != nil {
		return o, fmt.Errorf("read the options: %w", err)
	}
	if o.Library == "" {
		return o, errors.New(`library is "": want a path or the name of a library`)
	}
	return o, nil
}

// Read returns the events that cuda-probe has printed, up to what is none.
func Read(output io.Reader) []Event {
	var events []Event
	for decoder := json.NewDecoder(output); ; {
		var e Event
		if decoder.Decode(&e) != nil {
			return events
		}
		events = append(events, e)
	}
}
