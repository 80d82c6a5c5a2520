// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"maps"
	"regexp"
	"slices"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/knownfailures"
)

// TestMetricsOfConformance: AI Conformance of Kubernetes asks for these metrics of accelerators, by whatever name.
func TestMetricsOfConformance(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct{ name, machine string }{
		"power":           {"(?i)power|watt|joule|energy", "h100x1"},
		"link_throughput": {"(?i)nvlink.*(byte|throughput)|(byte|throughput).*nvlink", "dgx-h100"},
		"pcie_throughput": {"(?i)pcie.*(byte|throughput)|(byte|throughput).*pcie", "h100x1"},
		"temperature":     {"(?i)temperature.*celsius", "h100x1"},
	} {
		t.Run(what, func(t *testing.T) {
			knownfailures.Expect(t)
			n := harness.NewNode(t, test.machine)
			p := n.Start(t, flags...)
			p.Ready(t)
			s := newScraper(t, p)
			var found map[string]*dto.MetricFamily
			p.Until(t, "a sample", func(ctx context.Context) (err error) {
				if found, err = s.families(ctx); err == nil && found["partage_gpu_temperature_celsius"] == nil {
					err = errors.New("there is none")
				}
				return err
			})
			wanted := regexp.MustCompile(test.name)
			for family, metrics := range found {
				of := labels{"gpu": n.Address(t, 0)}
				if wanted.MatchString(family) && slices.ContainsFunc(metrics.GetMetric(), func(m *dto.Metric) bool { return matches(m, of) }) {
					return
				}
			}
			t.Errorf("no metric tells the %s of a GPU; there are %v", what, slices.Sorted(maps.Keys(found)))
		})
	}
}
