// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/test/expect"
)

// The tests in this file run in bubbles with a clock of their own, which goes
// on when everything waits. So they know to the nanosecond how long something
// takes, and a bubble fails when a goroutine is left in it at the end.

const otherBusID, otherPCI = "00000000:2C:00.0", "0000:2c:00.0"

// took is how long f takes.
func took(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}

// expectHung checks that an error is that of a call that is out, and returns it.
func expectHung(t *testing.T, err error, name, pci string) *gpu.PendingError {
	t.Helper()
	var hung *gpu.PendingError
	if !errors.As(err, &hung) {
		t.Fatalf("not an error of a call that is out: %v", err)
	}
	if hung.Call != name || hung.PCIAddress != pci {
		t.Errorf("call %q on %q is out, want %q on %q", hung.Call, hung.PCIAddress, name, pci)
	}
	return hung
}

func TestCallThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		ctx := klog.NewContext(t.Context(), logger)
		broken, well := &fakeDevice{busID: busID, mig: true}, &fakeDevice{busID: otherBusID, mig: true}
		c := openFake(t, &fakeLibrary{devices: []*fakeDevice{broken, well}})
		release := broken.hang("GetMigMode")

		started := time.Now()
		_, err := c.MIGState(ctx, pci)
		hung := expectHung(t, err, "nvmlDeviceGetMigMode", pci)
		if waited := time.Since(started); waited != call.DefaultLimit || !hung.Since.Equal(started) {
			t.Errorf("left behind after %s, out since %s", waited, hung.Since)
		}
		// Nothing else is tried on this GPU, and it costs no time.
		elapsed := took(func() {
			for _, err := range []error{
				c.SetMIGMode(ctx, pci, true), c.DestroyInstance(ctx, pci, 1), c.DestroyComputeInstance(ctx, pci, 1, 0),
			} {
				if again := expectHung(t, err, "nvmlDeviceGetMigMode", pci); again.Done != hung.Done {
					t.Errorf("another call is out: %v", again)
				}
			}
		})
		if made := broken.count("GetMigMode"); elapsed != 0 || made != 1 {
			t.Errorf("took %s, %d calls made", elapsed, made)
		}
		// The other GPU is not concerned.
		if elapsed := took(func() { _, err = c.MIGState(ctx, otherPCI) }); err != nil || elapsed != 0 {
			t.Errorf("other GPU: %v after %s", err, elapsed)
		}

		time.Sleep(time.Minute)
		release()
		<-hung.Done
		expect.Do(t, expect.Err(c.MIGState(ctx, pci)), "after the call returned")
		synctest.Wait()
		underlier, _ := logger.GetSink().(ktesting.Underlier)
		log := underlier.GetBuffer().String()
		if strings.Count(log, "has returned") != 1 || !strings.Contains(log, `took="1m50s"`) || !strings.Contains(log, pci) {
			t.Errorf("log: %s", log)
		}
	})
}

// A caller that is cancelled gets the answer of the call that is under way, and the
// GPU is free for others then.
func TestCallerGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		device := &fakeDevice{busID: busID, mig: true}
		c := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}})
		release := device.hang("GetMigMode")
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		time.AfterFunc(3*time.Second, release)
		var err error
		expect.Equal(t, took(func() { _, err = c.MIGState(ctx, pci) }), 3*time.Second, "returned after")
		if gpu.IsPending(err) {
			t.Errorf("the call counts as one that is out: %v", err)
		}
		expect.Do(t, expect.Err(c.MIGState(t.Context(), pci)), "another caller")
	})
}

// A change that nobody waits for takes effect when it can.
func TestChangeIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		device := &fakeDevice{busID: busID, mig: true, setMode: func(d *fakeDevice, mode int) (nvml.Return, nvml.Return) {
			d.current, d.pending = mode, mode
			return nvml.SUCCESS, nvml.SUCCESS
		}}
		c := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}})
		release := device.hang("SetMigMode")
		hung := expectHung(t, c.SetMIGMode(t.Context(), pci, true), "nvmlDeviceSetMigMode", pci)
		release()
		<-hung.Done
		if err := c.SetMIGMode(t.Context(), pci, true); err != nil || device.count("SetMigMode") != 1 {
			t.Errorf("%d calls, %v", device.count("SetMigMode"), err)
		}
	})
}

