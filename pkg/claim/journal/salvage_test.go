// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/claim/internal/claimtest"
	"github.com/partage-dev/partage/pkg/device"
)

// text returns a record as it is on the disk.
func text(t *testing.T, r *Record) string {
	t.Helper()
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(data) + "\n"
}

func wholeGPU() *Record {
	r := New(Ref{UID: "u1"}, "boot-1")
	r.Add(Device{Requests: []string{"r0"}, Pool: "node-1", Device: claimtest.WholeB, Type: device.Whole, PCIAddress: claimtest.PCIB})
	return r
}

// partitionAndSession has a partition on A and a share of an MPS session on B.
func partitionAndSession() *Record {
	r := small("u1", "boot-1")
	r.Add(Device{
		Requests: []string{"r1"}, Pool: "node-1", Device: claimtest.MPSB, Type: device.MPS, PCIAddress: claimtest.PCIB, ShareID: ptr.To(types.UID("s")),
		Sharing: &Sharing{UUID: "GPU-b", Session: claimtest.WholeB},
	})
	r.Sessions = []Session{{ID: claimtest.WholeB, Shared: true, Devices: []SessionDevice{{Device: claimtest.MPSB, PCIAddress: claimtest.PCIB, UUID: "GPU-b"}}}}
	return r
}

// TestSalvage shows what a damaged record stands in the way of.
func TestSalvage(t *testing.T) {
	everything := []string{claimtest.PCIA, claimtest.PCIB}
	type want struct {
		partitions []string // GPUs on which it may have any
		session    bool     // whether it may hold that of B
	}
	replaced := func(r *Record, what, by string) string {
		before := text(t, r)
		after := strings.Replace(before, what, by, 1)
		if after == before {
			t.Fatalf("the record does not contain %s", what)
		}
		return after
	}
	small := small("u1", "boot-1")
	for name, test := range map[string]struct {
		data string
		want want
	}{
		"nothing":                         {"", want{everything, true}},
		"zeros":                           {strings.Repeat("\x00", 512), want{everything, true}},
		"no devices":                      {`{"apiVersion":"journal.partage.dev/v1","devices":[]}`, want{everything, true}},
		"bad state of a partition":        {replaced(small, `"preparing"`, `"prep#ring"`), want{[]string{claimtest.PCIA}, false}},
		"other version of a partition":    {replaced(small, "journal.partage.dev/v1", "journal.partage.dev/v9"), want{[]string{claimtest.PCIA}, false}},
		"not even JSON":                   {replaced(small, `"preparing"`, `"preparing`), want{[]string{claimtest.PCIA}, false}},
		"bad address of a partition":      {replaced(small, claimtest.PCIA, "0000:1x:00.0"), want{everything, true}},
		"bad type of a partition":         {replaced(small, `"type": "mig"`, `"type": "m#g"`), want{everything, true}},
		"bad state of a whole GPU":        {replaced(wholeGPU(), `"preparing"`, `"prep#ring"`), want{nil, false}},
		"bad state, with a session":       {replaced(partitionAndSession(), `"preparing"`, `"prep#ring"`), want{everything, true}},
		"bad address, with a session":     {replaced(partitionAndSession(), claimtest.PCIA, "0000:1x:00.0"), want{everything, true}},
		"bad address key, with a session": {replaced(partitionAndSession(), `"pciAddress"`, `"pciAdd#ess"`), want{everything, true}},
		"bad session of a device":         {replaced(partitionAndSession(), `"session": "gpu`, `"session": "#pu`), want{everything, true}},
	} {
		t.Run(name, func(t *testing.T) {
			got := salvage([]byte(test.data))
			for _, address := range everything {
				want := strings.Contains(strings.Join(test.want.partitions, " "), address)
				if may := got.mayPartition(address); may != want {
					t.Errorf("may have a partition on GPU %s: got %v, want %v", address, may, want)
				}
			}
			if may := got.mayHold(claimtest.WholeB); may != test.want.session {
				t.Errorf("may hold the session: got %v, want %v", may, test.want.session)
			}
		})
	}
}

// TestSalvageOfTruncated shows that nothing is concluded from a file without its end,
// wherever it was cut off.
func TestSalvageOfTruncated(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(formats, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	cases := 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !salvage(data).known {
			t.Errorf("%s: nothing was salvaged from the whole file", file)
		}
		for n := range len(strings.TrimSpace(string(data))) {
			cases++
			if salvage(data[:n]).known {
				t.Errorf("%s, cut off after %d bytes, is believed: …%s", file, n, data[max(0, n-60):n])
				break
			}
		}
	}
	if cases < 14000 {
		t.Errorf("%d cases", cases)
	}
}

// TestUnreadableInSnapshot asks a snapshot about damaged records, in place and in
// quarantine.
func TestUnreadableInSnapshot(t *testing.T) {
	s := mustOpen(t, t.TempDir(), "boot-1", OS{})
	for _, uid := range []types.UID{"u1", "u2"} {
		r := partitionAndSession()
		r.Claim.UID, r.Devices[0].PCIAddress = uid, map[types.UID]string{"u1": claimtest.PCIA, "u2": claimtest.PCIC}[uid]
		content := strings.Replace(text(t, r), `"bootID"`, `bootID"`, 1)
		if err := os.WriteFile(s.Path(uid), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Load(t.Context(), "u2"); err == nil {
		t.Fatal("a damaged record was loaded")
	}
	quarantined, err := s.Quarantined("u2")
	if err != nil || len(quarantined) != 1 {
		t.Fatal(quarantined, err)
	}
	snapshot, err := s.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]string{claimtest.PCIA: s.Path("u1"), claimtest.PCIC: quarantined[0], "0000:99:00.0": ""} {
		if got := snapshot.MayPartition(address); got != want {
			t.Errorf("GPU %s: got %q, want %q", address, got, want)
		}
		if got := snapshot.Explain(address); !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("GPU %s: explained by %q", address, got)
		}
	}
	if snapshot.MayHoldSession(claimtest.WholeB) == "" || snapshot.MayHoldSession(claimtest.WholeA) != "" {
		t.Error("sessions: it must be that of B only")
	}
	if !snapshot.OfClaimMayPartition("u2", claimtest.PCIC) || snapshot.OfClaimMayPartition("u1", claimtest.PCIC) {
		t.Error("a partition on C may be that of u2 only")
	}
	if !snapshot.OfClaimMayHaveSessions("u1") || snapshot.OfClaimMayHaveSessions("u3") {
		t.Error("the session may be that of u1 and u2 only")
	}
}
