// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"cmp"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// TimeBase is what a Report is made of.
const TimeBase = "what claims have now, as if it stayed so"

// Report is what a fleet costs and saves. Amounts of money are in dollars; they are absent without a price.
type Report struct {
	metav1.TypeMeta `json:",inline"`

	TimeBase        string   `json:"timeBase"`
	PricePerGPUHour *float64 `json:"pricePerGPUHour,omitempty"`
	// Fleet, Models, Idle and OutOfUse are missing where claims of other namespaces could not be read, or no GPU is published: how the GPUs are
	// used is unknown then.
	Fleet      *Usage      `json:"fleet,omitempty"`
	Models     []*Usage    `json:"models,omitempty"`
	Namespaces []Namespace `json:"namespaces"`
	// Idle is what no claim has and one could have, OutOfUse what no claim has nor could have, of GPUs that are lost, cordoned, or on nodes that
	// take no pods. With the namespaces they add up to all GPUs.
	Idle     *Part   `json:"idle,omitempty"`
	OutOfUse *Part   `json:"outOfUse,omitempty"`
	Claims   []Claim `json:"claims"`
	// Unpublished is how many devices claims have that no ResourceSlice has: their GPUs count nowhere.
	Unpublished int `json:"unpublishedDevices,omitempty"`

	unknown string
}

// Usage is how GPUs are used: those of a model, or all.
type Usage struct {
	Product string `json:"product,omitempty"`
	GPUs    int    `json:"gpus"`
	InUse   int    `json:"inUse"`
	// Claims is how many have a part of them.
	Claims int `json:"claims"`
	// Unshared is how many GPUs the claims would need if none shared one.
	Unshared int `json:"unshared"`
	// SavingPercent is the part of these that is not needed.
	SavingPercent float64 `json:"savingPercent"`
	// RecoveredPerDay are GPU-hours of a day that further claims use on GPUs which would
	// otherwise have one each.
	RecoveredPerDay float64 `json:"recoveredGPUHoursPerDay"`
	// ShareRoom is how many claims the GPUs have room for as the shares that are offered.
	ShareRoom int `json:"shareRoom"`
	// PerHour is what the GPUs in use cost, UnsharedPerHour what the unshared ones would.
	PerHour         *float64 `json:"perHour,omitempty"`
	UnsharedPerHour *float64 `json:"unsharedPerHour,omitempty"`
	PerMonth        *float64 `json:"perMonth,omitempty"`
	UnsharedMonth   *float64 `json:"unsharedPerMonth,omitempty"`

	claims map[types.NamespacedName]bool
}

// Part is how much of the GPUs a claim or a namespace has, or nobody.
type Part struct {
	// GPUs are parts of GPUs together, Unshared the GPUs that the claims would need alone.
	GPUs            float64  `json:"gpus"`
	Unshared        int      `json:"unshared,omitempty"`
	PerHour         *float64 `json:"perHour,omitempty"`
	UnsharedPerHour *float64 `json:"unsharedPerHour,omitempty"`
}

// Namespace is what the claims of a namespace have, and cost.
type Namespace struct {
	Name   string `json:"name"`
	Claims int    `json:"claims"`
	Part   `json:",inline"`
}

// Claim is what a claim has, and costs.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Devices are those it has.
	Devices []string `json:"devices"`
	Part    `json:",inline"`
}

func (c *Claim) id() types.NamespacedName {
	return types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
}

