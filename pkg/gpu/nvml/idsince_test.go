// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
)

// TestIDOwners: from when on an id is that of one instance only, of instance 3 after looks one
// second after the other. Each look has the UUIDs of the instance's compute instances, or is nil
// without the instance.
func TestIDOwners(t *testing.T) {
	start := time.Now()
	for name, test := range map[string]struct {
		looks [][]string
		since int
	}{
		"found by the first look":      {[][]string{{"MIG-a"}, {"MIG-a"}}, 0},
		"made after the first look":    {[][]string{nil, nil, {"MIG-a"}, {"MIG-a"}}, 0},
		"another's before, then free":  {[][]string{{"MIG-a"}, nil, nil, {"MIG-b"}, {"MIG-b"}}, 1},
		"another's at once":            {[][]string{{"MIG-a"}, {"MIG-a"}, {"MIG-b"}, {"MIG-b"}}, 2},
		"another's, then half made":    {[][]string{{"MIG-a"}, {}, {"MIG-b"}}, 1},
		"half made first":              {[][]string{nil, {}, {"MIG-a"}}, 0},
		"divided and no longer so":     {[][]string{{"MIG-a", "MIG-b"}, {"MIG-a"}}, 1},
		"two after the other":          {[][]string{{"MIG-a"}, nil, {"MIG-b"}, nil, {"MIG-c"}}, 3},
		"a look that was overtaken":    {[][]string{{"MIG-a"}, {"MIG-b"}, {"MIG-a"}, {"MIG-b"}}, 3},
		"the same again after a hole":  {[][]string{{"MIG-a"}, nil, {"MIG-a"}}, 1},
		"found by the only look there": {[][]string{{"MIG-a"}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			ids := &idOwners{gpus: map[string]map[int]idOwner{}}
			var last gpu.Instance
			for second, uuids := range test.looks {
				over := start.Add(time.Duration(second) * time.Second)
				// Of another GPU, and another id.
				ids.note("other", []gpu.Instance{{ID: 3, Compute: []gpu.ComputeInstance{{UUID: "MIG-" + over.String()}}}}, over)
				instances := []gpu.Instance{{ID: 4, Compute: []gpu.ComputeInstance{{UUID: "MIG-4"}}}}
				if uuids != nil {
					instances = append(instances, gpu.Instance{ID: 3})
				}
				for i, uuid := range uuids {
					instances[1].Compute = append(instances[1].Compute, gpu.ComputeInstance{ID: i, UUID: uuid})
				}
				ids.note("this", instances, over)
				if instances[0].IDSince != start {
					t.Fatalf("instance 4 since %s", instances[0].IDSince.Sub(start))
				}
				last = instances[len(instances)-1]
			}
			if want := start.Add(time.Duration(test.since) * time.Second); last.ID != 3 || last.IDSince != want {
				t.Errorf("instance %d since %s, want %s", last.ID, last.IDSince.Sub(start), want.Sub(start))
			}
		})
	}
}
