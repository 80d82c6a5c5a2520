// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"testing"

	"google.golang.org/protobuf/proto"
)

// One session with text that is not UTF-8 does not hide the others.
func TestAnyText(t *testing.T) {
	answer := statusesToProto([]Status{{Message: "a\xff", LastLoss: "\xc3", Losses: 1}})
	data, err := proto.Marshal(answer)
	if err != nil || len(data) == 0 {
		t.Fatal(err)
	}
	if got := statusesFromProto(answer)[0].Message; got != "a\uFFFD" {
		t.Errorf("got %q", got)
	}
}
