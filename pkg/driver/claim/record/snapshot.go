// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Snapshot is one reading of all records.
//
// A partition comes or goes only under its GPU's lock and while a record says so. What a snapshot says of a GPU therefore
// stays true while the GPU's lock is held, except that a claim may begin to be released.
type Snapshot struct {
	// Records are those of this boot. Nothing of another boot is left on the hardware.
	Records []*Record
	// Earlier are those of earlier boots, of claims that have none of this one: the kubelet prepares them again.
	Earlier []*Record
	Guards  []Guard
	// Err is why there may be more of them, or nil: the folder cannot be read.
	Err error
}

// Guard is a file of this boot that cannot be read. Everything that it may be about stays as it is.
type Guard struct {
	// Claim is empty where it may be about any, and has no name where the claim has no other record.
	Claim Ref
	// GPUs are those that it may be about. Nil means all.
	GPUs []string
	Path string
	// Released means that the claim was released when the file had this content, and has no record since. Cleared are the GPUs on which
	// nothing is left that it could be about.
	Released bool
	Cleared  []string
	// Remedy is what helps, for people.
	Remedy string
}

func (g *Guard) String() string {
	return fmt.Sprintf("a claim whose record cannot be read (%s): %s", g.Path, g.Remedy)
}

// Snapshot reads all records. What cannot be read is a guard, the folder included.
func (s *Store) Snapshot() *Snapshot {
	all, err := inTurn(s, "read the records", func() (*Snapshot, error) { return s.snapshot(), nil })
	if err != nil {
		all = &Snapshot{Err: err}
	}
	if all.Err != nil {
		all.guard(Guard{Path: s.folder}, all.Err)
	}
	return all
}

func (s *Store) snapshot() *Snapshot {
	all := &Snapshot{}
	all.addOld(filepath.Dir(s.folder), s.boot)
	known, unlock, err := s.open(false)
	defer unlock()
	all.Err = err
	for _, uid := range slices.Sorted(maps.Keys(known)) {
		all.add(known[uid])
	}
	return all
}

func (all *Snapshot) add(e *entry) {
	claim := Ref{UID: e.uid}
	if e.record != nil {
		all.Records, claim = append(all.Records, e.record), e.record.Claim
	} else if e.before != nil {
		all.Earlier, claim = append(all.Earlier, e.before), e.before.Claim
	}
	for i := range e.guards {
		g := &e.guards[i]
		guard := Guard{Claim: claim, GPUs: g.head.gpus, Path: g.path}
		if e.isCovered() {
			guard.Released, guard.Cleared = e.record == nil, e.cleared
		}
		all.guard(guard, g.err)
	}
}

func (all *Snapshot) guard(g Guard, err error) {
	g.Remedy = "drain the node, then remove " + g.Path
	if errors.Is(err, ErrOtherVersion) {
		g.Remedy = "run the version of the driver that wrote it, or " + g.Remedy
	}
	all.Guards = append(all.Guards, g)
}

// addOld guards everything while there are records that builds before this format have written in this boot: people remove them.
func (all *Snapshot) addOld(dataDir, boot string) {
	folder := filepath.Join(dataDir, "claims")
	found, _ := filepath.Glob(filepath.Join(folder, "*.json"))
	note, _ := os.ReadFile(filepath.Join(dataDir, "boot")) // these builds noted the boot of all
	if len(found) > 0 && strings.TrimSpace(string(note)) == boot {
		all.guard(Guard{Path: folder}, nil)
	}
}

// All are the records of this boot and of earlier ones.
func (all *Snapshot) All() []*Record { return slices.Concat(all.Records, all.Earlier) }

// Of returns the record of a claim, or nil.
func (all *Snapshot) Of(claim types.UID) *Record {
	for _, r := range all.All() {
		if r.Claim.UID == claim {
			return r
		}
	}
	return nil
}

// IsGuarded reports whether a claim has a record that cannot be read.
func (all *Snapshot) IsGuarded(claim types.UID) bool {
	return slices.ContainsFunc(all.Guards, func(g Guard) bool { return g.Claim.UID == claim })
}

// Held is a device of a claim.
type Held struct {
	Record *Record
	*Device
}

// On returns the devices of claims on a GPU.
func (all *Snapshot) On(pciAddress string) []Held {
	var found []Held
	for _, r := range all.Records {
		for i := range r.Devices {
			if d := &r.Devices[i]; d.PCIAddress == pciAddress {
				found = append(found, Held{r, d})
			}
		}
	}
	return found
}
