// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
)

const (
	// format begins the head in all versions, and version is this one. All versions keep the fields gpus and head, so that
	// a file of another one guards no other GPU.
	format  = "partage-claim-record/"
	version = format + "1"
	// gone is the state of a file that says only when the claim was released.
	gone State = "released"
	// marks are the letters of Mark.
	marks = "-+x~"
	// layout is the head without its own checksum.
	layout = "%s state=%-9s arrived=%020d released=%020d marks=[%s] gpus=[%s] writes=%010d body=%08x head="
)

// ErrOtherVersion marks a record that is not damaged, but not for this program.
var ErrOtherVersion = errors.New("written by another version of the driver")

// head is the first line of a file. It has the same length as long as the devices are the same.
type head struct {
	state             State
	arrived, released time.Duration
	// marks has a letter for each device.
	marks string
	// gpus are all that the record is about.
	gpus []string
	// writes counts how often the file was written, so that no two heads of it are the same.
	writes uint32
	// body is the checksum of what follows.
	body uint32
}

func (h *head) line() []byte {
	line := fmt.Appendf(nil, layout, version, h.state, h.arrived, h.released, h.marks, strings.Join(h.gpus, ","), h.writes, h.body)
	return fmt.Appendf(line, "%08x\n", crc32.ChecksumIEEE(line))
}

// parseHead returns the body as well. With an error the GPUs are known if they are not nil.
func parseHead(data []byte) (h head, body []byte, err error) {
	line, body, _ := bytes.Cut(data, []byte("\n"))
	text := string(line)
	at := max(0, len(text)-8)
	if !strings.HasPrefix(text, format) || fmt.Sprintf("%08x", crc32.ChecksumIEEE(line[:at])) != text[at:] {
		return head{}, nil, errors.New("its head is damaged")
	}
	_, list, _ := strings.Cut(text, " gpus=[")
	list, _, _ = strings.Cut(list, "]")
	h.gpus = strings.FieldsFunc(list, func(r rune) bool { return r == ',' })
	if !strings.HasPrefix(text, version+" ") {
		return h, nil, fmt.Errorf("%w: it is no %s", ErrOtherVersion, version)
	}
	_, err = fmt.Sscanf(text, version+" state=%s arrived=%d released=%d marks=%s gpus=%s writes=%d body=%x",
		&h.state, &h.arrived, &h.released, &h.marks, &list, &h.writes, &h.body)
	h.marks = strings.Trim(h.marks, "[]")
	switch {
	case h.state != Preparing && h.state != Prepared && h.state != Releasing && h.state != gone:
		return h, nil, fmt.Errorf("%w: state %q", ErrOtherVersion, h.state)
	case strings.Trim(h.marks, marks) != "":
		return h, nil, fmt.Errorf("%w: marks %q", ErrOtherVersion, h.marks)
	case err != nil || string(h.line()) != text+"\n":
		return h, nil, errors.Join(errors.New("its head is damaged"), err) // it could not be written in its place
	case h.state != gone && crc32.ChecksumIEEE(body) != h.body:
		return h, nil, errors.New("it is damaged")
	}
	return h, body, nil
}

// parse reads the content of a file. There is no record with an error, nor in a file that says only when its claim was
// released. It is strict about what the driver relies on and indifferent to fields that it does not know.
func parse(data []byte, uid types.UID, boot string) (head, *Record, error) {
	h, body, err := parseHead(data)
	if err != nil || h.state == gone {
		return h, nil, err
	}
	r := &Record{}
	if err := json.Unmarshal(body, r); err != nil {
		return h, nil, err
	}
	if r.Claim.UID != uid || len(h.marks) != len(r.Devices) {
		return h, nil, fmt.Errorf("it is about %d devices of claim %q, with marks for %d", len(r.Devices), r.Claim.UID, len(h.marks))
	}
	r.BootID, r.State, r.Arrived = boot, h.state, h.arrived
	for i := range r.Devices {
		r.Devices[i].Mark = Mark(strings.IndexByte(marks, h.marks[i]))
	}
	if err := r.check(); err != nil {
		return h, nil, err
	}
	return h, r, nil
}

// encode returns the head and the body of a record.
func encode(r *Record, released time.Duration) (head, []byte, error) {
	body := encodeBody(r)
	h := head{state: r.State, arrived: r.Arrived, released: released, gpus: r.GPUs(), body: crc32.ChecksumIEEE(body)}
	for i := range r.Devices {
		h.marks += string(marks[r.Devices[i].Mark])
	}
	return h, body, r.check()
}

func encodeBody(r *Record) []byte {
	body, _ := json.MarshalIndent(r, "", "  ") // no field has a type that this fails for
	return append(body, '\n')
}

// check finds what another version may write and this one cannot use.
func (r *Record) check() error {
	for i := range r.Devices {
		d := &r.Devices[i]
		switch {
		case d.Device == "" || d.PCIAddress == "" || strings.ContainsAny(d.PCIAddress, ", \n\t[]"):
			return fmt.Errorf("device %d: no name or no PCI address: %q, %q", i, d.Device, d.PCIAddress)
		case d.Type != device.Whole && d.Type != device.Partition && d.Type != Static && !d.Type.IsShare():
			return fmt.Errorf("device %d: %w: type %q", i, ErrOtherVersion, d.Type)
		case !d.Type.IsShare() && (d.Type == device.Whole) != (d.Partition == nil):
			return fmt.Errorf("device %d: type %q does not match what it says about a partition", i, d.Type)
		case d.Sharing != nil && d.Sharing.Session != "" && r.Session(d.Sharing.Session) == nil:
			return fmt.Errorf("device %d: nothing is said of its MPS session %q", i, d.Sharing.Session)
		}
	}
	return nil
}
