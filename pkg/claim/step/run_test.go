// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package step

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/claim/journal"
)

var errBroken = errors.New("broken")

// call is one of a method of an effect.
type call struct{ method, step string }

// fakeEffect logs what is called and fails where it is told to.
type fakeEffect struct {
	name string
	log  *[]string
	fail map[call]error
}

func (f fakeEffect) call(method string) error {
	*f.log = append(*f.log, method+" "+f.name)
	return f.fail[call{method, f.name}]
}

func (f fakeEffect) Check(*Scene) error                  { return f.call("check") }
func (f fakeEffect) Apply(context.Context, *Scene) error { return f.call("apply") }
func (f fakeEffect) Undo(context.Context, *Scene) error  { return f.call("undo") }
func (f fakeEffect) Forget(*journal.Record)              { _ = f.call("forget") }

// fakeSteps are two devices, a session on both, and the interval of the second.
func fakeSteps(fail map[call]error) (steps []Step, log *[]string) {
	log = new([]string)
	for _, s := range []struct {
		name string
		keys []string
	}{{"a", []string{"a"}}, {"b", []string{"b"}}, {"c", []string{"c"}}, {"session", []string{"a", "b"}}, {"interval", []string{"b"}}, {"spec", nil}} {
		steps = append(steps, Step{Name: s.name, Keys: s.keys, Effect: fakeEffect{s.name, log, fail}})
	}
	return steps, log
}

func fakeScene() *Scene {
	return &Scene{Record: journal.New(journal.Ref{UID: "u1"}, "boot-1"), Others: &journal.Snapshot{}}
}

// TestCheckStops shows that nothing is checked after a step that must not be applied,
// and that the error names the device.
func TestCheckStops(t *testing.T) {
	steps, log := fakeSteps(map[call]error{{"check", "b"}: errBroken})
	err := Check(steps, fakeScene())
	if !errors.Is(err, errBroken) {
		t.Errorf("got %v", err)
	}
	claimtest.WantError(t, err, "device b: broken")
	if diff := cmp.Diff([]string{"check a", "check b"}, *log); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestApply shows how many steps there are to undo after a failure.
func TestApply(t *testing.T) {
	for name, test := range map[string]struct {
		fail  map[call]error
		begun int
		text  string
		last  string
	}{
		"all":                {nil, 6, "", "apply spec"},
		"fails":              {map[call]error{{"apply", "b"}: errBroken}, 2, "device b: broken", "apply b"},
		"fails, not begun":   {map[call]error{{"apply", "b"}: notBegun(errBroken)}, 1, "device b: broken", "apply b"},
		"first, not begun":   {map[call]error{{"apply", "a"}: notBegun(errBroken)}, 0, "device a: broken", "apply a"},
		"wrapped, not begun": {map[call]error{{"apply", "b"}: errors.Join(notBegun(errBroken))}, 1, "broken", "apply b"},
		"of no device":       {map[call]error{{"apply", "spec"}: errBroken}, 6, "broken", "apply spec"},
	} {
		t.Run(name, func(t *testing.T) {
			steps, log := fakeSteps(test.fail)
			begun, err := Apply(t.Context(), steps, fakeScene())
			if begun != test.begun || (err == nil) != (test.text == "") {
				t.Errorf("begun: got %d, want %d (%v)", begun, test.begun, err)
			}
			if test.text != "" {
				claimtest.WantError(t, err, test.text)
				if !errors.Is(err, errBroken) {
					t.Errorf("got %v", err)
				}
			}
			if got := (*log)[len(*log)-1]; got != test.last {
				t.Errorf("the last call was %q, want %q", got, test.last)
			}
		})
	}
	if notBegun(nil) != nil {
		t.Error("no error is one")
	}
}

// TestUndo shows that steps are undone last to first, and that one that fails keeps what
// it stands on and nothing else.
func TestUndo(t *testing.T) {
	for name, test := range map[string]struct {
		begun int
		fail  map[call]error
		want  string
		errs  int
	}{
		"all": {
			begun: 6,
			want: "undo spec, forget spec, undo interval, forget interval, undo session, forget session, " +
				"undo c, forget c, undo b, forget b, undo a, forget a",
		},
		"some": {
			begun: 2,
			want:  "forget spec, forget interval, forget session, forget c, undo b, forget b, undo a, forget a",
		},
		"none": {want: "forget spec, forget interval, forget session, forget c, forget b, forget a"},
		"a device stays": {
			begun: 6, fail: map[call]error{{"undo", "b"}: errBroken}, errs: 1,
			want: "undo spec, forget spec, undo interval, forget interval, undo session, forget session, " +
				"undo c, forget c, undo b, undo a, forget a",
		},
		"a session keeps its devices": {
			begun: 6, fail: map[call]error{{"undo", "session"}: errBroken}, errs: 1,
			want: "undo spec, forget spec, undo interval, forget interval, undo session, undo c, forget c",
		},
		"an interval keeps its device and the session": {
			begun: 6, fail: map[call]error{{"undo", "interval"}: errBroken}, errs: 1,
			want: "undo spec, forget spec, undo interval, undo c, forget c, undo a, forget a",
		},
		"the spec keeps nothing": {
			begun: 6, fail: map[call]error{{"undo", "spec"}: errBroken, {"undo", "c"}: errBroken}, errs: 2,
			want: "undo spec, undo interval, forget interval, undo session, forget session, undo c, undo b, forget b, undo a, forget a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			steps, log := fakeSteps(test.fail)
			errs := Undo(t.Context(), steps, test.begun, fakeScene())
			if len(errs) != test.errs || slices.ContainsFunc(errs, func(err error) bool { return !errors.Is(err, errBroken) }) {
				t.Errorf("errors: got %v, want %d", errs, test.errs)
			}
			if diff := cmp.Diff(strings.Split(test.want, ", "), *log); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestUndoErrorsAreInOrder shows that the errors are in the order of the steps.
func TestUndoErrorsAreInOrder(t *testing.T) {
	steps, _ := fakeSteps(map[call]error{{"undo", "a"}: errBroken, {"undo", "c"}: errBroken})
	errs := Undo(t.Context(), steps, len(steps), fakeScene())
	if len(errs) != 2 {
		t.Fatalf("got %v", errs)
	}
	claimtest.WantError(t, errs[0], "device a")
	claimtest.WantError(t, errs[1], "device c")
}
