// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/partage-dev/partage/pkg/mps/mpspb"
)

func specToProto(s Spec) *mpspb.Spec {
	return &mpspb.Spec{
		Id: s.ID, Devices: s.Devices, ThreadPercentage: int32(s.ThreadPercentage), MemoryBytes: s.Memory, MultiUser: s.MultiUser,
		OnClientKilled: string(s.OnClientKilled), ClientPriority: string(s.ClientPriority),
	}
}

func specFromProto(p *mpspb.Spec) Spec {
	return Spec{
		ID: p.GetId(), Devices: p.GetDevices(), ThreadPercentage: int(p.GetThreadPercentage()), Memory: p.GetMemoryBytes(), MultiUser: p.GetMultiUser(),
		OnClientKilled: OnClientKilled(p.GetOnClientKilled()), ClientPriority: ClientPriority(p.GetClientPriority()),
	}
}

func statusToProto(s Status) *mpspb.Status {
	p := &mpspb.Status{
		Spec: specToProto(s.Spec), Phase: string(s.Phase), Message: text(s.Message), Losses: int64(s.Losses), LastLoss: text(s.LastLoss),
		Kills: int64(s.Kills), LastKill: text(s.LastKill),
		Servers: convertInts[int32](s.Servers), Clients: convertInts[int32](s.Clients), PipeDir: s.PipeDir, ShmDir: s.ShmDir,
	}
	if !s.LastLossTime.IsZero() {
		p.LastLossTime = timestamppb.New(s.LastLossTime)
	}
	return p
}

// text replaces invalid UTF-8, which cannot be sent: programs print anything, and
// what they print may be cut in the middle of a character.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func statusFromProto(p *mpspb.Status) Status {
	s := Status{
		Spec: specFromProto(p.GetSpec()), Phase: Phase(p.GetPhase()), Message: p.GetMessage(), Losses: int(p.GetLosses()), LastLoss: p.GetLastLoss(),
		Kills: int(p.GetKills()), LastKill: p.GetLastKill(),
		Servers: convertInts[int](p.GetServers()), Clients: convertInts[int](p.GetClients()), PipeDir: p.GetPipeDir(), ShmDir: p.GetShmDir(),
	}
	if p.GetLastLossTime() != nil {
		s.LastLossTime = p.GetLastLossTime().AsTime()
	}
	return s
}

func convertInts[To, From int | int32](from []From) []To {
	if from == nil {
		return nil
	}
	to := make([]To, len(from))
	for i, n := range from {
		to[i] = To(n)
	}
	return to
}
