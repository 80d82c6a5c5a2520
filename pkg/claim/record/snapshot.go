// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// Snapshot is one reading of all records.
//
// A partition comes or goes only under its GPU's lock and while a record says so. What a snapshot
// says of a GPU therefore stays true while the GPU's lock is held, except that a claim may begin
// to be released.
type Snapshot struct {
	// Records are those of this boot. Nothing of another boot is left on the hardware.
	Records []*Record
	// Earlier are those of earlier boots, of claims that have none of this one: the kubelet
	// prepares them again.
	Earlier []*Record
	// Guards are the files of this boot that cannot be read.
	Guards []Guard
}

// Guard is a record that cannot be read. Everything that it may be about stays as it is.
type Guard struct {
	// Claim is empty where it may be about any.
	Claim types.UID
	// GPUs are those that it may be about. Nil means all.
	GPUs []string
	// Path is the file, or the folder.
	Path string
	// Released means that a release of the claim arrived after the file was last written.
	Released bool
	Err      error
	// Remedy is what helps, for people.
	Remedy string
}

// On reports whether the file may be about a GPU.
func (g *Guard) On(pciAddress string) bool {
	return g.GPUs == nil || slices.Contains(g.GPUs, pciAddress)
}

// Look reads all records for a program that is not the driver. It changes nothing, and takes a
// data folder that is not there for an empty one.
func Look(dataDir, boot string) (*Snapshot, error) {
	s, err := Open(dataDir, boot, OS{})
	if err != nil {
		return nil, err
	}
	return s.Snapshot(), nil
}

// Snapshot reads all records. What cannot be read is a guard of it, the folder included.
func (s *Store) Snapshot() *Snapshot {
	all := &Snapshot{Guards: s.oldGuards()}
	unlock, err := s.lockAll(unix.LOCK_SH)
	if err != nil {
		all.guard(Guard{Path: s.folder, Err: err})
		return all
	}
	defer unlock()
	listed, err := s.list()
	if err != nil {
		all.guard(Guard{Path: s.folder, Err: err})
	}
	seen := map[string]bool{}
	for _, uid := range slices.Sorted(maps.Keys(listed.uids)) {
		e := s.load(uid)
		seen[e.path] = true
		if e.record != nil {
			all.Records = append(all.Records, e.record)
		}
		if e.err != nil {
			all.guard(Guard{Claim: uid, GPUs: e.head.gpus, Path: e.path, Released: e.released > e.head.arrived, Err: e.err})
		}
		for _, path := range listed.aside[uid] {
			all.guard(s.asideGuard(path, e))
		}
	}
	s.addEarlier(all, seen)
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.parsed, func(path string, _ parsed) bool { return !seen[path] })
	return all
}

func (all *Snapshot) guard(g Guard) {
	if g.Remedy == "" {
		g.Remedy = "drain the node, then remove " + g.Path
	}
	if errors.Is(g.Err, ErrOtherVersion) {
		g.Remedy = "run the version of the driver that wrote it, or " + g.Remedy
	}
	all.Guards = append(all.Guards, g)
}

// asideGuard is one that was moved aside from the claim of the entry.
func (s *Store) asideGuard(path string, e *entry) Guard {
	var since int64
	_, numbers, _ := strings.Cut(path, asideInfix)
	_, scanErr := fmt.Sscanf(numbers, "%d-", &since)
	f := s.readFile(path, e.uid, s.boot)
	if f.err == nil {
		f.err = errors.New("it could not be read and was moved aside")
	}
	return Guard{Claim: e.uid, GPUs: f.head.gpus, Path: path, Released: scanErr == nil && int64(e.released) > since, Err: f.err}
}

