// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/test/expect"
)

// An initialisation that takes too long is not done twice: what it comes to at
// last is what the next Open has.
func TestInitialisationIsLeftBehind(t *testing.T) {
	for _, result := range []nvml.Return{nvml.SUCCESS, nvml.ERROR_DRIVER_NOT_LOADED} {
		t.Run(describe(result), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lib := &fakeLibrary{initResult: result}
				release := lib.hang("InitWithFlags")
				c := New(Options{Calls: call.New(time.Second)})
				c.uses(lib)
				var err error
				expect.Equal(t, took(func() { err = c.Open(t.Context()) }), time.Second, "the first attempt took")
				hung := expectHung(t, err, "nvmlInitWithFlags", "")
				expect.Equal(t, took(func() { err = c.Open(t.Context()) }), 0, "the second attempt waited")
				if again := expectHung(t, err, "nvmlInitWithFlags", ""); again.Done != hung.Done {
					t.Errorf("another call is out: %v", again)
				}

				release()
				<-hung.Done
				lib.initResult = nvml.SUCCESS
				expect.Do(t, c.Open(t.Context()), "after the call returned")
				expect.Equal(t, lib.inits, 1+min(1, int(result)), "initialisations")
				c.Close()
				expect.Equal(t, lib.shutdowns, 1, "shutdowns")
			})
		})
	}
}

// Nobody opened what came of an initialisation, and it is ended all the same.
func TestCloseAfterInitialisationWasLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := &fakeLibrary{}
		release := lib.hang("InitWithFlags")
		c := New(Options{})
		c.uses(lib)
		hung := expectHung(t, c.Open(t.Context()), "nvmlInitWithFlags", "")
		release()
		<-hung.Done
		c.Close()
		expect.Equal(t, lib.shutdowns, 1, "shutdowns")
	})
}

func TestOpenWaitsNoLongerThanItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := &fakeLibrary{}
		release := lib.hang("InitWithFlags")
		c := New(Options{})
		c.uses(lib)
		opened := make(chan error)
		go func() { opened <- c.Open(t.Context()) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		expect.Is(t, c.Open(ctx), context.DeadlineExceeded)
		release()
		if err := <-opened; err != nil || lib.inits != 1 {
			t.Errorf("%d initialisations, %v", lib.inits, err)
		}
	})
}

func TestCloseWhileCallIsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		device := &fakeDevice{busID: busID, mig: true}
		lib := &fakeLibrary{devices: []*fakeDevice{device}}
		c := openFake(t, lib)
		release := device.hang("GetMigMode")
		_, err := c.MIGState(t.Context(), pci)
		hung := expectHung(t, err, "nvmlDeviceGetMigMode", pci)
		if elapsed := took(c.Close); elapsed != 0 || lib.shutdowns != 0 {
			t.Errorf("waited %s, %d shutdowns", elapsed, lib.shutdowns)
		}
		if elapsed := took(func() { _, err = c.MIGState(t.Context(), pci) }); elapsed != 0 || !errors.Is(err, gpu.ErrHung) {
			t.Errorf("after Close: %v after %s", err, elapsed)
		}
		release()
		<-hung.Done
		if err := c.Open(t.Context()); err != nil || lib.inits != 1 {
			t.Errorf("open again: %d initialisations, %v", lib.inits, err)
		}
		if c.Close(); lib.shutdowns != 1 {
			t.Errorf("%d shutdowns", lib.shutdowns)
		}
	})
}

func TestShutdownThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := &fakeLibrary{}
		c := openFake(t, lib)
		release := lib.hang("Shutdown")
		expect.Equal(t, took(c.Close), call.DefaultLimit, "waited")
		hung := expectHung(t, c.Open(t.Context()), "nvmlShutdown", "")
		release()
		<-hung.Done
		expect.Do(t, c.Open(t.Context()), "after the call returned")
	})
}

// NVML counts its users, so a session on which a call is out cannot be
// replaced.
func TestDeadSessionWhileCallIsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		device := &fakeDevice{busID: busID, mig: true}
		lib := &fakeLibrary{devices: []*fakeDevice{device}}
		c := openFake(t, lib)
		release := device.hang("GetMigMode")
		_, err := c.MIGState(t.Context(), pci)
		hung := expectHung(t, err, "nvmlDeviceGetMigMode", pci)
		lib.countResult = nvml.ERROR_UNINITIALIZED
		err = c.Open(t.Context())
		_ = expectHung(t, err, "nvmlDeviceGetMigMode", pci)
		if !errors.Is(err, gpu.ErrDriverNotLoaded) || lib.shutdowns != 0 {
			t.Errorf("%d shutdowns, %v", lib.shutdowns, err)
		}
		release()
		<-hung.Done
		if err := c.Open(t.Context()); err != nil || lib.shutdowns != 1 || lib.inits != 2 {
			t.Errorf("%d shutdowns, %d initialisations, %v", lib.shutdowns, lib.inits, err)
		}
	})
}
