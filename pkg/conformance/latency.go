// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/partage-dev/partage/pkg/gpu/nvml"
)

// calls are the calls into NVML so far.
type calls struct {
	mu  sync.Mutex
	all []nvml.Call
}

const ofGPU = " of GPU "

// observe notes one call.
func (n *Node) observe(c nvml.Call) {
	n.calls.mu.Lock()
	n.calls.all = append(n.calls.all, c)
	n.calls.mu.Unlock()

	question := c.Function
	if c.PCIAddress != "" {
		question += ofGPU + c.PCIAddress
	}
	entry := Entry{Kind: Call, Question: question, Took: c.Took.Round(time.Microsecond).String()}
	if c.Err != nil {
		entry.Failure = failure(c.Err)
	} else if data, err := json.Marshal(c.Answer); err == nil {
		entry.Answer = data
	}
	n.transcript.add(entry)
}

// call is what observe has made the entry of.
func (e *Entry) call() (nvml.Call, error) {
	function, pciAddress, _ := strings.Cut(e.Question, ofGPU)
	took, err := time.ParseDuration(e.Took)
	c := nvml.Call{Function: function, PCIAddress: pciAddress, Took: took}
	if e.Failure != nil {
		c.Err = e.Failure
	}
	return c, err
}

// Latency is how long the calls of one function of NVML took.
type Latency struct {
	Function        string
	Calls           int
	Median, Longest time.Duration
}

// latencies returns those of all functions that were called, the slowest first.
func (c *calls) latencies() []Latency {
	c.mu.Lock()
	defer c.mu.Unlock()
	took := map[string][]time.Duration{}
	for _, call := range c.all {
		took[call.Function] = append(took[call.Function], call.Took)
	}
	var all []Latency
	for function, times := range took {
		slices.Sort(times)
		all = append(all, Latency{function, len(times), times[len(times)/2], times[len(times)-1]})
	}
	slices.SortFunc(all, func(a, b Latency) int { return int(b.Longest - a.Longest) })
	return all
}

// latencies are those of a run up to now.
type latencies struct {
	// Limit is the driver's for one call.
	Limit     time.Duration
	Functions []Latency
}
