// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/gpu/nvml"
)

// transcriptVersion is that of the format. A reader refuses any other.
const transcriptVersion = 1

// Header is the first line of a transcript, and the head of a report.
type Header struct {
	Transcript int `json:"transcript,omitempty"`
	// Version is the driver's.
	Version string `json:"version"`
	Node    string `json:"node"`
	// Time is when the run began, as RFC 3339 has it.
	Time string `json:"time"`
	// Parts are those that were run.
	Parts []Part `json:"parts"`
	// GPU is the one that was asked for, if any.
	GPU string `json:"gpu,omitempty"`
	// Skip are the checks that were not to run.
	Skip []string `json:"skip,omitempty"`
}

// Entry is one line of a transcript: a question with its answer, or a call into NVML.
type Entry struct {
	Kind     Kind            `json:"kind"`
	Question string          `json:"question"`
	Answer   json.RawMessage `json:"answer,omitempty"`
	Failure  *Failure        `json:"failure,omitempty"`
	// Took is how long the answer took: "1.2ms".
	Took string `json:"took"`
}

// transcript writes entries as lines, each as soon as it is known: what hangs the node
// leaves a transcript of all that was before.
type transcript struct {
	mu    sync.Mutex
	out   io.Writer // nil where none is wanted
	err   error
	calls []nvml.Call // into NVML so far; from a transcript they are without answers
}

func (t *transcript) add(line any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.out != nil && t.err == nil {
		t.err = json.NewEncoder(t.out).Encode(line)
	}
}

// failed returns the first error. A run goes on after it: what was changed has to be undone.
func (t *transcript) failed() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// observe notes a call into NVML.
func (t *transcript) observe(_ context.Context, c nvml.Call) {
	question := c.Function
	if c.PCIAddress != "" {
		question += ofGPUWord + c.PCIAddress
	}
	entry := Entry{Kind: Call, Question: question, Took: c.Took.Round(time.Microsecond).String(), Failure: failure(c.Err)}
	if c.Err == nil {
		entry.Answer, _ = json.Marshal(c.Answer) // nobody reads it back
	}
	t.add(entry)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls = append(t.calls, c)
}

// times returns how long the calls of each function took, in order, of those that matter.
func (t *transcript) times(matters func(nvml.Call) bool) map[string][]time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	took := map[string][]time.Duration{}
	for _, call := range t.calls {
		if matters(call) {
			took[call.Function] = append(took[call.Function], call.Took)
		}
	}
	for _, times := range took {
		slices.Sort(times)
	}
	return took
}

// recording are the answers of a transcript, by kind and question, in the order of asking.
type recording map[string][]Entry

func key(kind Kind, question string) string { return string(kind) + ": " + question }

// answer takes what is missing for not answered: checks ask more than they did when the
// transcript was made.
func (r recording) answer(kind Kind, question string) Entry {
	k := key(kind, question)
	if len(r[k]) == 0 {
		return Entry{Kind: kind, Question: question, Failure: failure(fmt.Errorf("%w: the transcript does not have %s", ErrNoAnswer, k))}
	}
	entry := r[k][0]
	r[k] = r[k][1:]
	return entry
}

// Replay returns the node that a transcript is about. The last line may be cut off.
func Replay(in io.Reader) (*Node, error) {
	lines := json.NewDecoder(bufio.NewReader(in))
	var header Header
	if err := lines.Decode(&header); err != nil {
		return nil, fmt.Errorf("read the first line of the transcript: %w", err)
	}
	if header.Transcript != transcriptVersion {
		return nil, fmt.Errorf("the first line of the transcript has version %d: want %d", header.Transcript, transcriptVersion)
	}
	header.Transcript = 0
	n := newNode(header)
	n.recorded = recording{}
	for line := 2; ; line++ {
		var entry Entry
		err := lines.Decode(&entry)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return n, nil
		}
		var call nvml.Call
		if err == nil && entry.Kind == Call {
			call, err = entry.call()
		}
		switch k := key(entry.Kind, entry.Question); {
		case err != nil:
			return nil, fmt.Errorf("read line %d of the transcript: %w", line, err)
		case entry.Kind == Call:
			n.transcript.calls = append(n.transcript.calls, call)
		default:
			n.recorded[k] = append(n.recorded[k], entry)
		}
	}
}

// ofGPUWord is between a function of NVML and the GPU that a call was about.
const ofGPUWord = " of GPU "

// call is the call into NVML that an entry is about.
func (e *Entry) call() (nvml.Call, error) {
	function, pciAddress, _ := strings.Cut(e.Question, ofGPUWord)
	took, err := time.ParseDuration(e.Took)
	c := nvml.Call{Function: function, PCIAddress: pciAddress, Took: took}
	if e.Failure != nil {
		c.Err = e.Failure
	}
	return c, err
}
