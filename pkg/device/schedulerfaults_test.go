// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"os"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestFaultsOfScheduler compares with what test/allocators found out by running the
// schedulers' code.
func TestFaultsOfScheduler(t *testing.T) {
	data, err := os.ReadFile("testdata/schedulers.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var found map[string]SchedulerFaults
	if err := yaml.UnmarshalStrict(data, &found); err != nil || len(found) < 6 {
		t.Fatalf("%d versions, %v", len(found), err)
	}
	for _, same := range [][2]string{
		{"1.34.13", "1.34.0"}, {"1.35.5", "v1.35.0"}, {"1.35.10", "v1.35.6"}, {"1.36.1", "v1.36.0"},
		{"1.36.1", "v1.36.1-gke.1000"}, {"1.36.2", "v1.36.2+k3s1"}, {"1.37.2", "v1.38.0-alpha.0"},
	} {
		found[same[1]] = found[same[0]]
	}
	for kubernetes, want := range found {
		if got, err := FaultsOfScheduler(kubernetes); err != nil || got != want {
			t.Errorf("Kubernetes %s: got %+v, %v, want %+v", kubernetes, got, err, want)
		}
	}
	if _, err := FaultsOfScheduler("unknown"); err == nil {
		t.Error("no error for a version that is none")
	}
}
