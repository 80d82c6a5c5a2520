// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/policy"
)

// PolicySource provides the admin's sharing policy.
type PolicySource interface {
	// Read returns the policy as it is now. The same pointer means that nothing
	// has changed.
	Read(ctx context.Context) (*policy.Policy, error)
}

// PolicyFile is a SharingPolicy in a file that may be replaced at any time, as the kubelet does with a ConfigMap. It is for one
// goroutine.
//
// The nodes of a cluster follow changes at random times. All of them hear of a change within a minute or two, and each writes all of
// its ResourceSlices because of it: in a large cluster that is more than etcd holds until it removes old revisions.
type PolicyFile struct {
	path   string
	spread time.Duration

	// current is the policy to follow. turn is when this node follows another one, zero if there is none.
	current *policy.Policy
	turn    time.Time
}

// NewPolicyFile does not read the file yet. Without a path the policy is the built-in one. A node waits for up to the time of spread
// before it follows a change.
func NewPolicyFile(path string, spread time.Duration) *PolicyFile {
	return &PolicyFile{path: path, spread: spread}
}

// Read returns the first policy at once, so that a restart is a way not to wait, and a later one when it is this node's turn. A policy
// that changes again in the meantime keeps the turn; one that changes back has nothing to wait for. While the policy is invalid
// nothing waits.
func (f *PolicyFile) Read(ctx context.Context) (*policy.Policy, error) {
	found, err := f.read()
	now := time.Now()
	switch {
	case err != nil:
		f.turn = time.Time{}
		return nil, err
	case reflect.DeepEqual(found, f.current):
		f.turn = time.Time{}
		return f.current, nil
	case f.current != nil && f.turn.IsZero():
		f.turn = now.Add(time.Duration(rand.Float64() * float64(f.spread))) //nolint:gosec // no secret
		klog.FromContext(ctx).Info("The sharing policy has changed. This node follows later, so that not all nodes write their ResourceSlices at once; "+
			"a restart of this pod does not wait", "in", f.turn.Sub(now))
	}
	if f.current != nil && now.Before(f.turn) {
		return f.current, nil
	}
	f.current, f.turn = found, time.Time{}
	return found, nil
}

func (f *PolicyFile) read() (*policy.Policy, error) {
	if f.path == "" {
		return policy.Builtin(), nil
	}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return nil, fmt.Errorf("sharing policy: %w", err)
	}
	found, err := policy.Decode(content)
	if err != nil {
		return nil, fmt.Errorf("sharing policy %s: %w", f.path, err)
	}
	return found, nil
}
