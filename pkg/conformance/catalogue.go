// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"cmp"
	"context"
	_ "embed" // boards.json
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/gpu"
)

// boardsJSON is the part of the simulator's catalogue that can be measured. TestBoards
// makes it.
//
//go:embed boards.json
var boardsJSON []byte

// catalogued returns what the catalogue has of a product, or nil.
func catalogued(product string) *Board {
	var boards []Board
	if err := json.Unmarshal(boardsJSON, &boards); err != nil {
		return nil // TestBoards makes sure that it can be read
	}
	for i := range boards {
		if boards[i].Product.Name == product {
			return &boards[i]
		}
	}
	return nil
}

// compare judges how a GPU differs from what the catalogue has of it.
func compare(q *inquiry, g *gpu.GPU, differences func(is, known *Board) []string) Finding {
	facts, known := gpuFacts(g).of(q), catalogued(g.ProductName)
	if known == nil {
		return cannot("the catalogue has no %s; --catalogue-patch writes what is known now", g.ProductName)
	}
	is := measure(g, facts, known)
	if found := differences(&is, known); len(found) > 0 {
		return expect(false, "%s", strings.Join(found, "; "))
	}
	return expect(true, "as in %s.yaml", known.Name)
}

// differingMIG lists how partitions differ. A profile that the catalogue lacks is one that the
// driver was not tested with, too.
func differingMIG(board, catalogue *Board) []string {
	is, known := board.MIG, catalogue.MIG
	if is == nil || known == nil {
		return []string{fmt.Sprintf("MIG is possible: %t, in the catalogue %t", is != nil, known != nil)}
	}
	found := differing("", is, known, known.Tags)
	byName := map[string]Profile{}
	for _, p := range known.Profiles {
		byName[p.Name] = p
	}
	for _, p := range is.Profiles {
		if expected, ok := byName[p.Name]; ok {
			found = append(found, differing(p.Name+" ", p, expected, expected.Tags)...)
		} else {
			found = append(found, p.Name+" is not in the catalogue")
		}
		delete(byName, p.Name)
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		found = append(found, name+" is in the catalogue only")
	}
	return found
}

// differing lists the values of a section that were measured and are others than those of
// the catalogue, by their keys there. Profiles are sections of their own.
func differing(prefix string, is, known any, tags Tags) (found []string) {
	measured, expected := fields(is), fields(known)
	for _, key := range slices.Sorted(maps.Keys(measured)) {
		if slices.Contains([]string{"source", "except", "profiles"}, key) || measured[key] == expected[key] || expected[key] == "" {
			continue
		}
		found = append(found, fmt.Sprintf("%s%s %s, in the catalogue %s (%s)", prefix, key, measured[key], expected[key], cmp.Or(tags.Except[key], tags.Source)))
	}
	return found
}

// fields returns the values of a section as text.
func fields(section any) map[string]string {
	var raw map[string]json.RawMessage
	if data, err := json.Marshal(section); err != nil || json.Unmarshal(data, &raw) != nil {
		return nil // a section has nothing that JSON does not have
	}
	out := map[string]string{}
	for key, value := range raw {
		out[key] = strings.Trim(string(value), `"`)
	}
	return out
}

// measurements are what the parts mps and intrusive have measured of a product, beside what the read-only part reads.
type measurements struct {
	mps         BoardMPS
	serverStart time.Duration
	// instanceIDs are those of GPU instances, by profile, in the order of the placements.
	instanceIDs map[string][]int
}

// measuredOf returns the measurements of a GPU's product, for a check to add to.
func (n *Node) measuredOf(g *gpu.GPU) *measurements {
	m := n.measured[g.ProductName]
	if m == nil {
		m = &measurements{instanceIDs: map[string][]int{}}
		n.measured[g.ProductName] = m
	}
	return m
}

// contextMemory notes what a context has taken of a limit. The least counts: what a program
// cannot get may also be too small a piece.
func contextMemory(of **uint64, limit, taken uint64) {
	if took := (limit - taken) / mib; taken > 0 && taken < limit && (*of == nil || took < **of) {
		*of = &took
	}
}

const (
	// leastLatency is how long a call takes that the catalogue has an entry for.
	leastLatency = time.Millisecond
	// endOfSession comes after all that is written.
	endOfSession = "nvmlShutdown"
)

// WriteCataloguePatch writes what was measured of the GPUs, one document for each product in
// the form of test/gpusim/catalog/boards, and one in that of latencies.yaml beside it where
// calls took a time that counts. It is meant to be merged by hand: values that nobody
// measured are not in it.
func (n *Node) WriteCataloguePatch(ctx context.Context, out io.Writer) error {
	q := &inquiry{ctx: ctx, Node: n}
	node := gpus.of(q)
	var text bytes.Buffer
	fmt.Fprintf(&text, "# Measured on %s by gpu-kubelet-plugin %s with driver %s.\n", n.header.Time, n.header.Version, node.DriverVersion)
	for i := range node.GPUs {
		isSame := func(g gpu.GPU) bool { return g.ProductName == node.GPUs[i].ProductName }
		if !slices.ContainsFunc(node.GPUs[:i], isSame) {
			q.writeProduct(&text, &node.GPUs[i], node.GPUs)
		}
	}
	if q.err == nil {
		_, q.err = text.WriteTo(out)
	}
	if q.err != nil {
		return fmt.Errorf("write what was measured: %w", q.err)
	}
	return nil
}

// writeProduct writes what was measured of the GPUs of one product, of which the first is g.
func (q *inquiry) writeProduct(text *bytes.Buffer, g *gpu.GPU, all []gpu.GPU) {
	board, more := measure(g, gpuFacts(g).of(q), catalogued(g.ProductName)), q.measuredOf(g)
	if more.mps != (BoardMPS{}) {
		board.MPS = &more.mps
		board.MPS.Source = measured
	}
	if board.MIG != nil {
		for i := range board.MIG.Profiles {
			board.MIG.Profiles[i].InstanceIDs = more.instanceIDs[board.MIG.Profiles[i].Name]
		}
	}
	text.WriteString("---\n")
	encoder := yaml.NewEncoder(text)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	q.err = errors.Join(q.err, encoder.Encode(&board), encoder.Close())
	// Half of the calls that succeeded took this time at most.
	medians := map[string]time.Duration{"mps_server_start": more.serverStart}
	for function, times := range q.transcript.times(func(function, pciAddress string, failed bool) bool {
		isOurs := func(one gpu.GPU) bool { return one.PCIAddress == pciAddress && one.ProductName == g.ProductName }
		return !failed && function != endOfSession && (pciAddress == "" || slices.ContainsFunc(all, isOurs))
	}) {
		medians[function] = times[(len(times)-1)/2]
	}
	maps.DeleteFunc(medians, func(_ string, took time.Duration) bool { return took < leastLatency })
	if len(medians) > 0 {
		fmt.Fprintf(text, "---\n# For latencies.yaml.\n- name: %s\n  description: measured on %s\n  calls:\n", board.Name, g.ProductName)
	}
	for _, function := range slices.Sorted(maps.Keys(medians)) {
		fmt.Fprintf(text, "  - {function: %s, source: measured, base: %s}\n", function, medians[function])
	}
}
