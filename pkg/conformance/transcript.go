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
	mu  sync.Mutex
	out io.Writer
	err error
}

func (t *transcript) add(line any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.out == nil || t.err != nil {
		return
	}
	data, err := json.Marshal(line)
	if err == nil {
		_, err = t.out.Write(append(data, '\n'))
	}
	t.err = err
}

// failed returns the first error. A run goes on after it: what was changed has to be undone.
func (t *transcript) failed() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// player is the source that answers from a transcript.
type player struct {
	entries map[string][]Entry // by kind and question, in the order of asking
	calls   []nvml.Call        // without answers
}

func key(kind Kind, question string) string { return string(kind) + ": " + question }

// answer takes what is missing for not answered: checks ask more than they did when the
// transcript was made.
func (p *player) answer(_ context.Context, kind Kind, question string, _ func(context.Context) (json.RawMessage, error)) Entry {
	k := key(kind, question)
	if len(p.entries[k]) == 0 {
		return Entry{Kind: kind, Question: question, Failure: failure(fmt.Errorf("%w: the transcript does not have %s", ErrNoAnswer, k))}
	}
	entry := p.entries[k][0]
	p.entries[k] = p.entries[k][1:]
	return entry
}

// readTranscript reads what a run has written. The last line may be cut off.
func readTranscript(in io.Reader) (Header, *player, error) {
	lines := json.NewDecoder(bufio.NewReader(in))
	var header Header
	if err := lines.Decode(&header); err != nil {
		return Header{}, nil, fmt.Errorf("read the first line of the transcript: %w", err)
	}
	if header.Transcript != transcriptVersion {
		return Header{}, nil, fmt.Errorf("the first line of the transcript has version %d: want %d", header.Transcript, transcriptVersion)
	}
	p := &player{entries: map[string][]Entry{}}
	for line := 2; ; line++ {
		var entry Entry
		err := lines.Decode(&entry)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return header, p, nil
		}
		if err != nil {
			return Header{}, nil, fmt.Errorf("read line %d of the transcript: %w", line, err)
		}
		if entry.Kind == Call {
			call, err := entry.call()
			if err != nil {
				return Header{}, nil, fmt.Errorf("read line %d of the transcript: %w", line, err)
			}
			p.calls = append(p.calls, call)
			continue
		}
		k := key(entry.Kind, entry.Question)
		p.entries[k] = append(p.entries[k], entry)
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
