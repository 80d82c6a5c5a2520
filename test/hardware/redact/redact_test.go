// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package redact

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// secrets are what must be in no text afterwards.
var secrets = []string{
	"lent-7", "example.internal", "alice", "1650123456789", "4a7e0c31-1111-2222-3333-0123456789ab", "0x1b00", "900-21010",
	"0xAABBCCDDEEFF0011", "47114711", "train_llm", "lender_agent", "10.20.30.40", "fd00:1234::7", "aa:bb:cc:dd:ee:ff", "chassis-99", strings.Repeat("0123456789abcdef", 4),
}

const query = `==============NVSMI LOG==============
Timestamp                                 : Wed Nov 25 23:02:13 2026
Driver Version                            : 580.95.05
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H200
    Serial Number                         : 1650123456789
    GPU UUID                              : GPU-4a7e0c31-1111-2222-3333-0123456789ab
    GPU PDI                               : 0xAABBCCDDEEFF0011
    VBIOS Version                         : 96.00.99.00.01
    Board ID                              : 0x1b00
    Board Part Number                     : 900-21010-0040-000
    Inforom Version
        Image Version                     : G520.0280.00.05
    Platform Info
        Chassis Serial Number             : chassis-99
        Module Id                         : 2
    PCI
        Bus Id                            : 00000000:1B:00.0
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 47114711
            Type                          : C
            Name                          : /home/alice/train_llm --port 10.20.30.40
        Process ID                        : 812
            Type                          : C
            Name                          : nvidia-persistenced
`

const transcript = `{"transcript":1,"version":"v0.1.0","node":"LENT-7.example.internal","time":"2026-01-02T03:04:05Z","parts":["read-only"]}
{"kind":"file","question":"processes with GPU 0000:1b:00.0 open","answer":[{"Name":"train_llm","PID":47114711},{"Harmless":true,"Name":"nvidia-persiste","PID":812}],"took":"41ms"}
{"kind":"nvml","question":"processes of GPU 0000:1b:00.0","answer":[47114711],"took":"41ms"}
{"kind":"file","question":"program of process 1","answer":"lender_agent","took":"41ms"}
{"kind":"nvml","question":"all GPUs","answer":{"GPUs":[{"UUID":"GPU-4a7e0c31-1111-2222-3333-0123456789ab","Memory":150754820096}]},"took":"1ms"}
{"kind":"mps client","question":"a client","answer":[{"event":"holding","pid":1},{"event":"device","uuid":"4a7e0c31-1111-2222-3333-0123456789ab"}],"took":"1ms"}
{"kind":"file","question":"places <of> files","answer":"/home/alice/x on lent-7 (10.20.30.40, fd00:1234::7, aa:bb:cc:dd:ee:ff) in 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef","took":"1ms"}
{"kind":"file","question":"cut of`

func known(t *testing.T) (text, lines string) {
	t.Helper()
	r := New([]string{"lent-7.example.internal"}, []string{"alice", "root", ""})
	r.Learn(transcript)
	r.Learn(query)
	lines, err := r.Lines(transcript)
	if err != nil {
		t.Fatal(err)
	}
	return r.Text(query), lines
}

// TestNoSecret: nothing that identifies the machine, or who works on it, stays.
func TestNoSecret(t *testing.T) {
	text, lines := known(t)
	for _, secret := range secrets {
		if !strings.Contains(strings.ToLower(query+transcript), strings.ToLower(secret)) {
			t.Errorf("%q is no secret of this machine", secret)
		}
		for name, got := range map[string]string{"text": text, "lines": lines} {
			if strings.Contains(strings.ToLower(got), strings.ToLower(secret)) {
				t.Errorf("the %s has %q:\n%s", name, secret, got)
			}
		}
	}
}

// TestWhatStays: what says something about hardware and driver is not touched.
func TestWhatStays(t *testing.T) {
	text, lines := known(t)
	for _, want := range []string{
		"Timestamp                                 : Wed Nov 25 23:02:13 2026", ": 580.95.05", "00000000:1B:00.0", ": NVIDIA H200\n", ": 96.00.99.00.01", "G520.0280.00.05",
		"Name                          : nvidia-persistenced", "Module Id                         : 2", "GPU UUID                              : GPU-UUID-1\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the text lacks %q:\n%s", want, text)
		}
	}
	for _, want := range []string{
		`"transcript":1`, `processes with GPU 0000:1b:00.0 open`, "nvidia-persiste", "150754820096", `"pid":1`, "places <of> files", "2026-01-02T03:04:05Z", `"Name":"PROCESS-1"`,
	} {
		if !strings.Contains(lines, want) {
			t.Errorf("the lines lack %q:\n%s", want, lines)
		}
	}
}

