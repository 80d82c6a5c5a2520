// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
)

// scope is what a file that is not a record may be about.
type scope struct {
	// known is false where the file may be about anything on the node.
	known bool
	// partitioned are the GPUs on which it may have partitions.
	partitioned []string
	// sessions are the MPS sessions that it may have.
	sessions []string
}

var (
	addressField = regexp.MustCompile(`"pciAddress":\s*"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"`)
	nameField    = regexp.MustCompile(`"device":`)
	deviceField  = regexp.MustCompile(`"pool":`)
	typeField    = regexp.MustCompile(`"type":\s*"(gpu|mig|mig-static|mps|timeslice)"`)
	sessionField = regexp.MustCompile(`"(?:session|id)":\s*"([a-z0-9-]+)"`)
	profileField = regexp.MustCompile(`"profileID":`)
)

// salvage finds out which GPUs a damaged record, or one of another version, may be
// about, so that it stands in the way of nothing else. It is believed only where every
// device in the file, those of sessions included, has a readable type and address and
// the file has its end. Save indents, so that only the last bracket starts a line.
func salvage(data []byte) scope {
	whole := json.Valid(data) || bytes.HasSuffix(bytes.TrimSpace(data), []byte("\n}"))
	devices := len(deviceField.FindAllIndex(data, -1))
	types := len(typeField.FindAllIndex(data, -1))
	addresses := addressField.FindAllSubmatch(data, -1)
	if !whole || devices == 0 || types != devices || len(addresses) != len(nameField.FindAllIndex(data, -1)) {
		return scope{}
	}
	found := scope{known: true}
	if profileField.Match(data) || bytes.Contains(data, []byte(`"mig`)) {
		for _, match := range addresses {
			found.partitioned = append(found.partitioned, string(match[1]))
		}
	}
	for _, match := range sessionField.FindAllSubmatch(data, -1) {
		found.sessions = append(found.sessions, string(match[1]))
	}
	return found
}

func (s scope) mayPartition(pciAddress string) bool {
	return !s.known || slices.Contains(s.partitioned, pciAddress)
}

func (s scope) mayHold(session string) bool {
	return !s.known || slices.Contains(s.sessions, session)
}
