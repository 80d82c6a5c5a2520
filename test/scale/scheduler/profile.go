// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/google/pprof/profile"
)

// Functions by which a part of the scheduler's work is known in a profile.
const (
	inScheduler = "k8s.io/kubernetes/pkg/scheduler"
	inGathering = "k8s.io/dynamic-resource-allocation/structured/internal/incubating.GatherPools"
	inCEL       = "k8s.io/dynamic-resource-allocation/cel.CompilationResult.DeviceMatches"
)

// usage is what the CPU of a case was used for.
type usage struct {
	// process is the API server, the controller of claims, the client that creates pods, and the
	// collection of garbage, besides the scheduler.
	process time.Duration
	// scheduler is the part that has scheduled. gathering are pools, and cel the evaluation of selectors.
	scheduler, gathering, cel time.Duration
}

func readUsage(file string) (usage, error) {
	f, err := os.Open(file)
	if err != nil {
		return usage{}, fmt.Errorf("read a CPU profile: %w", err)
	}
	defer f.Close()
	p, err := profile.Parse(f)
	if err != nil {
		return usage{}, fmt.Errorf("read the CPU profile %s: %w", file, err)
	}
	var u usage
	for _, sample := range p.Sample {
		spent := time.Duration(sample.Value[1])
		u.process += spent
		for what, sum := range map[string]*time.Duration{inScheduler: &u.scheduler, inGathering: &u.gathering, inCEL: &u.cel} {
			if calls(sample, what) {
				*sum += spent
			}
		}
	}
	return u, nil
}

// calls reports whether a sample was taken in a function whose name begins like that, or in one that it called.
func calls(sample *profile.Sample, prefix string) bool {
	for _, location := range sample.Location {
		for _, line := range location.Line {
			if line.Function != nil && strings.HasPrefix(line.Function.Name, prefix) {
				return true
			}
		}
	}
	return false
}
