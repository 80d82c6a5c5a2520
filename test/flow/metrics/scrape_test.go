// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/must"
)

// flags serve metrics and look at the GPUs all the time.
var flags = append([]string{"--metrics-address=127.0.0.1:0", "--sample-interval=100ms"}, harness.Frequent...)

var served = regexp.MustCompile(`"Serving metrics" address="([^"]+)" path="([^"]+)"`)

const nvidiaPath = "/nvidia/metrics"

// scraper asks a driver for its metrics.
type scraper struct {
	p   *harness.Driver
	url string
}

func newScraper(t testing.TB, p *harness.Driver) *scraper {
	t.Helper()
	return scraperOf(t, p, "/metrics")
}

func scraperOf(t testing.TB, p *harness.Driver, path string) *scraper {
	t.Helper()
	s := &scraper{p: p}
	p.Until(t, "the address of the metrics", func(context.Context) error {
		for _, found := range served.FindAllStringSubmatch(p.Log.String(), -1) {
			if found[2] == path {
				s.url = "http://" + found[1] + path
				return nil
			}
		}
		return fmt.Errorf("the log does not have it")
	})
	return s
}

// body returns the answer to one scrape.
func (s *scraper) body(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, harness.Patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url, http.NoBody)
	if err != nil {
		return "", err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = answer.Body.Close() }()
	data, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", answer.Status, data)
	}
	return string(data), err
}

// families returns the metrics by name.
func (s *scraper) families(ctx context.Context) (map[string]*dto.MetricFamily, error) {
	body, err := s.body(ctx)
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	return parser.TextToMetricFamilies(strings.NewReader(body))
}

// labels are some of those of a metric.
type labels map[string]string

// value returns that of the one metric that has these labels.
func (s *scraper) value(ctx context.Context, name string, want labels) (float64, error) {
	families, err := s.families(ctx)
	if err != nil {
		return 0, err
	}
	var found []*dto.Metric
	for _, m := range families[name].GetMetric() {
		if matches(m, want) {
			found = append(found, m)
		}
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("%d metrics are %s%v, want one", len(found), name, want)
	}
	switch m := found[0]; {
	case m.GetGauge() != nil:
		return m.GetGauge().GetValue(), nil
	case m.GetCounter() != nil:
		return m.GetCounter().GetValue(), nil
	default:
		return float64(m.GetHistogram().GetSampleCount()), nil
	}
}

func matches(m *dto.Metric, want labels) bool {
	has := labels{}
	for _, l := range m.GetLabel() {
		has[l.GetName()] = l.GetValue()
	}
	for name, value := range want {
		if has[name] != value {
			return false
		}
	}
	return true
}

// until waits until a metric has a value.
func (s *scraper) until(t testing.TB, name string, of labels, want float64) {
	t.Helper()
	s.p.Until(t, fmt.Sprintf("%s%v to be %v", name, of, want), func(ctx context.Context) error {
		got, err := s.value(ctx, name, of)
		if err == nil && got != want {
			err = fmt.Errorf("it is %v", got)
		}
		return err
	})
}

// want fails unless a metric has a value now.
func (s *scraper) want(t testing.TB, name string, of labels, want float64) {
	t.Helper()
	expect.Equal(t, must.Get(s.value(t.Context(), name, of))(t), want, name, of)
}

// wantAbsent fails if there is such a metric.
func (s *scraper) wantAbsent(t testing.TB, name string, of labels) {
	t.Helper()
	if got, err := s.value(t.Context(), name, of); err == nil {
		t.Errorf("%s%v is %v, want none", name, of, got)
	}
}

func TestMain(m *testing.M) { harness.Main(m) }