// NewReport makes the report of a fleet, with the price of a GPU for an hour if that is known.
func NewReport(m *fleet.Model, price *float64) *Report {
	r := &Report{
		TypeMeta: printer.TypeMeta("Cost"), TimeBase: TimeBase, PricePerGPUHour: price, Fleet: &Usage{}, Models: []*Usage{}, Idle: &Part{}, OutOfUse: &Part{},
		Namespaces: []Namespace{}, Claims: []Claim{},
	}
	claims, models := map[types.NamespacedName]*Claim{}, map[string]*Usage{}
	for g := range m.GPUs() {
		if models[g.ProductName] == nil {
			models[g.ProductName] = &Usage{Product: g.ProductName}
		}
		tenants, room := tenantsOf(g), shareRoom(g)
		models[g.ProductName].add(tenants, room)
		r.Fleet.add(tenants, room)
		rest := r.Idle
		if g.OutOfUse(m.Driver) {
			rest = r.OutOfUse
		}
		rest.GPUs++
		for _, t := range tenants {
			rest.GPUs -= t.GPUs
			if c := claims[t.id()]; c != nil {
				c.Devices, c.GPUs, c.Unshared = append(c.Devices, t.Devices...), c.GPUs+t.GPUs, c.Unshared+t.Unshared
				continue
			}
			claims[t.id()] = t
		}
	}
	// In a fixed order: sums of floating-point numbers depend on it.
	for _, product := range slices.Sorted(maps.Keys(models)) {
		r.Models = append(r.Models, models[product])
	}
	for _, c := range claims {
		r.Claims = append(r.Claims, *c)
	}
	slices.SortFunc(r.Claims, func(a, b Claim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, c := range r.Claims {
		if len(r.Namespaces) == 0 || r.Namespaces[len(r.Namespaces)-1].Name != c.Namespace {
			r.Namespaces = append(r.Namespaces, Namespace{Name: c.Namespace})
		}
		n := &r.Namespaces[len(r.Namespaces)-1]
		n.Claims, n.GPUs, n.Unshared = n.Claims+1, n.GPUs+c.GPUs, n.Unshared+c.Unshared
	}
	r.sumUp()
	r.leaveOut(m)
	return r
}

// leaveOut leaves out the sums that what is not known would be a part of, and says what that is.
func (r *Report) leaveOut(m *fleet.Model) {
	for _, h := range m.Holdings {
		if h.Device == nil && !h.Admin() {
			r.Unpublished++
		}
	}
	switch {
	case m.Hides(fleet.ResourceClaims):
		r.unknown = "Claims of other namespaces cannot be read"
	case len(m.Nodes) == 0:
		r.unknown = "No node publishes devices of driver " + m.Driver
	case r.Fleet.GPUs == 0:
		r.unknown = "Not all ResourceSlices of driver " + m.Driver + " are there"
	}
	if r.unknown != "" {
		r.Fleet, r.Models, r.Idle, r.OutOfUse = nil, nil, nil, nil
	}
}

// add adds a GPU with its claims and its room for shares.
func (u *Usage) add(tenants []*Claim, room int) {
	u.GPUs++
	u.ShareRoom += room
	u.Unshared += len(tenants)
	u.RecoveredPerDay += RecoveredPerDay(len(tenants))
	if len(tenants) > 0 {
		u.InUse++
	}
	if u.claims == nil {
		u.claims = map[types.NamespacedName]bool{}
	}
	for _, t := range tenants {
		u.claims[t.id()] = true
	}
}

// sumUp adds what follows from the numbers of GPUs and claims.
func (r *Report) sumUp() {
	money := func(gpus, hours float64) *float64 {
		if r.PricePerGPUHour == nil {
			return nil
		}
		return new(gpus * hours * *r.PricePerGPUHour)
	}
	for _, u := range append(r.Models, r.Fleet) {
		inUse, unshared := float64(u.InUse), float64(u.Unshared)
		u.Claims, u.SavingPercent = len(u.claims), 100*Saving(inUse, unshared)
		u.PerHour, u.UnsharedPerHour = money(inUse, 1), money(unshared, 1)
		u.PerMonth, u.UnsharedMonth = money(inUse, HoursPerMonth), money(unshared, HoursPerMonth)
	}
	parts := []*Part{r.Idle, r.OutOfUse}
	for i := range r.Namespaces {
		parts = append(parts, &r.Namespaces[i].Part)
	}
	for i := range r.Claims {
		parts = append(parts, &r.Claims[i].Part)
	}
	for _, p := range parts {
		p.PerHour = money(p.GPUs, 1)
		if p.Unshared > 0 {
			p.UnsharedPerHour = money(float64(p.Unshared), 1)
		}
	}
}

// tenantsOf returns the claims on a GPU with their part of it, as the other commands count it. Where they were promised more than there is,
// their parts are those of all together. Claims with admin access only watch.
func tenantsOf(g *fleet.GPU) (tenants []*Claim) {
	of := map[*resourceapi.ResourceClaim]*Claim{}
	total := 0.0
	for _, d := range g.Devices {
		for _, h := range d.Held() {
			t := of[h.Claim]
			if t == nil {
				t = &Claim{Namespace: h.Claim.Namespace, Name: h.Claim.Name, Part: Part{Unshared: 1}}
				of[h.Claim], tenants = t, append(tenants, t)
			}
			t.Devices = append(t.Devices, d.Name)
			t.GPUs += h.Part()
			total += h.Part()
		}
	}
	for _, t := range tenants {
		t.GPUs /= max(1, total)
	}
	return tenants
}