// What undoes a creation can hang as well, and is not tried where the GPU does
// not answer anyway.
func TestUndoThatHangs(t *testing.T) {
	for _, test := range []struct {
		hangs, name string
		infoResult  nvml.Return
		destroys    int
	}{
		{hangs: "instance Destroy", name: "nvmlGpuInstanceDestroy", infoResult: nvml.ERROR_UNKNOWN, destroys: 1},
		{hangs: "instance GetInfo", name: "nvmlGpuInstanceGetInfo"},
	} {
		t.Run(test.hangs, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				device := h100()
				device.current, device.infoResult = 1, test.infoResult
				c := openFake(t, &fakeLibrary{devices: []*fakeDevice{device}})
				release := device.hang(test.hangs)
				var err error
				elapsed := took(func() { _, err = c.CreateInstance(t.Context(), pci, 19, gpu.Placement{Start: 4, Size: 1}) })
				hung := expectHung(t, err, test.name, pci)
				if elapsed != call.DefaultLimit || device.count("instance Destroy") != test.destroys {
					t.Errorf("took %s, %d times destroyed", elapsed, device.count("instance Destroy"))
				}
				if test.infoResult != nvml.SUCCESS && !errors.Is(err, gpu.ErrUnknown) {
					t.Errorf("does not tell what was to be undone: %v", err)
				}
				release()
				<-hung.Done
			})
		})
	}
}

func TestDiscoverGoesOnAfterHungGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := &fakeLibrary{}
		for i := range 8 {
			lib.devices = append(lib.devices, &fakeDevice{busID: fmt.Sprintf("00000000:%02X:00.0", 0xf0-i)})
		}
		c := openFake(t, lib)
		discover := func(want time.Duration, gpus int) []gpu.Broken {
			t.Helper()
			var node *gpu.Node
			var err error
			if elapsed := took(func() { node, err = c.Discover(t.Context()) }); elapsed != want || err != nil {
				t.Fatalf("took %s: %v", elapsed, err)
			}
			if len(node.GPUs) != gpus || len(node.Broken) != 8-gpus {
				t.Fatalf("%d GPUs, broken: %+v", len(node.GPUs), node.Broken)
			}
			return node.Broken
		}
		discover(0, 8)
		// Six do not answer; two of these cannot even be looked up.
		var releases []func()
		for i := range 6 {
			if i < 2 {
				releases = append(releases, lib.hang(fmt.Sprintf("DeviceGetHandleByIndex %d", i)))
			} else {
				releases = append(releases, lib.devices[i].hang("GetUUID"))
			}
		}
		first := discover(call.DefaultLimit, 2)
		for i, broken := range first {
			// They were asked at the same moment: any of them may be the one that the others wait behind.
			want := fmt.Sprintf("0000:%02x:00.0", 0xf0-i)
			if broken.Index != i || broken.PCIAddress != want || !errors.Is(broken.Err, gpu.ErrHung) {
				t.Errorf("broken: %+v, want index %d at %s", broken, i, want)
			}
		}
		// They are known now, so nobody waits for them, by whatever name.
		discover(0, 2)
		if elapsed := took(func() {
			_, err := c.MIGState(t.Context(), "0000:f0:00.0")
			_ = expectHung(t, err, "nvmlDeviceGetHandleByIndex_v2", "0000:f0:00.0")
		}); elapsed != 0 {
			t.Errorf("waited %s for a GPU that is known to hang", elapsed)
		}
		for i, release := range releases {
			release()
			var hung *gpu.PendingError
			if errors.As(first[i].Err, &hung) {
				<-hung.Done
			}
		}
		discover(0, 8)
	})
}

func TestDiscoverOnDriverThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lib := &fakeLibrary{devices: []*fakeDevice{{busID: busID, mig: true}}}
		c := openFake(t, lib)
		release := lib.hang("DeviceGetCount")
		_, err := c.Discover(t.Context())
		hung := expectHung(t, err, "nvmlDeviceGetCount_v2", "")
		expect.Equal(t, took(func() { err = c.Open(t.Context()) }), 0, "Open waited")
		if again := expectHung(t, err, "nvmlDeviceGetCount_v2", ""); again.Done != hung.Done {
			t.Errorf("another call is out: %v", again)
		}
		expect.Do(t, expect.Err(c.MIGState(t.Context(), pci)), "a call on a GPU")
		release()
		<-hung.Done
		expect.Do(t, c.Open(t.Context()))
	})
}
