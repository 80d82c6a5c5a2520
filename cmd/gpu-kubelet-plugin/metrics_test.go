// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"testing"

	"github.com/partage-dev/partage/pkg/driver/usage"
)

// TestMetricsPortTaken: the plugin works without metrics where another program has the port.
func TestMetricsPortTaken(t *testing.T) {
	t.Parallel()
	taken, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	c := &config{metricsAddress: taken.Addr().String(), nodeName: "node"}
	m, wait := c.serveMetrics(t.Context(), usage.Options{}, nil)
	m.PublishFailed() // is counted all the same
	wait()
}
