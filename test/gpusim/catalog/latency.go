// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	_ "embed" // latencies.yaml
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// maxLatencyScale keeps the longest call below an hour or two.
const maxLatencyScale = 1000

// latencyProfile is one entry of latencies.yaml.
type latencyProfile struct {
	Described
	Calls []callLatency `json:"calls"`
}

// callLatency is how long calls of one function take.
type callLatency struct {
	Tags
	Function    string          `json:"function"`
	Base        metav1.Duration `json:"base"`
	PerInstance metav1.Duration `json:"perInstance"`
	Exclusive   bool            `json:"exclusive"`
}

//go:embed latencies.yaml
var latenciesYAML []byte

func latencyProfiles() ([]latencyProfile, error) {
	list, err := decodeLatencies(latenciesYAML)
	if err != nil {
		return nil, fmt.Errorf("latencies.yaml: %w", err)
	}
	return list, nil
}

func decodeLatencies(data []byte) (list []latencyProfile, err error) {
	err = yaml.UnmarshalStrict(data, &list)
	return list, err
}

// DecodeLatencies reads what was measured in the form of latencies.yaml, by profile.
func DecodeLatencies(data []byte) (map[string][]machine.Latency, error) {
	list, err := decodeLatencies(data)
	if err != nil {
		return nil, fmt.Errorf("latencies: %w", err)
	}
	profiles := map[string][]machine.Latency{}
	for _, p := range list {
		profiles[p.Name] = p.scaled(1)
	}
	return profiles, nil
}

// LatencyProfiles lists the names that Latencies knows.
func LatencyProfiles() ([]Described, error) {
	list, err := latencyProfiles()
	if err != nil {
		return nil, err
	}
	var out []Described
	for _, p := range list {
		out = append(out, p.Described)
	}
	return out, nil
}

// Latencies is how long calls take in a model by its name, with all times
// multiplied by scale, which is above 0 and at most 1000. The model "zero" has
// none. The models are no measurements: see the package's documentation.
func Latencies(profile string, scale float64) ([]machine.Latency, error) {
	if !(scale > 0 && scale <= maxLatencyScale) { // so that NaN is refused
		return nil, fmt.Errorf("latency scale %v is not above 0 and at most %d", scale, maxLatencyScale)
	}
	list, err := latencyProfiles()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range list {
		if p.Name == profile {
			return p.scaled(scale), nil
		}
		names = append(names, p.Name)
	}
	return nil, fmt.Errorf("unknown latency profile %q (known: %s)", profile, strings.Join(names, ", "))
}

func (p latencyProfile) scaled(scale float64) []machine.Latency {
	var out []machine.Latency
	times := func(d metav1.Duration) time.Duration { return time.Duration(float64(d.Duration) * scale) }
	for _, c := range p.Calls {
		out = append(out, machine.Latency{
			Function: c.Function, Base: times(c.Base), PerInstance: times(c.PerInstance), Exclusive: c.Exclusive,
		})
	}
	return out
}
