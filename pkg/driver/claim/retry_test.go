// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

// failTimes makes an effect fail the first times.
func failTimes(effect string, times int, err error) func(string) error {
	return func(e string) error {
		if e == effect && times > 0 {
			times--
			return err
		}
		return nil
	}
}

const always = 1 << 30

func TestRetry(t *testing.T) {
	unknown := fmt.Errorf("nvmlSomething: %w", gpu.ErrUnknown)
	for name, test := range map[string]struct {
		before   func(string) error
		deadline time.Duration
		want     string // nothing: success
		took     time.Duration
		left     bool
	}{
		"never fails":           {},
		"passes":                {before: failTimes("create instance", 3, unknown), took: 1700 * time.Millisecond},
		"timeout of the driver": {before: failTimes("create compute instance", 1, gpu.ErrTimeout), took: 200 * time.Millisecond},
		"does not pass": {
			before: failTimes("create instance", always, unknown),
			want:   "tried 6 times: device " + sliceA0 + ": create a partition with " + addressA0.String() + ": nvmlSomething: unknown driver error", took: 7700 * time.Millisecond,
		},
		"no time": {
			before: failTimes("create instance", always, unknown), deadline: time.Second,
			want: "tried 3 times: ", took: 700 * time.Millisecond,
		},
		"another reason":      {before: failTimes("create instance", always, gpu.ErrNoPermission), want: "device " + sliceA0 + ": create a partition with " + addressA0.String() + ": no permission"},
		"then another reason": {before: both(failTimes("mode on", 1, unknown), failTimes("create instance", 1, gpu.ErrNoPermission)), want: "tried 2 times: device " + sliceA0 + ": create a partition with " + addressA0.String() + ": no permission", took: 200 * time.Millisecond},
		"cannot be undone": {
			before: both(failTimes("create compute instance", 1, gpu.ErrNoPermission), failTimes("destroy instance", 2, gpu.ErrNoPermission)),
			want:   "undo: device " + sliceA0, left: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBox(t)
				m := b.manager()
				b.hooks(test.before, nil)
				ctx := t.Context()
				if test.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.deadline)
					defer cancel()
				}
				start := time.Now()
				_, err := m.Prepare(ctx, newClaim("u1", sliceA0))
				if took := time.Since(start); took != test.took {
					t.Errorf("took %s, want %s", took, test.took)
				}
				b.hooks(nil, nil)
				if test.want == "" {
					if err != nil {
						t.Error(err)
					}
					mustUnprepare(t, m, "u1")
				} else {
					wantError(t, err, test.want)
				}
				if test.left {
					mustReconcile(t, m)
				}
				if left := slices.DeleteFunc(b.state(), func(s string) bool { return strings.HasPrefix(s, "MIG mode of") }); len(left) > 0 {
					t.Errorf("left behind: %v", left) // the mode stays until a whole GPU is wanted
				}
			})
		})
	}
}

func both(a, b func(string) error) func(string) error {
	return func(e string) error { return errors.Join(a(e), b(e)) }
}

// Waiting does not help against somebody else's partitions.
func TestNoRetryOnDividedGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		b.makeForeign(addressA0)
		start := time.Now()
		_, err := b.manager().Prepare(t.Context(), newClaim("u1", wholeA))
		if !errors.Is(err, gpu.ErrInUse) || time.Since(start) > 0 {
			t.Errorf("after %s: got %v", time.Since(start), err)
		}
	})
}

// Between two attempts the GPU is free for others.
func TestRetryLetsOthersWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBox(t)
		m := b.manager()
		b.hooks(failTimes("create instance", 1, gpu.ErrUnknown), nil)
		done := make(chan error)
		go func() {
			_, err := m.Prepare(t.Context(), newClaim("u1", sliceA0))
			done <- err
		}()
		synctest.Wait()
		start := time.Now()
		mustPrepare(t, m, newClaim("u2", sliceA4))
		if waited := time.Since(start); waited > 0 {
			t.Errorf("waited for %s", waited)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestRetryJointly: what several GPUs of a claim need together is tried again as well.
func TestRetryJointly(t *testing.T) {
	for _, effect := range []string{"start session", "write spec"} {
		runInBubble(t, effect, func(t *testing.T) {
			b := newBox(t)
			m := b.manager()
			b.hooks(failTimes(effect, 3, gpu.ErrUnknown), nil)
			start := time.Now()
			mustPrepare(t, m, configure(newClaim("u1", wholeA, wholeC), fromClaim, gpuMPS))
			if took, want := time.Since(start), 1700*time.Millisecond; took != want {
				t.Errorf("took %s, want %s", took, want)
			}
			mustUnprepare(t, m, "u1")
			b.wantNothing()
		})
	}
}
