// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package economics

import (
	"path"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/partage-dev/partage/pkg/util/strict"
)

// maxPrice is far more than a GPU costs for an hour.
const maxPrice = 1e6

// Prices says what GPUs cost for an hour. The zero value knows no price.
type Prices struct {
	entries []price
}

type price struct {
	glob   string
	dollar float64
}

// Flat returns one price for all GPUs.
func Flat(dollar float64) Prices { return Prices{[]price{{"*", dollar}}} }

// DecodePrices reads a list of prices in YAML, in which names of products, or globs of them, have
// prices: "NVIDIA H100*: 3.25". The first that matches a GPU counts.
func DecodePrices(data []byte) (Prices, error) {
	root, err := strict.Parse(data)
	if err != nil {
		return Prices{}, err
	}
	var prices Prices
	reader := &strict.Reader{}
	reader.Map(root, field.NewPath("prices"), func(name string, n *yaml.Node, at *field.Path) {
		if _, err := path.Match(name, ""); err != nil || name == "" {
			reader.Invalid(n, at, "must have the name of a product or a glob such as \"NVIDIA H100*\" before it")
			return
		}
		prices.entries = append(prices.entries, price{name, reader.NumberBetween(n, at, 0, maxPrice)})
	})
	if err := reader.Err(); err != nil {
		return Prices{}, err
	}
	return prices, nil
}

// Of returns what a GPU costs for an hour, and whether that is known.
func (p Prices) Of(product string) (float64, bool) {
	for _, e := range p.entries {
		// A malformed glob is refused when the list is read.
		if matched, err := path.Match(plain(e.glob), plain(product)); err == nil && matched {
			return e.dollar, true
		}
	}
	return 0, false
}

// None reports whether no price is known.
func (p Prices) None() bool { return len(p.entries) == 0 }

// plain ignores letter case and lets '*' match a slash, as in the sharing policy.
func plain(text string) string { return strings.ReplaceAll(strings.ToLower(text), "/", "\x00") }
