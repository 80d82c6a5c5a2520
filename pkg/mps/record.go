// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/host"
)

const recordVersion = "mps.partage.dev/v1"

// record is what a session's folder says about it. Fields are only ever added.
type record struct {
	APIVersion string `json:"apiVersion"`
	// BootID tells processes of this boot from those of another.
	BootID string `json:"bootID"`
	Spec   Spec   `json:"spec"`
	// Started: the session was ready once, so that it outlives failures.
	Started bool `json:"started,omitempty"`
	// Removing: nobody wants it any more.
	Removing bool `json:"removing,omitempty"`
	// Serving: clients may be connected. It tells whether an end is a loss.
	Serving bool `json:"serving,omitempty"`
	// Daemon is the control daemon that was started last, Servers are its servers.
	Daemon  *processID  `json:"daemon,omitempty"`
	Servers []processID `json:"servers,omitempty"`
	// ServerUser is the user whom the first of them serves, and as whom it runs.
	ServerUser string `json:"serverUser,omitempty"`

	Losses       int       `json:"losses,omitempty"`
	LastLoss     string    `json:"lastLoss,omitempty"`
	LastLossTime time.Time `json:"lastLossTime,omitzero"`
}

// lose counts a loss, unless there was nothing to lose.
func (r *record) lose(text string, at time.Time) bool {
	if !r.Serving {
		return false
	}
	r.Serving = false
	r.Losses++
	r.LastLoss, r.LastLossTime = text, at
	return true
}

// folder is where a session lives.
type folder string

func (f folder) id() string     { return filepath.Base(string(f)) }
func (f folder) pipe() string   { return filepath.Join(string(f), "pipe") }
func (f folder) log() string    { return filepath.Join(string(f), "log") }
func (f folder) shm() string    { return filepath.Join(string(f), "shm") }
func (f folder) record() string { return filepath.Join(string(f), "session.json") }

// marker is the environment variable by which processes of the session are found.
func (f folder) marker() string { return markerVariable + "=" + string(f) }

// maxSocketPath is what fits into the kernel's structure, less the final zero.
const maxSocketPath = 107

// check refuses a folder in which MPS could not make its sockets, and one that is
// not a session's.
func (f folder) check() error {
	// The longer of the two sockets that a daemon makes.
	path := filepath.Join(f.pipe(), "control_privileged")
	if len(path) > maxSocketPath {
		return fmt.Errorf("%w: session %s: the socket %s has %d bytes, a socket's path has at most %d: use a shorter folder or id",
			ErrInvalid, f.id(), path, len(path), maxSocketPath)
	}
	switch foreign, err := f.foreign(); {
	case err != nil:
		return err
	case foreign != "":
		return fmt.Errorf("%w: session %s: %s is no folder of a session, it has %s", ErrInvalid, f.id(), string(f), foreign)
	}
	return nil
}

func (f folder) save(r record) error {
	r.APIVersion = recordVersion
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write down session %s: %w", f.id(), err)
	}
	if err := host.ReplaceFile(f.record(), append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write down session %s: %w", f.id(), err)
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
