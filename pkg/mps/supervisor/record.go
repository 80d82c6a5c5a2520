// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
)

const recordVersion = "mps.partage.dev/v1"

func (f folder) save(r rules.Record) error {
	r.APIVersion = recordVersion
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write the record of session %s: %w", f.id(), err)
	}
	if err := host.ReplaceFile(f.record(), append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the record of session %s: %w", f.id(), err)
	}
	return nil
}

func (f folder) load() (rules.Record, error) {
	data, err := os.ReadFile(f.record())
	if err != nil {
		return rules.Record{}, fmt.Errorf("read session %s: %w", f.id(), err)
	}
	var r rules.Record
	if err := json.Unmarshal(data, &r); err != nil {
		return rules.Record{}, fmt.Errorf("read session %s from %s: %w", f.id(), f.record(), err)
	}
	if !strings.HasPrefix(r.APIVersion, recordVersion) {
		return rules.Record{}, fmt.Errorf("read session %s from %s: apiVersion is %q, want %q", f.id(), f.record(), r.APIVersion, recordVersion)
	}
	if err := r.Spec.Validate(); err != nil {
		return rules.Record{}, fmt.Errorf("read session %s from %s: %w", f.id(), f.record(), err)
	}
	if r.Spec.ID != f.id() {
		return rules.Record{}, fmt.Errorf("read session %s from %s: it is about session %s", f.id(), f.record(), r.Spec.ID)
	}
	if r.Daemon == nil {
		r.Sockets = nil // nobody knows whose they are
	}
	return r, nil
}
