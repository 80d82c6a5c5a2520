// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"testing"

	"google.golang.org/protobuf/proto"
)

// One session with text that is not UTF-8 does not hide the others.
func TestAnyText(t *testing.T) {
	status := statusToProto(Status{Message: "a\xff", LastLoss: "\xc3", Losses: 1})
	data, err := proto.Marshal(status)
	if err != nil || len(data) == 0 {
		t.Fatal(err)
	}
	if got := statusFromProto(status).Message; got != "a\uFFFD" {
		t.Errorf("got %q", got)
	}
}
