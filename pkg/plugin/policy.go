// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/partage-dev/partage/pkg/policy"
)

// PolicySource provides the admin's sharing policy.
type PolicySource interface {
	// Read returns the policy as it is now. The same pointer means that nothing
	// has changed.
	Read(ctx context.Context) (*policy.Policy, error)
}

// PolicyFile is a SharingPolicy in a file that may be replaced at any time, as
// the kubelet does with a ConfigMap.
type PolicyFile struct {
	path string

	mu sync.Mutex
	// content is what current and err were decoded from; nil before the first read.
	content []byte
	current *policy.Policy
	err     error
}

// NewPolicyFile does not read the file yet. Without a path the policy is the
// built-in one.
func NewPolicyFile(path string) *PolicyFile { return &PolicyFile{path: path} }

// Read reads the file every time and decodes it when it has changed.
func (f *PolicyFile) Read(context.Context) (*policy.Policy, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.path == "" {
		if f.current == nil {
			f.current = policy.Builtin()
		}
		return f.current, nil
	}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return nil, fmt.Errorf("sharing policy: %w", err)
	}
	if f.content != nil && bytes.Equal(content, f.content) {
		return f.current, f.err
	}
	f.content = append([]byte{}, content...)
	f.current, f.err = policy.Decode(content)
	if f.err != nil {
		f.err = fmt.Errorf("sharing policy %s: %w", f.path, f.err)
	}
	return f.current, f.err
}
