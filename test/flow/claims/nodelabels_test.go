// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/partage-dev/partage/test/flow/harness"
)

const countLabel = "nvidia.com/gpu.count"

// TestLabelsOfNodeRegisteredAgain: a node that was deleted and has registered again gets its labels when it gets its slices: pods
// select nodes by them.
func TestLabelsOfNodeRegisteredAgain(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100x2")
	p := n.Start(t, "--node-labels=Write")
	p.Ready(t)
	labelled := func() bool { return n.API.Node(harness.NodeName).Labels[countLabel] == "2" }
	p.Until(t, "the labels of the node", func(context.Context) error {
		if !labelled() {
			return errors.New("there are none")
		}
		return nil
	})
	n.API.DeleteNode(harness.NodeName)
	n.API.DeleteSlices() // the node owned them
	n.API.AddNode(harness.NodeName)
	reregister(t, n, p)
	uid := n.API.Node(harness.NodeName).UID
	p.Until(t, "the slices of the node as it is now", func(context.Context) error {
		all := n.API.Slices()
		if len(all) == 0 || all[0].OwnerReferences[0].UID != uid {
			return fmt.Errorf("there are %d of another", len(all))
		}
		return nil
	})
	const limit = time.Minute // is reached where the labels come minutes later
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, limit, true, func(context.Context) (bool, error) { return labelled(), nil }); err != nil {
		t.Error("a node that has registered again has its slices, and not the labels of its GPUs")
	}
}
