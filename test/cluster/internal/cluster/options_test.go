// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"
)

func TestParseNodes(t *testing.T) {
	tests := map[string]struct {
		text string
		want []Node
		err  string
	}{
		"one":             {text: "n1", want: []Node{{Name: "n1"}}},
		"three":           {text: "n1=dgx-h100,cpu,n2=a100-40x8", want: []Node{{"n1", "dgx-h100"}, {Name: "cpu"}, {"n2", "a100-40x8"}}},
		"none":            {text: "", err: "want NAME"},
		"no name":         {text: "=dgx-h100", err: "want NAME"},
		"no machine":      {text: "n1=", err: "no machine"},
		"empty entry":     {text: "n1,", err: "want NAME"},
		"twice":           {text: "n1,n1=mixed", err: "the name n1"},
		"path":            {text: "../n1", err: "want NAME"},
		"upper case":      {text: "N1", err: "want NAME"},
		"too long a name": {text: strings.Repeat("a", 33), err: "want NAME"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ParseNodes(tc.text)
			if !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
			if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
		})
	}
}

// Every node that may be asked for must have addresses of its own.
func TestHosts(t *testing.T) {
	seen := map[string]bool{}
	for place := range maxNodes {
		h := host("n", place)
		if !nodeNetwork.Contains(h.Address) || !podNetwork.Overlaps(h.Pods) || h.Pods.Contains(h.Address) {
			t.Errorf("node %d: %+v", place, h)
		}
		for _, s := range []string{h.Address.String(), h.Pods.String()} {
			if seen[s] {
				t.Errorf("two nodes have %s", s)
			}
			seen[s] = true
		}
	}
	if first := host("n1", 0); first.Address.String() != "10.91.0.1" || first.Pods.String() != "10.92.0.0/24" {
		t.Errorf("the first node is %+v", first)
	}
}
