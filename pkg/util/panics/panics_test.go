// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package panics

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

var errDefect = errors.New("a defect")

// fail panics with a value, or returns an error.
func fail(ctx context.Context, recovered func(context.Context, *error), value any, result error) (err error) {
	defer recovered(ctx, &err)
	if value != nil {
		panic(value)
	}
	return result
}

func TestRecover(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	sink, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("the logger has no buffer")
	}
	ctx := klog.NewContext(t.Context(), logger)
	var repeated Repeated
	for name, test := range map[string]struct {
		recovered func(context.Context, *error)
		lines     int
	}{
		"every time": {Recover, 2},
		"once":       {repeated.Recover, 1},
	} {
		before := len(sink.GetBuffer().Data())
		for range 2 {
			if err := fail(ctx, test.recovered, "a defect", nil); err == nil || err.Error() != "internal error in the driver: a defect" {
				t.Errorf("%s: panic gives %v", name, err)
			}
		}
		if err := fail(ctx, test.recovered, nil, errDefect); !errors.Is(err, errDefect) || strings.Contains(err.Error(), "internal") {
			t.Errorf("%s: an error becomes %v", name, err)
		}
		if err := fail(ctx, test.recovered, nil, nil); err != nil {
			t.Errorf("%s: success becomes %v", name, err)
		}
		logged := sink.GetBuffer().Data()[before:]
		if len(logged) != test.lines {
			t.Errorf("%s: %d lines, want %d", name, len(logged), test.lines)
		}
		for _, entry := range logged {
			if !strings.Contains(fmt.Sprint(entry.ParameterKVList), "panics.fail") {
				t.Errorf("%s: no stack in %v", name, entry.ParameterKVList)
			}
		}
	}
	if err := fail(ctx, Recover, errDefect, nil); !errors.Is(err, errDefect) {
		t.Errorf("a panic with an error gives %v", err)
	}
}
