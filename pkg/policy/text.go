// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// String returns one line, for logs and people.
func (e Effective) String() string { return e.From() + ": " + e.Offer.String() }

// From names what the offer is from.
func (e Effective) From() string {
	if e.Rule == "" {
		return "default"
	}
	return fmt.Sprintf("rule %q", e.Rule)
}

// String returns one line, for logs and people.
func (o Offer) String() string {
	var parts []string
	if o.Whole {
		parts = append(parts, string(Whole))
	}
	parts = append(parts, o.Partition.texts()...)
	if o.MPS != nil {
		parts = append(parts, o.MPS.String())
	}
	if o.TimeSlice != nil {
		parts = append(parts, o.TimeSlice.String())
	}
	return cmp.Or(strings.Join(parts, "; "), "nothing")
}

func (p *PartitionOffer) texts() []string {
	if p == nil {
		return nil
	}
	var parts []string
	switch {
	case p.Profiles == nil && p.Variants:
		parts = append(parts, string(Partition)+" all profiles")
	case p.Profiles == nil:
		parts = append(parts, string(Partition)+" all profiles but variants")
	case len(p.Profiles) > 0:
		parts = append(parts, string(Partition)+" "+strings.Join(p.Profiles, ", "))
	}
	for _, s := range p.Shares {
		var how []string
		if s.MPS != nil {
			how = append(how, s.MPS.String())
		}
		if s.TimeSlice != nil {
			how = append(how, s.TimeSlice.String())
		}
		parts = append(parts, fmt.Sprintf("%s shares %s: %s", Partition, strings.Join(s.Profiles, ", "), strings.Join(how, " and ")))
	}
	return parts
}

// String leaves out values without an effect.
func (o *MPSOffer) String() string {
	text := string(MPS) + " " + clients(o.Clients) + times("memory", o.MemoryOvercommit) + times("compute", o.ComputeOvercommit)
	if o.ReservedMemoryBytes > 0 {
		text += ", " + memory(o.ReservedMemoryBytes) + " reserved"
	}
	if o.ServerMemoryBytes != nil {
		text += ", " + memory(*o.ServerMemoryBytes) + " for the server"
	}
	if o.ContextMemoryBytes != nil {
		text += ", " + memory(*o.ContextMemoryBytes) + " for the context of each"
	}
	if o.ClientPriority == PriorityBelowNormal {
		text += ", with a priority below normal"
	}
	if o.OnClientKilled == KilledRestart {
		text += ", restarted when a client is killed"
	}
	return text
}

func memory(bytes int64) string { return resource.NewQuantity(bytes, resource.BinarySI).String() }

// String leaves out values without an effect.
func (o *TimeSliceOffer) String() string {
	text := string(TimeSlice) + " " + clients(o.Clients) + times("memory", o.MemoryOvercommit)
	if o.Interval != "" && o.Interval != IntervalDefault {
		text += ", interval " + string(o.Interval)
	}
	return text
}

func clients(n int) string {
	if n == 1 {
		return "1 client"
	}
	return strconv.Itoa(n) + " clients"
}

func times(what string, overcommit float64) string {
	if overcommit <= 1 {
		return ""
	}
	return ", " + what + " x" + strconv.FormatFloat(overcommit, 'f', -1, 64)
}
