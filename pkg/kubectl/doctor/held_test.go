// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/partage-dev/partage/pkg/device"
)

// tell writes an event about GPU 0 of gpu-1.
func (w *world) tell(reason, text string, before time.Duration) {
	kind := corev1.EventTypeWarning
	if reason == "GPURecovered" {
		kind = corev1.EventTypeNormal
	}
	w.event("Node", "gpu-1", driver, kind, reason, "GPU 0000:1b:00.0: "+text, before)
}

// TestHeldBack: what is over is not called lost, whatever events a plugin that has restarted writes, nor while taints stay for a moment.
func TestHeldBack(t *testing.T) {
	t.Parallel()
	const again = ", but not for the first time. It is offered again at 12:19."
	held := func(it string) string {
		return device.HeldBack + " because it has happened before; it was: " + it + evicted
	}
	const fell = "XID 79 (GPU has fallen off the bus)."
	begin := func(w *world) {
		w.tell("GPULost", "the GPU is lost.", 20*time.Minute)
		w.tell("GPUXID", fell, 20*time.Minute)
	}
	tainted := func(w *world, value string) {
		w.taint("gpu-1", "0000-1b-00-0", "gpu-lost", "", resourceapi.DeviceTaintEffectNoExecute)
		w.taint("gpu-1", "0000-1b-00-0", "xid", value, resourceapi.DeviceTaintEffectNoExecute)
	}
	hold := func(w *world) {
		begin(w)
		tainted(w, "79")
		w.tell("GPUHeldBack", device.Lost.Over()+again, 15*time.Minute)
		w.tell("GPUHeldBack", device.XID.Over()+again, 15*time.Minute)
	}
	restart := func(w *world) {
		w.tell("GPULost", held("the GPU is lost."), 9*time.Minute)
		w.tell("GPUXID", held(fell), 9*time.Minute)
	}
	end := func(w *world) {
		w.tell("GPURecovered", device.Lost.Over()+".", 5*time.Second)
		w.tell("GPURecovered", device.XID.Over()+".", 5*time.Second)
	}
	const isHeld = "held back after a fault that is over"
	for name, c := range map[string]struct {
		change   func(*world)
		severity Severity
		want     string
	}{
		"held back":           {hold, Warning, isHeld},
		"the plugin restarts": {func(w *world) { hold(w); restart(w) }, Warning, isHeld},
		"only that is known":  {func(w *world) { tainted(w, "79"); restart(w) }, Warning, isHeld},
		"it says so again": {func(w *world) {
			hold(w)
			restart(w)
			w.tell("GPUHeldBack", device.Lost.Over()+again, 8*time.Minute)
			w.tell("GPUHeldBack", device.XID.Over()+again, 8*time.Minute)
		}, Warning, isHeld},
		"it is lost again": {func(w *world) {
			hold(w)
			restart(w)
			w.tell("GPULost", "the GPU is lost.", time.Minute)
		}, Error, "lost, " + isHeld},
		"one of two ends":        {func(w *world) { hold(w); w.tell("GPURecovered", device.XID.Over()+".", time.Minute) }, Warning, isHeld},
		"another number is over": {func(w *world) { tainted(w, "94"); restart(w) }, Error, "XID 94, " + isHeld},
		"of another family": {func(w *world) {
			w.taint("gpu-1", "0000-1b-00-0", "fabric-unhealthy", "", resourceapi.DeviceTaintEffectNoSchedule)
			w.tell("GPUHeldBack", device.FabricUnhealthy.Over()+again, time.Minute)
		}, Warning, isHeld},
		"the end, before a write": {func(w *world) { hold(w); restart(w); end(w) }, Warning, isHeld},
		"the end":                 {func(w *world) { begin(w); restart(w); end(w) }, OK, ""},
		"the end of one, and nothing was written": {func(w *world) {
			w.tell("GPUXID", fell, 5*time.Minute)
			w.tell("GPULost", "the GPU is lost.", 4*time.Minute)
			w.tell("GPURecovered", device.Lost.Over()+".", time.Minute)
		}, Warning, "XID"},
	} {
		w := newWorld(t)
		c.change(w)
		r := w.examine(t)
		all := allFindings(r)
		switch {
		case c.severity == OK && len(all) == 0:
		case len(all) != 1 || all[0].Severity != c.severity || all[0].Message != c.want:
			t.Errorf("%s: %+v", name, all)
		case c.severity == Warning && (len(all[0].Commands) > 0 || strings.Contains(all[0].Remedy, "Drain")):
			t.Errorf("%s: what helps is %+v", name, all[0])
		}
	}
}
