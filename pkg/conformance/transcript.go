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
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
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

// Kind is what a question is put to.
type Kind string

// Values of Kind.
const (
	File    Kind = "file"       // the node's file systems
	Command Kind = "command"    // the driver's programs
	NVML    Kind = "nvml"       // NVIDIA's management library, through package nvml
	API     Kind = "api"        // the API server
	Daemon  Kind = "mps"        // MPS: its control daemon, its server, their files
	Client  Kind = "mps client" // a CUDA program that is a client of MPS
	Change  Kind = "change"     // what changes the GPU
	// Call is one call into NVML. No check asks these: they are in the transcript beside
	// the answers that were made of them.
	Call Kind = "nvml call"
)

// Entry is one line of a transcript: a question with its answer, or a call into NVML.
type Entry struct {
	Kind     Kind            `json:"kind"`
	Question string          `json:"question"`
	Answer   json.RawMessage `json:"answer,omitempty"`
	Failure  *Failure        `json:"failure,omitempty"`
	// Took is how long the answer took: "1.2ms".
	Took string `json:"took"`
}

func newEntry(kind Kind, question string, answer any, err error, took time.Duration) Entry {
	entry := Entry{Kind: kind, Question: question, Took: took.Round(time.Microsecond).String()}
	if err == nil {
		entry.Answer, err = json.Marshal(answer)
	}
	entry.Failure = failure(err)
	return entry
}

// key finds the entries about a question.
func (e *Entry) key() string { return string(e.Kind) + ": " + e.Question }

// ErrNoAnswer says that the node did not answer a question in time.
var ErrNoAnswer = errors.New("no answer")

// Failure is an error as a transcript has it.
type Failure struct {
	Text string `json:"text"`
	// Is names the error that checks may look for.
	Is string `json:"is,omitempty"`
}

// reasons are the errors that checks tell apart. The first that fits counts.
var reasons = []struct {
	name string
	err  error
}{
	{"no answer", ErrNoAnswer},
	{"does not exist", fs.ErrNotExist},
	{"permission denied", fs.ErrPermission},
	{"not supported", gpu.ErrNotSupported},
}

// failure keeps of an error its text and what checks tell apart.
func failure(err error) *Failure {
	if err == nil {
		return nil
	}
	f := &Failure{Text: err.Error()}
	for _, r := range reasons {
		if f.Is == "" && errors.Is(err, r.err) {
			f.Is = r.name
		}
	}
	return f
}

func (f *Failure) Error() string { return f.Text }

// Unwrap returns the error that Is names.
func (f *Failure) Unwrap() error {
	for _, r := range reasons {
		if r.name == f.Is {
			return r.err
		}
	}
	return nil
}

// transcript writes entries as lines, each as soon as it is known: what hangs the node
// leaves a transcript of all that was before.
type transcript struct {
	mu  sync.Mutex
	out io.Writer // nil where none is wanted
	// err is the first error. A run goes on after it: what was changed has to be undone.
	err   error
	calls []Entry // into NVML so far
}

func (t *transcript) add(line any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.out != nil && t.err == nil {
		t.err = json.NewEncoder(t.out).Encode(line)
	}
}

// ofGPUWord is between a function of NVML and the GPU that a call was about.
const ofGPUWord = " of GPU "

// observe notes a call into NVML.
func (t *transcript) observe(_ context.Context, c nvml.Call) {
	question := c.Function
	if c.PCIAddress != "" {
		question += ofGPUWord + c.PCIAddress
	}
	entry := newEntry(Call, question, c.Answer, c.Err, c.Took)
	t.add(entry)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls = append(t.calls, entry)
}

// times returns how long the calls of each function took, in order, of those that matter.
func (t *transcript) times(matters func(function, pciAddress string, failed bool) bool) map[string][]time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	times := map[string][]time.Duration{}
	for _, call := range t.calls {
		function, pciAddress, _ := strings.Cut(call.Question, ofGPUWord)
		if took, err := time.ParseDuration(call.Took); err == nil && matters(function, pciAddress, call.Failure != nil) {
			times[function] = append(times[function], took)
		}
	}
	for _, took := range times {
		slices.Sort(took)
	}
	return times
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
	for line := 2; ; line++ {
		var entry Entry
		switch err := lines.Decode(&entry); {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return n, nil
		case err != nil:
			return nil, fmt.Errorf("read line %d of the transcript: %w", line, err)
		case entry.Kind == Call:
			n.transcript.calls = append(n.transcript.calls, entry)
		default:
			n.recorded[entry.key()] = append(n.recorded[entry.key()], entry)
		}
	}
}

// replay answers a question from the transcript, in the order of asking. What is missing counts as
// not answered: checks ask more than they did when the transcript was made.
func (n *Node) replay(kind Kind, question string) Entry {
	entry := Entry{Kind: kind, Question: question}
	key := entry.key()
	if len(n.recorded[key]) == 0 {
		entry.Failure = failure(fmt.Errorf("%w: the transcript does not have %s", ErrNoAnswer, key))
		return entry
	}
	entry = n.recorded[key][0]
	n.recorded[key] = n.recorded[key][1:]
	return entry
}
