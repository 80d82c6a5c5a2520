// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package grpchealth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// askTimeout leaves a server time to answer that a check has hung. The kubelet's own limit
// is longer, so that its event has the reason.
const askTimeout = timeout + 2*time.Second

// Ask asks the server that listens on a unix socket about one of the services. Nil means
// that it is SERVING; the error says why it is not.
func Ask(ctx context.Context, socket, service string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("ask %s about %s: %w", socket, service, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	var trailer metadata.MD
	answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{Service: service}, grpc.Trailer(&trailer))
	if err != nil {
		return fmt.Errorf("ask %s about %s: %s", socket, service, status.Convert(err).Message())
	}
	if answer.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return errors.New(cmp.Or(strings.Join(trailer.Get(reasonKey), "; "), answer.GetStatus().String()))
	}
	return nil
}
