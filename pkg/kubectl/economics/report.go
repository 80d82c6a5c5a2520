// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"cmp"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
)

// TimeBase is what a Report is made of.
const TimeBase = "what claims have now, as if it stayed so"

// Report is what a fleet costs and saves. Amounts of money are in dollars; they are absent where
// a price that they need is not known.
type Report struct {
	metav1.TypeMeta `json:",inline"`

	TimeBase  string    `json:"timeBase"`
	Overheads Overheads `json:"overheadPercent"`
	// Fleet, Models and Idle are missing where claims of other namespaces could not be read: how the GPUs are used is unknown then.
	Fleet      *Usage      `json:"fleet,omitempty"`
	Models     []ModelCost `json:"models,omitempty"`
	Namespaces []Namespace `json:"namespaces"`
	// Idle is what no claim has. With the namespaces it adds up to all GPUs.
	Idle   *Idle   `json:"idle,omitempty"`
	Claims []Claim `json:"claims"`
	// WithoutPrice are models in use whose price is not known.
	WithoutPrice []string `json:"withoutPrice,omitempty"`
}

// Overheads are by how many percent sharing slows work, on devices that several claims have.
type Overheads struct {
	MPS       float64 `json:"mps"`
	TimeSlice float64 `json:"timeSlice"`
}

// DefaultOverheads are the larger ones of those published, so that savings are rather too small.
func DefaultOverheads() Overheads {
	return Overheads{MPS: 100 * Overhead(MPS).High, TimeSlice: 100 * Overhead(TimeSlice).High}
}

// Usage is how GPUs are used.
type Usage struct {
	GPUs  int `json:"gpus"`
	InUse int `json:"inUse"`
	// Claims is how many have a part of them.
	Claims int `json:"claims"`
	// Unshared is how many GPUs the claims would need if none shared one.
	Unshared int `json:"unshared"`
	// SavingPercent is the part of these that is not needed.
	SavingPercent float64 `json:"savingPercent"`
	// RecoveredPerDay are GPU-hours of a day that further claims use on GPUs which would
	// otherwise have one each.
	RecoveredPerDay float64 `json:"recoveredGPUHoursPerDay"`
	// PerHour is what the GPUs in use cost, UnsharedPerHour what the unshared ones would.
	PerHour         *float64 `json:"perHour,omitempty"`
	UnsharedPerHour *float64 `json:"unsharedPerHour,omitempty"`
	PerMonth        *float64 `json:"perMonth,omitempty"`
	UnsharedMonth   *float64 `json:"unsharedPerMonth,omitempty"`
}

// Idle is what no claim has, of GPUs in use and of others.
type Idle struct {
	GPUs float64 `json:"gpus"`
	// PerHour is what it costs.
	PerHour *float64 `json:"perHour,omitempty"`
	some    bool
}

// ModelCost is the usage of the GPUs of a model.
type ModelCost struct {
	Product string `json:"product"`
	Usage   `json:",inline"`
	// ShareRoom is how many claims its GPUs have room for as the shares that are offered.
	ShareRoom int `json:"shareRoom"`
	// Price is that of a GPU and hour.
	Price *float64 `json:"pricePerHour,omitempty"`
	// PerClaim is what a claim costs for an hour on average, with overheads.
	PerClaim *float64 `json:"perClaimAndHour,omitempty"`
}

// Namespace is what the claims of a namespace cost.
type Namespace struct {
	Name   string `json:"name"`
	Claims int    `json:"claims"`
	// GPUs are parts of GPUs together, Unshared the GPUs that the claims would need alone.
	GPUs     float64 `json:"gpus"`
	Unshared int     `json:"unshared"`
	Money    `json:",inline"`
}

// Claim is what a claim costs.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Devices are those it has.
	Devices  []string `json:"devices"`
	GPUs     float64  `json:"gpus"`
	Unshared int      `json:"unshared"`
	// OverheadPercent is by how much sharing slows its work, the largest of its devices. The money is without it.
	OverheadPercent float64 `json:"overheadPercent"`
	Money           `json:",inline"`
}

// Money is for an hour.
type Money struct {
	PerHour         *float64 `json:"perHour,omitempty"`
	UnsharedPerHour *float64 `json:"unsharedPerHour,omitempty"`
}

// add adds money, where nothing is known unless all parts are.
func (m *Money) add(other Money, first bool) {
	m.PerHour = sum(m.PerHour, other.PerHour, first)
	m.UnsharedPerHour = sum(m.UnsharedPerHour, other.UnsharedPerHour, first)
}

func sum(a, b *float64, first bool) *float64 {
	switch {
	case b == nil, a == nil && !first:
		return nil
	case a == nil:
		return new(*b)
	}
	return new(*a + *b)
}

// NewReport makes the report of a fleet.
func NewReport(m *fleet.Model, prices Prices, overheads Overheads) *Report {
	c := &calculation{prices: prices, overheads: overheads, claims: map[string]*Claim{}, models: map[string]*modelSum{}}
	for g := range m.GPUs() {
		c.addGPU(g)
	}
	r := &Report{
		TypeMeta: printer.TypeMeta("Cost"), TimeBase: TimeBase, Overheads: overheads, Fleet: &Usage{}, Models: []ModelCost{}, Idle: &c.idle,
		Namespaces: []Namespace{}, Claims: []Claim{},
	}
	c.addModels(r)
	c.addClaims(r)
	r.Fleet.Claims = len(r.Claims)
	if m.Hides(fleet.ResourceClaims) {
		r.Fleet, r.Models, r.Idle = nil, nil, nil
	}
	return r
}

