// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/host"
)

const recordVersion = "mps.partage.dev/v1"

func (f folder) save(r rules.Record) error {
	r.APIVersion = recordVersion
	data, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = host.ReplaceFile(f.record(), append(data, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the record of session %s: %w", f.id(), err)
	}
	return nil
}

func (f folder) load() (r rules.Record, err error) {
	data, err := os.ReadFile(f.record())
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	switch {
	case err != nil:
	case !strings.HasPrefix(r.APIVersion, recordVersion):
		err = fmt.Errorf("apiVersion is %q, want %q", r.APIVersion, recordVersion)
	case r.Spec.ID != f.id():
		err = fmt.Errorf("it is about session %q", r.Spec.ID)
	default:
		err = r.Spec.Validate()
	}
	if err != nil {
		return rules.Record{}, fmt.Errorf("read session %s from %s: %w", f.id(), f.record(), err)
	}
	if r.Daemon == nil {
		r.Sockets = nil // nobody knows whose they are
	}
	return r, nil
}
