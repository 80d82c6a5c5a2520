// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps/mpspb"
)

// SocketName is the supervisor's socket in its folder.
const SocketName = "supervisor.sock"

// Sessions are what a supervisor serves, and Client asks for.
type Sessions interface {
	// Ensure makes a session run with the limits of the spec and returns it once
	// clients can connect and the limits were read back.
	Ensure(ctx context.Context, spec Spec) (Status, error)
	// Stop ends a session and removes all of it. It succeeds when there is none.
	Stop(ctx context.Context, id string) error
	// List returns all sessions, ordered by ID.
	List() []Status
}

// Register makes a gRPC server serve these sessions.
func Register(registrar grpc.ServiceRegistrar, sessions Sessions) {
	mpspb.RegisterSupervisorServer(registrar, &service{sessions: sessions})
}

type service struct {
	mpspb.UnimplementedSupervisorServer

	sessions Sessions
}

func (s *service) EnsureSession(ctx context.Context, request *mpspb.EnsureSessionRequest) (*mpspb.EnsureSessionResponse, error) {
	status, err := s.sessions.Ensure(ctx, specFromProto(request.GetSpec()))
	if err != nil {
		klog.FromContext(ctx).Error(err, "EnsureSession failed", "session", request.GetSpec().GetId())
		return nil, errorToProto(err)
	}
	return &mpspb.EnsureSessionResponse{Status: statusToProto(status)}, nil
}

func (s *service) StopSession(ctx context.Context, request *mpspb.StopSessionRequest) (*mpspb.StopSessionResponse, error) {
	if err := s.sessions.Stop(ctx, request.GetId()); err != nil {
		klog.FromContext(ctx).Error(err, "StopSession failed", "session", request.GetId())
		return nil, errorToProto(err)
	}
	return &mpspb.StopSessionResponse{}, nil
}

func (s *service) ListSessions(context.Context, *mpspb.ListSessionsRequest) (*mpspb.ListSessionsResponse, error) {
	answer := &mpspb.ListSessionsResponse{}
	for _, status := range s.sessions.List() {
		answer.Sessions = append(answer.Sessions, statusToProto(status))
	}
	return answer, nil
}
