// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"strings"
	"testing"

	"github.com/partage-dev/partage/test/expect"
)

const (
	gpuA = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
	gpuB = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
)

func TestValidate(t *testing.T) {
	const mig = "MIG-11111111-2222-3333-4444-555555555555"
	for name, test := range map[string]struct {
		spec Spec
		want string // in the error; none if it is empty
	}{
		"a GPU":               {Spec{ID: "gpu-0", Devices: []string{gpuA}}, ""},
		"all":                 {Spec{ID: "a", Devices: []string{gpuA, gpuB}, ThreadPercentage: 100, Memory: map[string]int64{gpuB: mebibyte}, MultiUser: true}, ""},
		"a partition":         {Spec{ID: "gpu-0-mig-1g10gb-4", Devices: []string{mig}}, ""},
		"an older driver's":   {Spec{ID: "m", Devices: []string{"MIG-GPU-11111111-2222-3333-4444-555555555555/7/0"}}, ""},
		"with a priority":     {Spec{ID: "a", Devices: []string{gpuA}, ClientPriority: PriorityBelowNormal}, ""},
		"another priority":    {Spec{ID: "a", Devices: []string{gpuA}, ClientPriority: "High"}, `client priority "High": want Normal, BelowNormal or none`},
		"no id":               {Spec{Devices: []string{gpuA}}, `id ""`},
		"an id with a slash":  {Spec{ID: "a/b", Devices: []string{gpuA}}, `id "a/b"`},
		"an id that leads up": {Spec{ID: "..", Devices: []string{gpuA}}, `id ".."`},
		"a long id":           {Spec{ID: strings.Repeat("a", 64), Devices: []string{gpuA}}, "63 bytes"},
		"no device":           {Spec{ID: "a"}, "at least one"},
		"an index":            {Spec{ID: "a", Devices: []string{"0"}}, `device "0"`},
		"a list":              {Spec{ID: "a", Devices: []string{gpuA + "," + gpuB}}, "want a UUID"},
		"twice":               {Spec{ID: "a", Devices: []string{gpuA, gpuA}}, "twice"},
		"two partitions":      {Spec{ID: "a", Devices: []string{gpuA, mig}}, "of its own"},
		"too many percent":    {Spec{ID: "a", Devices: []string{gpuA}, ThreadPercentage: 101}, "101"},
		"negative":            {Spec{ID: "a", Devices: []string{gpuA}, ThreadPercentage: -1}, "-1"},
		"another's memory":    {Spec{ID: "a", Devices: []string{gpuA}, Memory: map[string]int64{gpuB: mebibyte}}, gpuB},
		"too little memory":   {Spec{ID: "a", Devices: []string{gpuA}, Memory: map[string]int64{gpuA: mebibyte - 1}}, "1 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.spec.Validate()
			if test.want == "" && err != nil {
				t.Errorf("got %v", err)
			}
			if test.want != "" && (!errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestSameLimits(t *testing.T) {
	has := Spec{Devices: []string{gpuA}, ThreadPercentage: 25, Memory: map[string]int64{gpuA: 1 << 30}}
	with := func(p ClientPriority) Spec {
		s := has
		s.ClientPriority = p
		return s
	}
	for name, test := range map[string]struct {
		has, wanted Spec
		same        bool
	}{
		"none":                  {has, has, true},
		"percentage":            {has, Spec{Devices: has.Devices, ThreadPercentage: 26, Memory: has.Memory}, false},
		"memory":                {has, Spec{Devices: has.Devices, ThreadPercentage: 25}, false},
		"priority":              {with(PriorityBelowNormal), with(PriorityBelowNormal), true},
		"lower priority":        {with(PriorityNormal), with(PriorityBelowNormal), false},
		"no priority any more":  {with(PriorityBelowNormal), has, false},
		"normal is the default": {with(PriorityNormal), has, true},
		"whether MPS has any":   {has, with(PriorityNormal), false},
	} {
		expect.Equal(t, test.has.SameLimits(test.wanted), test.same, name)
	}
}
