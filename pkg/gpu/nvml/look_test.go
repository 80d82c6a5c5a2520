// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
)

// goroutine is the number of the one that runs.
func goroutine() string {
	stack := make([]byte, 64)
	return string(bytes.Fields(stack[:runtime.Stack(stack, false)])[1])
}

// TestLookSharesGoroutine: calls on the lane of a look are made in one goroutine, each with the limit
// of a call, and others as always.
func TestLookSharesGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, other := &lane{pci: pci, limit: defaultCallLimit}, &lane{pci: otherPCI, limit: defaultCallLimit}
		ran := map[string]int{}
		call := func(ctx context.Context, l *lane) error {
			id, err := get(ctx, l, "nvmlDeviceGetUUID", func() (string, nvml.Return) {
				time.Sleep(defaultCallLimit - time.Second)
				return goroutine(), nvml.SUCCESS
			})
			ran[id]++
			return err
		}
		own := goroutine()
		var err error
		elapsed := took(func() {
			err = lookAlong(t.Context(), l, func(ctx context.Context) error {
				return errors.Join(call(ctx, l), call(ctx, l), call(ctx, l), call(ctx, other))
			})
		})
		if want := 4 * (defaultCallLimit - time.Second); err != nil || elapsed != want {
			t.Errorf("%v after %s, want that after %s", err, elapsed, want)
		}
		if len(ran) != 2 || ran[own] > 0 {
			t.Errorf("calls by goroutine: %v", ran)
		}
	})
}

// TestLookThatHangs: a look ends with the call that is left behind, which is observed once, and its caller
// has what was found out before.
func TestLookThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var observed []Call
		l := &lane{pci: pci, limit: defaultCallLimit, observe: func(_ context.Context, c Call) { observed = append(observed, c) }}
		release := make(chan struct{})
		found := ""
		err := lookAlong(t.Context(), l, func(ctx context.Context) error {
			found, _ = get(ctx, l, "nvmlDeviceGetName", func() (string, nvml.Return) { return "H100", nvml.SUCCESS })
			found, _ = get(ctx, l, "nvmlDeviceGetUUID", func() (string, nvml.Return) {
				<-release
				return "late", nvml.SUCCESS
			})
			return nil
		})
		hung := expectHung(t, err, "nvmlDeviceGetUUID", pci)
		if _, err := get(t.Context(), l, "nvmlDeviceGetName", func() (string, nvml.Return) { return "", nvml.SUCCESS }); !errors.Is(err, gpu.ErrHung) {
			t.Errorf("the lane is free: %v", err)
		}
		close(release)
		<-hung.Done
		synctest.Wait()
		if found != "H100" {
			t.Errorf("found %q", found)
		}
		if l.hung() != nil {
			t.Error("the lane is not free again")
		}
		var names []string
		for _, c := range observed {
			names = append(names, c.Function)
		}
		if len(names) != 3 || names[1] != "nvmlDeviceGetUUID" || observed[1].Took != defaultCallLimit || observed[1].Err == nil {
			t.Errorf("observed %+v", observed)
		}
	})
}

// TestPanic: a panic is the error of its call or look, and the lane is free for what comes next, also
// where the call was left behind.
func TestPanic(t *testing.T) {
	const call = "nvmlDeviceGetUUID"
	ways := map[string]func(context.Context, *lane, func() nvml.Return) error{
		"call": func(ctx context.Context, l *lane, f func() nvml.Return) error { return do(ctx, l, call, f) },
		"call in a look": func(ctx context.Context, l *lane, f func() nvml.Return) error {
			return lookAlong(ctx, l, func(ctx context.Context) error { return do(ctx, l, call, f) })
		},
		"look": func(ctx context.Context, l *lane, f func() nvml.Return) error {
			return lookAlong(ctx, l, func(context.Context) error { return failure(call, pci, f()) })
		},
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &lane{pci: pci, limit: defaultCallLimit}
				try := func(f func() nvml.Return) error { return way(t.Context(), l, f) }
				if err := try(func() nvml.Return { panic("wrong") }); err == nil || !strings.Contains(err.Error(), "wrong") {
					t.Errorf("after a panic: %v", err)
				}
				if name != "look" {
					release := make(chan struct{})
					err := try(func() nvml.Return {
						<-release
						panic("wrong, and late")
					})
					hung := expectHung(t, err, call, pci)
					close(release)
					<-hung.Done
				}
				if err := try(func() nvml.Return { return nvml.SUCCESS }); err != nil {
					t.Errorf("what comes next: %v", err)
				}
			})
		})
	}
}
