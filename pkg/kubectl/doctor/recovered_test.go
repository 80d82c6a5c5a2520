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

func (w *world) warn(reason, text string, before time.Duration) *corev1.Event {
	return w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, reason, "GPU 0000:1b:00.0: "+text+".", before)
}

func (w *world) recover(text string, before time.Duration) *corev1.Event {
	return w.event("Node", "gpu-1", driver, corev1.EventTypeNormal, "GPURecovered", "GPU 0000:1b:00.0: "+text+".", before)
}

// TestLateTaint: for more than eight minutes after a reset a GPU was to be reset, because a taint that keeps nobody away is removed late.
func TestLateTaint(t *testing.T) {
	t.Parallel()
	repaired := device.RowRemapPending.Over()
	for name, c := range map[string]struct {
		effect resourceapi.DeviceTaintEffect
		change func(*world)
		over   bool
	}{
		"recovered":                {change: func(w *world) { w.recover(repaired, 20*time.Second) }, over: true},
		"nothing else":             {change: func(*world) {}},
		"recovered before":         {change: func(w *world) { w.recover(repaired, 50*time.Second) }},
		"recovered as it is added": {change: func(w *world) { w.recover(repaired, 40*time.Second) }},
		"of something else":        {change: func(w *world) { w.recover(device.XID.Over(), 20*time.Second) }},
		"another GPU":              {change: func(w *world) { w.recover("", 20*time.Second).Message = "GPU 0000:43:00.0: " + repaired }},
		"by somebody else":         {change: func(w *world) { w.recover(repaired, 20*time.Second).Namespace = "team" }},
		"again": {change: func(w *world) {
			w.recover(repaired, 20*time.Second)
			w.warn("GPURowRemapPending", "a row waits", 20*time.Second)
		}},
		"it keeps pods away": {effect: resourceapi.DeviceTaintEffectNoSchedule, change: func(w *world) { w.recover(repaired, 20*time.Second) }},
	} {
		w := newWorld(t)
		if c.effect == "" {
			c.effect = resourceapi.DeviceTaintEffectNone
		}
		w.taint("gpu-1", "0000-1b-00-0", "row-remap-pending", "", c.effect)
		w.warn("GPURowRemapPending", "a row waits", 60*time.Second)
		c.change(w)
		if r := w.examine(t); c.over != (len(allFindings(r)) == 0) || c.over && len(r.History) != 1 {
			t.Errorf("%s: %+v, %+v", name, allFindings(r), r.History)
		}
	}
}

// TestAnotherMistake: what the policy says now counts, and not what it has said before.
func TestAnotherMistake(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i, profile := range []string{"1g.10mb", "1g.10bg"} {
		w.event("Node", "gpu-1", driver, corev1.EventTypeWarning, "SharingPolicyProfilesUnknown", "no GPU has "+profile, time.Duration(1+i)*time.Minute)
	}
	if all := allFindings(w.examine(t)); len(all) != 1 || all[0].Said != "no GPU has 1g.10mb" {
		t.Errorf("%+v", all)
	}
}

// TestOverTexts: what is said of one condition that is over says nothing of another one.
func TestOverTexts(t *testing.T) {
	t.Parallel()
	for i := range causes {
		for j := range causes {
			a, b := &causes[i], &causes[j]
			if i != j && a.taint != "" && b.taint != "" && a.isOverBy("GPURecovered", device.Reason(b.taint).Over()) {
				t.Errorf("that %s is over ends %s", b.taint, a.taint)
			}
		}
	}
}

// TestWithoutSlices: while no slices were there, faults that were over came back as errors, and GPUs that worked were to be drained.
func TestWithoutSlices(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change        func(*world)
		lasting, past int
	}{
		"unknown":                  {change: func(*world) {}, lasting: 1},
		"recovered":                {change: func(w *world) { w.recover(device.Lost.Over(), 20*time.Minute) }, past: 1},
		"from something else":      {change: func(w *world) { w.recover(device.XID.Over(), 20*time.Minute) }, past: 1},
		"before":                   {change: func(w *world) { w.recover(device.XID.Over(), 40*time.Minute) }, lasting: 1},
		"it is not there any more": {change: func(w *world) { w.recover("the NVIDIA driver lists it now, or not", 20*time.Minute) }, lasting: 1},
		"that is no failure": {change: func(w *world) {
			w.events[0].Reason = "GPURowRemapFailed"
			w.recover(device.XID.Over(), 20*time.Minute)
		}, lasting: 1},
		"one of two": {change: func(w *world) {
			w.events[0].Reason = "GPURowRemapFailed"
			w.warn("GPUXID", "XID 79", 25*time.Minute)
			w.recover(device.XID.Over(), 20*time.Minute)
		}, lasting: 1, past: 1},
	} {
		w := newWorld(t)
		w.withoutSlices("gpu-1")
		w.warn("GPULost", "the GPU is lost", 30*time.Minute)
		c.change(w)
		r := w.examine(t)
		found := result(t, r, "driver-events").Findings
		if len(found) != c.lasting || len(r.History) != c.past {
			t.Errorf("%s: %+v, %+v", name, found, r.History)
		}
		for _, one := range found {
			if one.Severity != Warning || !strings.HasPrefix(one.Remedy, "If it is not over: ") || now.Sub(one.Since.Time) != 30*time.Minute {
				t.Errorf("%s: %+v", name, one)
			}
		}
	}
}

// TestSinceReboot: a fault that a node had had before it was restarted, too, was older than its taint.
func TestSinceReboot(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		effect resourceapi.DeviceTaintEffect
		change func(*world)
		want   time.Duration
	}{
		"the taint is there at once": {effect: resourceapi.DeviceTaintEffectNoExecute, change: func(*world) {}, want: 40 * time.Second},
		"the taint may be late":      {change: func(*world) {}, want: 58 * time.Second},
		"it is told again":           {change: func(w *world) { w.warn("GPUXID", "XID 94 again", 45*time.Second) }, want: 45 * time.Second},
		"so late is none":            {change: func(w *world) { w.events[0].LastTimestamp = ago(11 * time.Minute) }, want: 40 * time.Second},
		"an event that came twice":   {change: func(w *world) { w.events[0].FirstTimestamp = ago(5 * time.Minute) }, want: 58 * time.Second},
	} {
		w := newWorld(t)
		if c.effect == "" {
			c.effect = resourceapi.DeviceTaintEffectNone
		}
		w.taint("gpu-1", "0000-1b-00-0", "xid", "94", c.effect)
		w.warn("GPUXID", "XID 94", 58*time.Second)
		c.change(w)
		if all := allFindings(w.examine(t)); len(all) != 1 || now.Sub(all[0].Since.Time) != c.want {
			t.Errorf("%s: %+v", name, all)
		}
	}
}
