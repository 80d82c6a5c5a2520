// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"github.com/partage-dev/partage/test/flow/harness"
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
			n := harness.NewNode(t, test.machine)
			p := n.Start(t, flags...)
			p.Ready(t)
			s := newScraper(t, p)
			wanted, of := regexp.MustCompile(test.name), labels{"gpu": n.Address(t, 0)}
			p.Until(t, "a sample with the "+what+" of a GPU", func(ctx context.Context) error {
				found, err := s.families(ctx)
				for family, metrics := range found {
					if wanted.MatchString(family) && slices.ContainsFunc(metrics.GetMetric(), func(m *dto.Metric) bool { return matches(m, of) }) {
						return nil
					}
				}
				return cmp.Or(err, fmt.Errorf("no metric tells the %s of a GPU; there are %v", what, slices.Sorted(maps.Keys(found))))
			})
		})
	}
}