// modelSum is a model while GPUs are added.
type modelSum struct {
	ModelCost
	claims map[string]bool
	// shared is what the claims cost together, with overheads.
	shared float64
}

// calculation adds up GPUs.
type calculation struct {
	prices    Prices
	overheads Overheads
	claims    map[string]*Claim
	models    map[string]*modelSum
	idle      Idle
}

func (c *calculation) addGPU(g *fleet.GPU) {
	m := c.models[g.ProductName]
	if m == nil {
		m = &modelSum{ModelCost: ModelCost{Product: g.ProductName}, claims: map[string]bool{}}
		if dollar, known := c.prices.Of(g.ProductName); known {
			m.Price = new(dollar)
		}
		c.models[g.ProductName] = m
	}
	m.GPUs++
	m.ShareRoom += shareRoom(g)
	tenants := tenantsOf(g)
	idle := 1.0
	for _, t := range tenants {
		idle -= t.part
	}
	c.addIdle(idle, m.Price)
	if len(tenants) == 0 {
		return
	}
	m.InUse++
	m.Unshared += len(tenants)
	m.RecoveredPerDay += RecoveredPerDay(1, len(tenants))
	for _, t := range tenants {
		overhead := t.overhead(c.overheads)
		m.claims[t.key] = true
		claim := c.claims[t.key]
		first := claim == nil
		if first {
			claim = &Claim{Namespace: t.namespace, Name: t.name}
			c.claims[t.key] = claim
		}
		claim.Devices = append(claim.Devices, t.devices...)
		claim.GPUs += t.part
		claim.Unshared++
		claim.OverheadPercent = max(claim.OverheadPercent, overhead)
		money := Money{}
		if m.Price != nil {
			// Of the price, the tenant pays its part. Work that sharing slows needs it for longer.
			m.shared += CostPerWorkload(*m.Price*t.part, overhead/100, 1)
			money = Money{PerHour: new(*m.Price * t.part), UnsharedPerHour: m.Price}
		}
		claim.add(money, first)
	}
}

// addIdle adds what nobody has of a GPU. What it costs is unknown if a price is.
func (c *calculation) addIdle(part float64, price *float64) {
	if price != nil {
		price = new(part * *price)
	}
	c.idle.PerHour = sum(c.idle.PerHour, price, !c.idle.some)
	c.idle.GPUs, c.idle.some = c.idle.GPUs+part, true
}

// addModels adds models, and all of them together.
func (c *calculation) addModels(r *Report) {
	hour, unshared, known := 0.0, 0.0, true
	// In a fixed order: sums of floating-point numbers depend on it.
	for _, product := range slices.Sorted(maps.Keys(c.models)) {
		m := c.models[product]
		m.Claims = len(m.claims)
		m.SavingPercent = 100 * Saving(float64(m.InUse), float64(m.Unshared))
		if m.Price != nil {
			m.price(float64(m.InUse)**m.Price, float64(m.Unshared)**m.Price)
			if m.Claims > 0 {
				m.PerClaim = new(m.shared / float64(m.Claims))
			}
			hour, unshared = hour+*m.PerHour, unshared+*m.UnsharedPerHour
		} else if m.InUse > 0 {
			known = false
			r.WithoutPrice = append(r.WithoutPrice, m.Product)
		}
		f := r.Fleet
		f.GPUs, f.InUse, f.Unshared = f.GPUs+m.GPUs, f.InUse+m.InUse, f.Unshared+m.Unshared
		f.RecoveredPerDay += m.RecoveredPerDay
		r.Models = append(r.Models, m.ModelCost)
	}
	r.Fleet.SavingPercent = 100 * Saving(float64(r.Fleet.InUse), float64(r.Fleet.Unshared))
	if known && !c.prices.None() {
		r.Fleet.price(hour, unshared)
	}
}

func (u *Usage) price(hour, unshared float64) {
	u.PerHour, u.UnsharedPerHour = &hour, &unshared
	u.PerMonth, u.UnsharedMonth = new(MonthlyCost(1, hour)), new(MonthlyCost(1, unshared))
}

// addClaims adds claims, and namespaces of them.
func (c *calculation) addClaims(r *Report) {
	for _, claim := range c.claims {
		r.Claims = append(r.Claims, *claim)
	}
	slices.SortFunc(r.Claims, func(a, b Claim) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	for _, claim := range r.Claims {
		last := len(r.Namespaces) - 1
		first := last < 0 || r.Namespaces[last].Name != claim.Namespace
		if first {
			r.Namespaces = append(r.Namespaces, Namespace{Name: claim.Namespace})
			last++
		}
		n := &r.Namespaces[last]
		n.Claims++
		n.GPUs += claim.GPUs
		n.Unshared += claim.Unshared
		n.add(claim.Money, first)
	}
}
