// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// Write writes the tables.
func (r *Report) Write(w io.Writer) error {
	if len(r.Stages) == 0 {
		return nil
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	r.writeMemory(table)
	r.writePhases(table)
	r.writeRequests(table)
	return table.Flush()
}

func (r *Report) writeMemory(w io.Writer) {
	fmt.Fprintf(w, "\n%d nodes with %d %s, memory in MB: resident / reachable", r.Nodes, r.GPUs, r.Model)
	for _, s := range r.Stages {
		fmt.Fprintf(w, "\t%s", s.Name)
	}
	fmt.Fprintln(w, "\tresident at most")
	for _, c := range components {
		fmt.Fprint(w, c)
		for _, s := range r.Stages {
			fmt.Fprintf(w, "\t%.0f", megabytes(s.Memory[c].resident))
			if heap := s.Memory[c].heap; heap > 0 {
				fmt.Fprintf(w, " / %.0f", megabytes(heap))
			}
		}
		fmt.Fprintf(w, "\t%.0f\n", megabytes(r.Stages[len(r.Stages)-1].Memory[c].peak))
	}
	fmt.Fprint(w, "etcd, its database")
	for _, s := range r.Stages {
		fmt.Fprintf(w, "\t%.0f", megabytes(s.Memory[etcd].database))
	}
	fmt.Fprintln(w)
}

func (r *Report) writePhases(w io.Writer) {
	fmt.Fprintln(w, "\nphase\ttime, s\trequests of plugins\trefused\tper second\tat most\tMB sent\tMB received\tCPU, s: "+strings.Join(components, ", "))
	for _, p := range r.Phases {
		refused := 0
		for _, n := range p.Counts.Refused {
			refused += n
		}
		seconds := max(p.Took.Seconds(), 1)
		fmt.Fprintf(w, "%s\t%.1f\t%d\t%d\t%.0f\t%d\t%.1f\t%.1f\t", p.Name, p.Took.Seconds(), p.Counts.Requests(), refused,
			float64(p.Counts.Requests())/seconds, p.Counts.Peak, megabytes(p.Counts.Sent), megabytes(p.Counts.Received))
		for i, c := range components {
			if i > 0 {
				fmt.Fprint(w, ", ")
			}
			fmt.Fprintf(w, "%.1f", p.CPU[c].Seconds())
		}
		fmt.Fprintln(w)
	}
}

func (r *Report) writeRequests(w io.Writer) {
	fmt.Fprintln(w, "\nphase\trequests, the most frequent first")
	for _, p := range r.Phases {
		all := clone(p.Counts.Answered)
		for what, n := range p.Counts.Refused {
			all[what] = n
		}
		var texts []string
		for _, what := range slices.SortedFunc(maps.Keys(all), func(a, b string) int {
			if all[a] != all[b] {
				return all[b] - all[a]
			}
			return strings.Compare(a, b)
		}) {
			texts = append(texts, fmt.Sprintf("%d %s", all[what], what))
		}
		fmt.Fprintf(w, "%s\t%s\n", p.Name, strings.Join(texts, ", "))
	}
}

func megabytes(bytes int64) float64 { return float64(bytes) / 1e6 }
