// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/host"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/process"
)

const recordVersion = "mps.partage.dev/v1"

// record is the content of a session's session.json. Fields are only ever added.
type record struct {
	APIVersion string `json:"apiVersion"`
	// BootID tells processes of this boot from those of another.
	BootID string   `json:"bootID"`
	Spec   mps.Spec `json:"spec"`
	// Started: the session was ready once, so that it survives failures.
	Started bool `json:"started,omitempty"`
	// Removing: the session is no longer wanted.
	Removing bool `json:"removing,omitempty"`
	// Serving: clients may be connected, so that the end of a server is a loss.
	Serving bool `json:"serving,omitempty"`
	// Daemon is the control daemon that was started last, Servers are its servers.
	Daemon  *process.ID  `json:"daemon,omitempty"`
	Servers []process.ID `json:"servers,omitempty"`
	// Sockets are those that the daemon made, by name. The hook of containers reads
	// them, and Daemon, as well.
	Sockets map[string]process.Socket `json:"sockets,omitempty"`
	// Private: containers have the clients' folder of the pipe tmpfs only. Earlier
	// versions gave them all of it.
	Private bool `json:"private,omitempty"`
	// SharesMemory: the server has something in the session's /dev/shm, so that its clients need that.
	SharesMemory bool `json:"sharesMemory,omitempty"`
	// ServerUser is the user whom the first server serves, and as whom it runs.
	ServerUser string `json:"serverUser,omitempty"`

	Losses       int       `json:"losses,omitempty"`
	LastLoss     string    `json:"lastLoss,omitempty"`
	LastLossTime time.Time `json:"lastLossTime,omitzero"`

	// Doubt is how a client of the present servers was killed, after which nobody knows
	// whether they work. Reported: it is one of Kills.
	Doubt    string `json:"doubt,omitempty"`
	Reported bool   `json:"reported,omitempty"`
	Kills    int    `json:"kills,omitempty"`
	LastKill string `json:"lastKill,omitempty"`
}

// recordLoss counts a loss and reports whether there was anything to lose.
func (r *record) recordLoss(text string, at time.Time) bool {
	if !r.Serving {
		return false
	}
	r.Serving = false
	r.Losses++
	r.LastLoss, r.LastLossTime = text, at
	return true
}

func (f folder) save(r record) error {
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

func (f folder) load() (record, error) {
	data, err := os.ReadFile(f.record())
	if err != nil {
		return record{}, fmt.Errorf("read session %s: %w", f.id(), err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, fmt.Errorf("read session %s from %s: %w", f.id(), f.record(), err)
	}
	if !strings.HasPrefix(r.APIVersion, recordVersion) {
		return record{}, fmt.Errorf("read session %s from %s: apiVersion is %q, want %q", f.id(), f.record(), r.APIVersion, recordVersion)
	}
	if err := r.Spec.Validate(); err != nil {
		return record{}, fmt.Errorf("read session %s from %s: %w", f.id(), f.record(), err)
	}
	if r.Spec.ID != f.id() {
		return record{}, fmt.Errorf("read session %s from %s: it is about session %s", f.id(), f.record(), r.Spec.ID)
	}
	return r, nil
}
