// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"strings"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/control"
)

// checkMPSPriority ends with MPS's own default, so that the clients of later checks are as before.
func checkMPSPriority(ctx context.Context, n *Node) []Finding {
	const expected = "1 is below normal, and 0 normal"
	if f := n.started(expected); f != nil {
		return f
	}
	var texts []string
	right := true
	for i, want := range []mps.ClientPriority{mps.PriorityBelowNormal, mps.PriorityNormal} {
		set := fmt.Sprintf("set_default_client_priority %d", 1-i)
		if _, err := n.ask(ctx, set); err != nil {
			return []Finding{Failed("", expected, err)}
		}
		answer, err := n.ask(ctx, "get_default_client_priority")
		if err != nil {
			return []Finding{Failed("", expected, err)}
		}
		got, err := control.ParsePriority(answer)
		right = right && err == nil && got == want
		texts = append(texts, fmt.Sprintf("%d: %q", 1-i, answer))
	}
	return []Finding{Expect("", right, expected, strings.Join(texts, ", ")).
		Because("policies and claims cannot use client priorities on this node; claims that ask for one are refused")}
}
