// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"encoding/json"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
)

// SocketName is the supervisor's socket in its folder.
const SocketName = "supervisor.sock"

// The protocol is gRPC, and what is sent are the types of this package as JSON. Fields are only ever added: the supervisor is older
// than the plugin that talks to it for as long as nobody restarts it.
const (
	serviceName   = "partage.mps.v1.Supervisor"
	ensureSession = "EnsureSession"
	stopSession   = "StopSession"
	listSessions  = "ListSessions"
)

// named is the request of stopSession.
type named struct {
	ID string `json:"id"`
}

// sessionList is the answer of listSessions.
type sessionList struct {
	Sessions []Status `json:"sessions,omitempty"`
}

// codec encodes what is sent. Programs print anything, and what is no UTF-8 is replaced.
type codec struct{}

func (codec) Name() string                       { return "json" }
func (codec) Marshal(v any) ([]byte, error)      { return json.Marshal(v) }
func (codec) Unmarshal(data []byte, v any) error { return json.Unmarshal(data, v) }

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

// NewServer returns a gRPC server that serves these sessions. Its Stop waits for calls that are in progress.
func NewServer(logger klog.Logger, sessions Sessions) *grpc.Server {
	server := grpc.NewServer(grpc.ForceServerCodec(codec{}), grpc.WaitForHandlers(true))
	server.RegisterService(&grpc.ServiceDesc{ServiceName: serviceName, Methods: []grpc.MethodDesc{
		method(logger, ensureSession, sessions.Ensure),
		method(logger, stopSession, func(ctx context.Context, r named) (named, error) { return r, sessions.Stop(ctx, r.ID) }),
		method(logger, listSessions, func(context.Context, named) (sessionList, error) { return sessionList{sessions.List()}, nil }),
	}}, nil)
	return server
}

// method is one of the service.
func method[Request, Answer any](logger klog.Logger, name string, do func(context.Context, Request) (Answer, error)) grpc.MethodDesc {
	return grpc.MethodDesc{MethodName: name, Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		var request Request
		if err := decode(&request); err != nil {
			return nil, err
		}
		answer, err := do(klog.NewContext(ctx, logger), request)
		if err != nil {
			logger.Error(err, "A call of the plugin has failed", "call", name, "request", request)
			return nil, status.FromContextError(err).Err()
		}
		return answer, nil
	}}
}
