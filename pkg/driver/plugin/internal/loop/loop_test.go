// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package loop

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestTrigger(t *testing.T) {
	trigger := NewTrigger()
	for range 3 {
		trigger.Fire()
	}
	<-trigger
	select {
	case <-trigger:
		t.Error("requests made before the loop got to them count more than once")
	default:
	}
	trigger.Fire()
	<-trigger
}

func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if !Pause(t.Context(), time.Minute) || time.Since(began) != time.Minute {
			t.Errorf("paused for %s", time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		if Pause(ctx, time.Minute) || time.Since(began) != time.Second {
			t.Errorf("paused for %s although the context ended", time.Since(began))
		}
	})
}
