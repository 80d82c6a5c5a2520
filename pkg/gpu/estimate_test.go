// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"testing"

	"github.com/partage-dev/partage/test/expect"
)

func TestMPSClients(t *testing.T) {
	h100 := func(multiprocessors int) *Profile {
		return &Profile{Resources: Resources{Multiprocessors: multiprocessors}}
	}
	cuda130, cuda131 := Version{Major: 13, Minor: 0}, Version{Major: 13, Minor: 1}
	tests := map[string]struct {
		compute Version
		cuda    Version
		whole   int
		profile *Profile
		want    int
	}{
		"before Volta":                     {compute: Version{6, 1}, cuda: cuda131, whole: 20, want: 0},
		"not known what it is":             {cuda: cuda131, want: 0},
		"Volta, old CUDA":                  {compute: Version{7, 0}, cuda: Version{11, 8}, whole: 80, want: 48},
		"through CUDA 13.0":                {compute: Version{9, 0}, cuda: cuda130, whole: 132, want: 48},
		"from CUDA 13.1":                   {compute: Version{9, 0}, cuda: cuda131, whole: 132, want: 60},
		"CUDA to come":                     {compute: Version{9, 0}, cuda: Version{14, 0}, whole: 132, want: 60},
		"GPU without multiprocessor count": {compute: Version{7, 5}, cuda: cuda130, want: 48},
		"smallest partition":               {compute: Version{9, 0}, cuda: cuda130, whole: 132, profile: h100(16), want: 5},
		"smallest partition, CUDA 13.1":    {compute: Version{9, 0}, cuda: cuda131, whole: 132, profile: h100(16), want: 7},
		"half of the GPU":                  {compute: Version{9, 0}, cuda: cuda130, whole: 132, profile: h100(60), want: 21},
		"partition that is the GPU":        {compute: Version{9, 0}, cuda: cuda130, whole: 132, profile: h100(132), want: 48},
		"partition of next to nothing":     {compute: Version{9, 0}, cuda: cuda130, whole: 132, profile: h100(2), want: 1},
		"partition of what is not known":   {compute: Version{9, 0}, cuda: cuda130, profile: h100(16), want: 48},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			g := &GPU{ComputeCapability: test.compute, Resources: Resources{Multiprocessors: test.whole}}
			expect.Equal(t, g.MPSClients(test.cuda, test.profile), test.want)
		})
	}
}

func TestMPSMultiprocessors(t *testing.T) {
	for _, test := range []struct{ major, of, percentage, want int }{
		{12, 188, 25, 46}, // seen on an RTX PRO 6000
		// Seen on an H100.
		{9, 132, 1, 8}, {9, 132, 5, 8}, {9, 132, 10, 12}, {9, 132, 15, 18}, {9, 132, 20, 26}, {9, 132, 25, 32}, {9, 132, 30, 38}, {9, 132, 33, 42},
		{9, 132, 40, 52}, {9, 132, 50, 66}, {9, 132, 60, 78}, {9, 132, 75, 98}, {9, 132, 90, 118}, {9, 132, 100, 132},
		{9, 132, 0, 132}, {8, 16, 33, 4}, {8, 14, 10, 4}, {8, 108, 50, 54}, {7, 40, 1, 2}, {9, 1, 50, 1}, {9, 0, 25, 0},
	} {
		g := &GPU{ComputeCapability: Version{Major: test.major}}
		if got := g.MPSMultiprocessors(test.of, test.percentage); got != test.want {
			t.Errorf("%d %% of %d: got %d, want %d", test.percentage, test.of, got, test.want)
		}
	}
}
