// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import "slices"

// Taint is one of some of a GPU's devices.
type Taint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
	// Devices is how many have it, of all but observers.
	Devices int `json:"devices"`
	Of      int `json:"of"`
}

// Taints returns those of the GPU's devices, each once.
func (g *GPU) Taints() []Taint {
	var out []Taint
	of := 0
	for _, d := range g.Devices {
		// An observer is tainted so that nobody has it without admin access.
		if d.Type == TypeObserver {
			continue
		}
		of++
		for _, t := range d.Taints {
			i := slices.IndexFunc(out, func(o Taint) bool { return o.Key == t.Key && o.Value == t.Value && o.Effect == string(t.Effect) })
			if i < 0 {
				i, out = len(out), append(out, Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
			}
			out[i].Devices++
		}
	}
	for i := range out {
		out[i].Of = of
	}
	return out
}
