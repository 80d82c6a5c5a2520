// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package call

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// TestBlame: of calls that do not return, those are hung that no older one of another GPU explains.
func TestBlame(t *testing.T) {
	const third = "0000:3d:00.0"
	type one struct {
		pci, of string
		at      time.Duration // when it is made
		returns time.Duration // 0: never
	}
	tests := map[string]struct {
		calls  []one         // as they are made
		after  time.Duration // when it is asked about the last one
		hung   bool
		behind string
	}{
		"alone":                       {calls: []one{{pci: first}}, after: DefaultLimit, hung: true},
		"not yet":                     {calls: []one{{pci: first}}, after: DefaultLimit - 1},
		"behind another GPU":          {calls: []one{{pci: first}, {pci: second, at: moment + 1}}, after: 2 * DefaultLimit, behind: first},
		"at the same moment":          {calls: []one{{pci: first}, {pci: second, at: moment}}, after: 2 * DefaultLimit, hung: true},
		"behind the driver":           {calls: []one{{of: "the driver"}, {pci: second, at: 2 * time.Second}}, after: 2 * DefaultLimit, behind: "the driver"},
		"the oldest is said":          {calls: []one{{pci: first}, {pci: second, at: 2 * time.Second}, {pci: third, at: 3 * time.Second}}, after: 2 * DefaultLimit, behind: first},
		"two of a GPU":                {calls: []one{{pci: first}, {pci: first, of: "events", at: time.Second}}, after: 2 * DefaultLimit, hung: true},
		"two of none":                 {calls: []one{{of: "the driver"}, {of: "parameters", at: 2 * time.Second}}, after: 2 * DefaultLimit, behind: "the driver"},
		"behind a GPU's events":       {calls: []one{{pci: first, of: "events"}, {pci: second, at: 2 * time.Second}}, after: 2 * DefaultLimit, behind: first},
		"long after it":               {calls: []one{{pci: first}, {pci: second, at: explains + 1}}, after: 3 * DefaultLimit, hung: true},
		"long after one, behind next": {calls: []one{{pci: first}, {pci: second, at: explains}, {pci: third, at: explains + 2*moment}}, after: 3 * DefaultLimit, behind: second},
		"it has returned":             {calls: []one{{pci: first, returns: time.Minute}, {pci: second}}, after: time.Minute + SlowAfter, hung: true},
		"it has just returned":        {calls: []one{{pci: first, returns: time.Minute}, {pci: second}}, after: time.Minute + SlowAfter - 1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				all, began := New(0), time.Now()
				until := func(at time.Duration) { time.Sleep(at - time.Since(began)) }
				var asked *inFlight
				for _, one := range test.calls {
					until(one.at)
					q := all.Of(one.pci, one.of)
					c := must.Get(q.enter(t.Context(), "nvmlOf "+one.pci+one.of))(t)
					if one.returns > 0 {
						time.AfterFunc(one.returns-one.at, func() { q.leave(t.Context(), c, nil) })
					}
					asked = c
				}
				until(test.after)
				synctest.Wait()
				p := asked.pending(nil)
				if errors.Is(p, gpu.ErrHung) != test.hung || errors.Is(p, gpu.ErrSlow) == test.hung {
					t.Errorf("it is %v, want that it is hung: %v", p, test.hung)
				}
				if (p.Behind != nil) != (test.behind != "") || !strings.Contains(p.Error(), test.behind) {
					t.Errorf("it is %v, want that behind %q", p, test.behind)
				}
			})
		})
	}
}

// TestYoungerCallIsNoExcuse: a call is hung although one that was made later has returned.
func TestYoungerCallIsNoExcuse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := New(0)
		c := must.Get(all.GPU(first).enter(t.Context(), "nvmlSomething"))(t)
		time.Sleep(DefaultLimit - time.Second)
		must.Get(Do(t.Context(), all.GPU(second), "nvmlOther", takes(time.Second)))(t)
		expect.Is(t, c.pending(nil), gpu.ErrHung)
	})
}
