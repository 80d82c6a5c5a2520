// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package libtest

import (
	"fmt"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

func (r *root) busy() []time.Duration {
	r.t.Helper()
	return must.Get(r.file().Busy())(r.t)
}

func (r *root) slow(latencies ...machine.Latency) {
	r.t.Helper()
	r.update(func(m *machine.Machine) { m.Latencies = latencies })
}

// TestLatency: what a call takes, and what is counted of it.
func TestLatency(t *testing.T) {
	const function, base, each = "nvmlDeviceGetUUID", 2 * time.Millisecond, 3 * time.Millisecond
	r := newRoot(t, divided(2))
	lib := r.open()
	first, second := device(t, lib, 0), device(t, lib, 1)
	createAt(t, second, id1g, place(0, 1))
	createAt(t, second, id1g, place(1, 1))
	took := func(d nvml.Device) time.Duration {
		started := time.Now()
		wants(t, "GetUUID", code(d.GetUUID()), nvml.SUCCESS)
		return time.Since(started)
	}
	atLeast := func(what string, got, want time.Duration) {
		t.Helper()
		if got < want {
			t.Errorf("%s: %v, want at least %v", what, got, want)
		}
	}
	r.slow(machine.Latency{Function: function, Base: base, PerInstance: each})
	atLeast("undivided GPU", took(first), base)
	atLeast("GPU with two instances", took(second), base+2*each)
	if busy := r.busy(); busy[0] != 0 || busy[1] != 0 {
		t.Errorf("busy without an exclusive latency: %v", busy)
	}
	r.slow(machine.Latency{Function: function, Base: base, PerInstance: each, Exclusive: true})
	passed := took(second)
	busy := r.busy()
	atLeast("busy with two instances", busy[1], base+2*each)
	atLeast("the call, against its busy time", passed, busy[1])
	expect.Equal(t, busy[0], 0, "the other GPU is busy", busy)
	// A call that does not happen takes no time of the GPU.
	r.strike(machine.Fault{Function: function, GPU: 1, Times: 1, Effect: machine.Pretend})
	took(second)
	if again := r.busy(); again[1] != busy[1] {
		t.Errorf("busy for a call that a fault replaced: %v, before %v", again, busy)
	}
	took(second)
	if again := r.busy(); again[1] < 2*(base+2*each) {
		t.Errorf("busy for two calls: %v", again)
	}
}

// TestExclusive: calls on one GPU, by threads and processes, are one after the
// other. So all of them together take no less than the sum of their times.
func TestExclusive(t *testing.T) {
	r, d := oneH100(t)
	const threads, processes, calls, base = 3, 2, 10, 4 * time.Millisecond
	r.slow(machine.Latency{Function: "nvmlDeviceGetUUID", Base: base, Exclusive: true})
	started := time.Now()
	var wg sync.WaitGroup
	for range processes {
		cmd := helper(t, "uuids", library, "GPUSIM_STATE="+r.state())
		wg.Go(func() { failures(t, cmd, calls) })
	}
	for range threads {
		wg.Go(func() { pattern(d, calls) })
	}
	wg.Wait()
	passed, busy := time.Since(started), r.busy()
	if want := (threads + processes) * calls * base; busy[0] < want {
		t.Errorf("busy for %v, want at least %v", busy[0], want)
	}
	if passed < busy[0] {
		t.Errorf("all calls together took %v, less than the %v that the GPU was busy: some overlapped", passed, busy[0])
	}
}

// holdGPU is a helper: it makes a call on the first GPU that takes for ever.
func holdGPU(lib nvml.Interface) error {
	d, ret := lib.DeviceGetHandleByIndex(0)
	if ret != nvml.SUCCESS {
		return ret
	}
	fmt.Println("ready")
	_, ret = d.GetUUID()
	return fmt.Errorf("the call ended: %w", ret)
}

// TestHeldGPU: a process that holds one GPU for ever delays no call on another GPU,
// and none at all once it is killed.
func TestHeldGPU(t *testing.T) {
	r := newRoot(t, machineOf(h100(0), h100(1)))
	lib := r.open()
	first, second := device(t, lib, 0), device(t, lib, 1)
	// The two functions are exclusive among each other, too.
	r.slow(
		machine.Latency{Function: "nvmlDeviceGetUUID", Base: 24 * time.Hour, Exclusive: true},
		machine.Latency{Function: "nvmlDeviceGetName", Base: time.Millisecond, Exclusive: true},
	)
	holder := helper(t, "hold", library, "GPUSIM_STATE="+r.state())
	start(t, holder)
	until(t, "the GPU is held", func() bool { return held(t, r, 0) })
	if held(t, r, 1) {
		t.Error("the other GPU is held, too")
	}
	call := make(chan nvml.Return, 1)
	go func() {
		_, ret := first.GetName()
		call <- ret
	}()
	wants(t, "the other GPU", code(second.GetName()), nvml.SUCCESS)
	wants(t, "a call that is not exclusive", code(first.GetMinorNumber()), nvml.SUCCESS)
	select {
	case ret := <-call:
		t.Errorf("a call on the GPU that is held returned: %v", ret)
	default:
	}
	if busy := r.busy(); busy[0] != 0 || busy[1] < time.Millisecond {
		t.Errorf("busy while the first GPU is held: %v", busy)
	}
	must.Do(t, holder.Process.Kill())
	wants(t, "the GPU that was held", <-call, nvml.SUCCESS)
}

// held reports whether a call has the GPU for itself. The lock is that of a byte
// of the state file, one for each GPU after the first byte, which is the
// writers'.
func held(t *testing.T, r *root, gpu int) bool {
	t.Helper()
	f := must.Get(os.OpenFile(r.state(), os.O_RDWR, 0))(t)
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart, Start: int64(1 + gpu), Len: 1}
	must.Do(t, unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock))
	return lock.Type != unix.F_UNLCK
}
