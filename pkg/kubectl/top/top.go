// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package top shows what claims use of their devices, as the driver measures it.
package top

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
)

// ClaimUsageList is what the command prints.
type ClaimUsageList struct {
	metav1.TypeMeta `json:",inline"`

	Items []ClaimUsage `json:"items"`
}

// ClaimUsage is what a claim uses of a device. What is missing is not known.
type ClaimUsage struct {
	scrape.Claim `json:",inline"`

	// RequestedBytes is the memory that the claim asks for, which may be less than it got.
	RequestedBytes *int64   `json:"requestedBytes,omitempty"`
	IdleSeconds    *float64 `json:"idleSeconds,omitempty"`
	// IdleForLonger says that it may have been longer: it is the time since the driver was started.
	IdleForLonger bool     `json:"idleForLonger,omitempty"`
	Pods          []string `json:"pods,omitempty"`
	// Unknown says why nothing is known.
	Unknown string `json:"unknown,omitempty"`
}

// Claims joins what claims hold with what the driver measured.
func Claims(m *fleet.Model, r *scrape.Result, scope fleet.Scope, now time.Time) *ClaimUsageList {
	list := &ClaimUsageList{TypeMeta: printer.TypeMeta("ClaimUsageList"), Items: []ClaimUsage{}}
	for _, h := range m.Holdings {
		if !scope.Has(h) {
			continue
		}
		u := ClaimUsage{Claim: scrape.Claim{ID: scrape.IDOf(h)}}
		if told, why := r.Of(h); told == nil {
			u.Unknown = why
		} else if u.Claim = *told; told.Idle != nil {
			u.IdleSeconds, u.IdleForLonger = new(told.Idle.Seconds()), told.IdleForLonger(fleet.AllocatedAt(h.Claim).Time, now)
		}
		if h.Device != nil {
			u.Kind, u.Profile = cmp.Or(h.Device.Type, u.Kind), cmp.Or(h.Device.Profile, u.Profile)
		}
		if ask := h.Ask(h.Claim); ask != nil && *ask.Capacity != nil {
			if memory, asks := (*ask.Capacity).Requests[fleet.CapacityMemory]; asks {
				u.RequestedBytes = new(memory.Value())
			}
		}
		for _, p := range h.Pods {
			u.Pods = append(u.Pods, p.Name)
		}
		list.Items = append(list.Items, u)
	}
	return list
}

// orders are the values of --sort-by for claims: what is most of it comes first.
var orders = map[string]func(a, b ClaimUsage) int{
	"name":   func(_, _ ClaimUsage) int { return 0 },
	"node":   func(a, b ClaimUsage) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Device, b.Device)) },
	"memory": func(a, b ClaimUsage) int { return most(a.UsedBytes, b.UsedBytes) },
	"peak":   func(a, b ClaimUsage) int { return most(a.PeakBytes, b.PeakBytes) },
	"sm":     func(a, b ClaimUsage) int { return most(a.Utilization, b.Utilization) },
	"idle":   func(a, b ClaimUsage) int { return most(a.IdleSeconds, b.IdleSeconds) },
}

// sortBy orders what is listed, and by name among equals.
func sortBy[T any](items []T, order, names func(a, b T) int) {
	slices.SortStableFunc(items, func(a, b T) int { return cmp.Or(order(a, b), names(a, b)) })
}

// most compares so that what is more comes first, and what is not known last.
func most[T cmp.Ordered](a, b *T) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return 1
	case b == nil:
		return -1
	}
	return cmp.Compare(*b, *a)
}

// Sort orders claims by a value of --sort-by, and by name among equals.
func (l *ClaimUsageList) Sort(by string) {
	sortBy(l.Items, orders[by], func(a, b ClaimUsage) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Device, b.Device))
	})
}

// View shows claims to people, with their namespaces if these are several.
func (l *ClaimUsageList) View(namespaces bool) printer.View {
	t := l.Table(namespaces)
	return &printer.Text{Named: t.Names(), Render: func(w *bytes.Buffer, f printer.Format) error {
		err := t.Render(w, f)
		if slices.ContainsFunc(l.Items, func(u ClaimUsage) bool { return u.IdleForLonger }) {
			w.WriteString("\n" + printer.IdleForLonger + "\n")
		}
		return err
	}}
}

// Table shows claims to people, with their namespaces if these are several.
func (l *ClaimUsageList) Table(namespaces bool) *printer.Table {
	t := &printer.Table{
		Columns: printer.Columns("namespace", "claim", "node", "holds", "used", "limit", "asked", "sm", "idle", "pods",
			"+peak", "+processes", "+device", "+unknown"),
		Empty: fleet.NoClaims(namespaces),
	}
	t.Columns[0].Hidden = !namespaces
	for _, u := range l.Items {
		processes := printer.Unknown
		if u.Processes != nil {
			processes = fmt.Sprint(*u.Processes)
		}
		row := printer.Row{Name: "resourceclaim.resource.k8s.io/" + u.Name, Cells: []string{
			u.Namespace, u.Name, u.Node, fleet.KindText(u.Kind, u.Profile),
			printer.BytesOrUnknown(u.UsedBytes), printer.BytesOrUnknown(u.LimitBytes), printer.BytesOrUnknown(u.RequestedBytes),
			printer.PercentOrUnknown(u.Utilization), printer.AtLeast(u.IdleSeconds, u.IdleForLonger), cmp.Or(strings.Join(u.Pods, ","), printer.Unknown),
			printer.BytesOrUnknown(u.PeakBytes), processes, u.Device, cmp.Or(u.Unknown, printer.Unknown),
		}}
		switch {
		case u.Unknown != "":
			row.Style = printer.Faint
		case u.Throttled != nil && *u.Throttled:
			row.Style = printer.Warn
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