// TestSamePlaceholder: a thing is recognised in another file.
func TestSamePlaceholder(t *testing.T) {
	text, lines := known(t)
	var entries []struct {
		Question string          `json:"question"`
		Answer   json.RawMessage `json:"answer"`
	}
	for line := range strings.Lines(lines) {
		entries = append(entries, struct {
			Question string          `json:"question"`
			Answer   json.RawMessage `json:"answer"`
		}{})
		if err := json.Unmarshal([]byte(line), &entries[len(entries)-1]); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
	}
	if len(entries) != 7 {
		t.Fatalf("%d lines, want 7: the last was cut off", len(entries))
	}
	var open []struct{ PID int }
	var listed []int
	if err := json.Unmarshal(entries[1].Answer, &open); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(entries[2].Answer, &listed); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{open[0].PID}, listed); diff != "" {
		t.Errorf("a process has two numbers: %s", diff)
	}
	for _, both := range []string{"GPU-UUID-1", "5000001"} {
		if !strings.Contains(text, both) || !strings.Contains(lines, both) {
			t.Errorf("%s is not in both:\n%s\n%s", both, text, lines)
		}
	}
	if !strings.Contains(lines, `"uuid":"UUID-1"`) {
		t.Errorf("the UUID without its prefix: %s", lines)
	}
}

// TestWordsOfTheFormat: a user may be called like a word that transcripts need.
func TestWordsOfTheFormat(t *testing.T) {
	const line = `{"kind":"api","question":"who is dev","answer":"dev","took":"1ms"}` + "\n"
	got, err := New(nil, []string{"api", "dev", "1ms"}).Lines(line)
	if want := `{"answer":"USER-2","kind":"api","question":"who is USER-2","took":"1ms"}` + "\n"; err != nil || got != want {
		t.Errorf("got %s, %v: want %s", got, err, want)
	}
}

// TestAddresses: versions and PCI addresses are none.
func TestAddresses(t *testing.T) {
	r := New(nil, nil)
	for _, c := range []struct{ text, want string }{
		{"10.0.0.7 and 10.0.0.71 and 10.0.0.7.", "IP-1 and IP-2 and IP-1."},
		{"13.580.95.05 0000:1b:00.0 12:34:56", "13.580.95.05 0000:1b:00.0 12:34:56"},
		{"127.0.0.1 ::1 std::x", "127.0.0.1 ::1 std::x"},
		{"at fe80::1ff:fe23:4567:890a, port", "at IP-3, port"},
	} {
		if got := r.Text(c.text); got != c.want {
			t.Errorf("%q: got %q, want %q", c.text, got, c.want)
		}
	}
}

// TestByForm: what has the form of a name is replaced, whatever taught it.
func TestByForm(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"Release Build  (root@gpu-node-17.acme.internal)  Thu", "Release Build  (root@HOST-1)  Thu"},
		{"dana@gpu-node-17 and DANA on gpu-node-17.acme.internal", "USER-1@HOST-2 and USER-1 on HOST-1"},
		{"/home/carol, /home/carol/x and carol", "/home/USER-2, /home/USER-2/x and USER-2"},
		{"aa-bb-cc-dd-ee-0f is aa:bb:cc:dd:ee:0f", "MAC-1 is MAC-1"},
		{"GPU-4A7E0C31-1111-2222-3333-0123456789AB 4a7e0c31111122223333" + "0123456789ab", "GPU-UUID-1 UUID-1"},
		{"kubepods-pod4a7e0c31_1111_2222_3333_0123456789ab.slice", "kubepods-podUUID-1.slice"},
		{"container 3f2a1c4d5e6f in cri-3f2a1c4d5e6f.scope", "container HEX-1 in cri-HEX-1.scope"},
		{"150754820096 bytes 0x0000000000000abc 580.95.05 4a7e0c31", "150754820096 bytes 0x0000000000000abc 580.95.05 4a7e0c31"},
		{"CapEff:\t000001ffffffffff\n", "CapEff:\t000001ffffffffff\n"},
	} {
		if got := r(t).Text(c.text); got != c.want {
			t.Errorf("%q: got %q, want %q", c.text, got, c.want)
		}
	}
}

// r has learned from what TestByForm redacts.
func r(t *testing.T) *Redactor {
	t.Helper()
	known := New(nil, nil)
	known.Learn("(root@gpu-node-17.acme.internal) dana@gpu-node-17 /home/carol\n")
	_ = known.Text("(root@gpu-node-17.acme.internal) dana@gpu-node-17 /home/carol 4a7e0c31-1111-2222-3333-0123456789ab")
	return known
}

// TestNamesInOthers: a name that is also a part of a path or of a product leaves that alone.
func TestNamesInOthers(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"dev", "/dev/nvidia0 of dev in /data/dev/x", "/dev/nvidia0 of USER-1 in /data/USER-1/x"},
		{"h100", "NVIDIA H100 80GB HBM3 in h100", "NVIDIA H100 80GB HBM3 in USER-1"},
		{"nvidia0", "/dev/nvidia0 of nvidia0", "/dev/nvidia0 of USER-1"},
		{"gpus-a", "/proc/driver/nvidia/gpus-a of gpus-a", "/proc/driver/nvidia/gpus-a of USER-1"},
		{"bob", "bobsled of bob", "bobsled of USER-1"},
		{"driver", "Driver Version : 580.95.05", "Driver Version : 580.95.05"},
	} {
		if got := New(nil, []string{c.name}).Text(c.text); got != c.want {
			t.Errorf("a user called %s: got %q, want %q", c.name, got, c.want)
		}
	}
}