func (s *Store) addEarlier(all *Snapshot, seen map[string]bool) {
	known := map[types.UID]bool{}
	for _, r := range all.Records {
		known[r.Claim.UID] = true
	}
	for _, boot := range s.earlierBoots() {
		folder := filepath.Join(filepath.Dir(s.folder), boot)
		entries, _ := os.ReadDir(folder) // what is not found blocks nothing
		for _, entry := range entries {
			uid := types.UID(entry.Name())
			if CheckUID(uid) != nil || known[uid] {
				continue
			}
			f := s.readFile(filepath.Join(folder, entry.Name()), uid, boot)
			if f.written == nil {
				continue
			}
			if s.load(uid).released > 0 {
				f.written.State = Releasing
			}
			known[uid], seen[f.path] = true, true
			all.Earlier = append(all.Earlier, f.written)
		}
	}
}

// DropGuard removes the files of a claim that cannot be read, if they were moved aside or the claim
// was released: all that it has is written down again, or nothing of it is left.
func (s *Store) DropGuard(uid types.UID) error {
	unlock, err := s.lock(uid, unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	listed, err := s.list()
	if err != nil {
		return fmt.Errorf("records: %w", err)
	}
	paths := listed.aside[uid]
	if e := s.load(uid); e.err != nil && e.released > e.head.arrived {
		paths = append(paths, e.path)
	}
	for _, path := range paths {
		if err := s.files.Remove(path); err != nil {
			return fmt.Errorf("record of claim %s: %w", uid, err)
		}
	}
	s.changed.send()
	return nil
}

// UIDs lists the claims that have a record, of any boot, or one that cannot be read.
func (s *Store) UIDs() []types.UID {
	all := s.Snapshot()
	var uids []types.UID
	for _, r := range slices.Concat(all.Records, all.Earlier) {
		uids = append(uids, r.Claim.UID)
	}
	for _, g := range all.Guards {
		if g.Claim != "" {
			uids = append(uids, g.Claim)
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids)
}

// Others returns the snapshot without what is about a claim.
func (all *Snapshot) Others(uid types.UID) *Snapshot {
	others := *all
	others.Records = slices.DeleteFunc(slices.Clone(all.Records), func(r *Record) bool { return r.Claim.UID == uid })
	others.Earlier = slices.DeleteFunc(slices.Clone(all.Earlier), func(r *Record) bool { return r.Claim.UID == uid })
	others.Guards = slices.DeleteFunc(slices.Clone(all.Guards), func(g Guard) bool { return g.Claim == uid })
	return &others
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

// oldGuards are the records that builds before this format have written in this boot. They stay:
// people remove them.
func (s *Store) oldGuards() []Guard {
	folder := filepath.Join(s.dataDir, "claims")
	remedy := "drain the node, then remove " + folder
	entries, err := os.ReadDir(folder)
	if absent(err) {
		return nil
	}
	if err != nil {
		return []Guard{{Path: folder, Err: err, Remedy: remedy}}
	}
	var guards []Guard
	for _, entry := range entries {
		uid, isRecord := strings.CutSuffix(entry.Name(), ".json")
		if !isRecord || CheckUID(types.UID(uid)) != nil {
			continue
		}
		g := Guard{Claim: types.UID(uid), Path: filepath.Join(folder, entry.Name()), Remedy: remedy, Err: errors.New("written by a build before version 0.1.0")}
		var old struct {
			BootID  string                        `json:"bootID"`
			Devices []struct{ PCIAddress string } `json:"devices"`
		}
		data, err := s.files.Read(g.Path)
		if err == nil {
			err = json.Unmarshal(data, &old)
		}
		if err != nil {
			// These builds noted the boot once for all.
			note, noteErr := s.files.Read(filepath.Join(s.dataDir, "boot"))
			if noteErr == nil {
				old.BootID = strings.TrimSpace(string(note))
			}
			g.Err = err
		} else {
			g.GPUs = []string{}
			for _, d := range old.Devices {
				g.GPUs = append(g.GPUs, d.PCIAddress)
			}
		}
		if old.BootID == s.boot {
			guards = append(guards, g)
		}
	}
	return guards
}
