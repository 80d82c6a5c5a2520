// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"time"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/process"
)

// Record is what is written down about a session, in its session.json. Fields are only ever added.
type Record struct {
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
	// Daemon is the control daemon that has answered last, Servers are its servers.
	Daemon  *process.ID  `json:"daemon,omitempty"`
	Servers []process.ID `json:"servers,omitempty"`
	// Sockets are those that the daemon made, by name. The hook of containers reads
	// them, and Daemon, as well.
	Sockets map[string]process.Socket `json:"sockets,omitempty"`
	// SharesMemory: the server has something in the session's /dev/shm, so that its clients need that.
	SharesMemory bool `json:"sharesMemory,omitempty"`
	// ServerUser is the user whom the first server serves, and as whom it runs.
	ServerUser string `json:"serverUser,omitempty"`

	mps.History

	// ClientKilled is how a client of the present servers was killed, after which their state is
	// undefined. Reported: it is one of Kills.
	ClientKilled string `json:"clientKilled,omitempty"`
	Reported     bool   `json:"reported,omitempty"`
}

// lose counts a loss, if there was anything to lose. What happened to clients of the servers that are gone is over.
func (r *Record) lose(text string, now time.Time) {
	r.ClientKilled, r.Reported = "", false
	if r.Serving {
		r.Serving = false
		r.Losses++
		r.LastLoss, r.LastLossTime = text, now.UTC().Truncate(time.Second)
	}
}
