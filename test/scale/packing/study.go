// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Study is a set of simulations.
type Study struct {
	Models []string
	Loads  []float64
	// Seeds is how many runs with other random numbers each figure is the mean of.
	Seeds          int
	Warmup, Claims int
}

// Default is the study that the documentation shows.
var Default = Study{
	Models: []string{"h100-80-sxm", "a100-80"}, Loads: []float64{0.5, 0.6, 0.7, 0.8, 0.9},
	Seeds: 10, Warmup: 2000, Claims: 20000,
}

// Write runs the study and writes its tables: one node, by rule, and several nodes, by which of
// them the scheduler takes.
func (s Study) Write(w io.Writer) error {
	for _, model := range s.Models {
		b, err := LoadBoard(model)
		if err != nil {
			return err
		}
		for _, mix := range Mixes {
			if err := s.oneNode(w, b, model, mix); err != nil {
				return err
			}
			if err := s.severalNodes(w, b, model, mix); err != nil {
				return err
			}
		}
	}
	return nil
}

// oneNode compares the rules.
func (s Study) oneNode(w io.Writer, b *Board, model string, mix Mix) error {
	title := fmt.Sprintf("1 node with 8 %s, requests: %s", model, mix.Name)
	return s.table(w, b, title, len(Rules), func(column int) (string, Churn, Rule) {
		return Rules[column].Name, Churn{Nodes: 1, GPUs: 8, Mix: mix}, Rules[column]
	})
}

// severalNodes compares the ways to choose a node.
func (s Study) severalNodes(w io.Writer, b *Board, model string, mix Mix) error {
	orders := []struct {
		name  string
		order NodeOrder
	}{{"node with the fewest claims", Spread}, {"node with the most claims", Pack}}
	title := fmt.Sprintf("4 nodes with 8 %s, requests: %s, order as published", model, mix.Name)
	return s.table(w, b, title, len(orders), func(column int) (string, Churn, Rule) {
		return orders[column].name, Churn{Nodes: 4, GPUs: 8, Mix: mix, Order: orders[column].order}, Published
	})
}

// table writes acceptance by load and column.
func (s Study) table(w io.Writer, b *Board, title string, columns int, of func(column int) (name string, c Churn, r Rule)) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "\n%s: accepted at once, %% of 3g, 4g and 7g together (of each; of all requests)\nload", title)
	for column := range columns {
		name, _, _ := of(column)
		fmt.Fprintf(table, "\t%s", name)
	}
	fmt.Fprintln(table)
	for _, load := range s.Loads {
		fmt.Fprintf(table, "%.1f", load)
		for column := range columns {
			_, churn, rule := of(column)
			churn.Load = load
			outcome, err := s.mean(b, churn, rule)
			if err != nil {
				return err
			}
			fmt.Fprintf(table, "\t%s", outcome.cell(churn.Mix))
		}
		fmt.Fprintln(table)
	}
	return table.Flush()
}

// mean adds up the runs with all seeds.
func (s Study) mean(b *Board, c Churn, r Rule) (Outcome, error) {
	sum := Outcome{Asked: map[string]int{}, Accepted: map[string]int{}}
	for seed := range s.Seeds {
		c.Seed, c.Warmup, c.Claims = uint64(seed), s.Warmup, s.Claims // #nosec G115 -- not negative
		outcome, err := c.Run(b, r)
		if err != nil {
			return Outcome{}, err
		}
		for profile, n := range outcome.Asked {
			sum.Asked[profile] += n
			sum.Accepted[profile] += outcome.Accepted[profile]
		}
	}
	return sum, nil
}

func (o Outcome) cell(mix Mix) string {
	text := fmt.Sprintf("%.1f (", 100*o.Acceptance(Large...))
	for _, p := range Large {
		text += fmt.Sprintf("%s %.1f, ", p, 100*o.Acceptance(p))
	}
	var all []string
	for _, share := range mix.Shares {
		all = append(all, share.Profile)
	}
	return text + fmt.Sprintf("all %.1f)", 100*o.Acceptance(all...))
}
