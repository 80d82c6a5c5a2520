// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/conformance"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

var record = flag.Bool("record", false, "write a transcript for the golden files of pkg/conformance")

// ofTheMachine reports whether a check looks at the machine on which the tests run. The
// GPUs of all simulated machines have the same device numbers, so that other tests hold
// them.
func ofTheMachine(check string) bool {
	return strings.HasPrefix(check, "node.") || check == "holders.others"
}

// persistent switches persistence mode on, as it is on servers.
func persistent(m *machine.Machine) {
	for i := range m.GPUs {
		m.GPUs[i].Persistence = true
	}
}

// TestReadOnlyHolds: on a simulated machine everything holds.
func TestReadOnlyHolds(t *testing.T) {
	for _, name := range []string{"dgx-h100", "dgx-a100", "mixed"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			report, code := examine(t, harness.NewNode(t, name, persistent))
			for _, r := range report.Results {
				if !ofTheMachine(r.Check) && r.Verdict != conformance.Holds {
					t.Errorf("%s is %q %s: expected %s, observed %s %s", r.Check, r.Verdict, r.Subject, r.Expected, r.Observed, r.Reason)
				}
			}
			expect.Equal(t, code, min(report.Summary.Differs, 1), "exit code")
		})
	}
}

// want is what a check says about a trouble.
type want struct {
	check, subject string
	verdict        conformance.Verdict
	text           string // a part of what was observed, or of the reason
}

// trouble is a machine that is not as the driver takes it for granted.
type trouble struct {
	machine string
	before  func(*machine.Machine)
	make    []func(*testing.T, *harness.Node)
	flags   []string
	wants   []want
}

// h100 are the addresses of dgx-h100.
var h100 = []string{
	"0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:61:00.0", "0000:9d:00.0", "0000:c3:00.0", "0000:d1:00.0", "0000:df:00.0",
}

// TestReadOnlyTroubles: the right check sees each trouble.
func TestReadOnlyTroubles(t *testing.T) {
	for name, test := range map[string]trouble{
		"device nodes below the driver root only": {
			machine: "dgx-h100", flags: []string{"--dev-root=/"},
			wants: []want{
				{"roots.control-nodes", "nvidiactl", conformance.Differs, "in driver root"},
				{"roots.control-nodes", "nvidia-uvm", conformance.Differs, "in driver root"},
				{"roots.gpu-nodes", h100[0], conformance.Differs, "set host.devRoot of the chart to auto"},
			},
		},
		"files are missing": {
			machine: "dgx-h100",
			make: []func(*testing.T, *harness.Node){
				remove("dev/nvidia-uvm"), remove("proc/driver/nvidia/capabilities/mig/monitor"), remove("usr/bin/nvidia-smi"),
				withoutCUDA, withOldMPS,
			},
			wants: []want{
				{"roots.control-nodes", "nvidia-uvm", conformance.Differs, "nowhere"},
				{"roots.capabilities", "", conformance.Differs, "monitor"},
				{"roots.common-edits", "", conformance.Differs, "CDI spec"},
				{"driver.libcuda", "", conformance.Differs, "libcuda.so.1"},
				{"programs.nvidia-smi", "", conformance.Differs, "no nvidia-smi"},
				{"programs.mps-control", "", conformance.NotTestable, "does not name -multiuser-server"},
			},
		},
		"GPUs": {
			machine: "dgx-h100",
			before: func(m *machine.Machine) {
				m.GPUs[0].Failure = 15
				m.GPUs[1].Persistence = false
				m.GPUs[1].Health.Fabric.State = 2 // in progress
				m.GPUs[2].ComputeMode = 2
				m.GPUs[3].ComputeMode = 3
				m.Processes = append(m.Processes, machine.Process{PID: 1 << 22, Name: "train", GPU: 4, InstanceID: -1, ComputeID: -1})
				m.GPUs[6].MemoryBytes -= 1 << 30
				m.GPUs[6].MIG.Profiles[0].SMs--
				m.GPUs[7].ProductName = "NVIDIA X"
			},
			make: []func(*testing.T, *harness.Node){hold("dev/nvidia5")},
			wants: []want{
				{"driver.gpus", h100[0], conformance.Differs, "lost"},
				{"driver.persistence", h100[1], conformance.Differs, "off"},
				{"modes.fabric", h100[1], conformance.Differs, "In Progress"},
				{"modes.compute", h100[2], conformance.Differs, "PROHIBITED"},
				{"modes.compute", h100[3], conformance.NotTestable, "the MPS supervisor does not say whose"},
				{"holders.listed", h100[4], conformance.Differs, "4194304"},
				{"holders.others", h100[5], conformance.Differs, fmt.Sprintf("(%d)", os.Getpid())},
				{"hardware.product", h100[6], conformance.Differs, "memoryMiB 80535, in the catalogue 81559 (measured)"},
				{"hardware.profiles", h100[6], conformance.Differs, "1g.10gb sms 15, in the catalogue 16 (measured)"},
				{"hardware.product", h100[7], conformance.NotTestable, "no NVIDIA X"},
			},
		},
		"a mode that waits for a reset": {
			machine: "dgx-a100", before: func(m *machine.Machine) { m.GPUs[0].MIG.Pending = true },
			wants: []want{{"modes.mig", "0000:07:00.0", conformance.Differs, "off, on after a reset"}},
		},
		"MIG mode that should not be possible": {
			machine: "gh200-144x1", before: func(m *machine.Machine) {
				m.CoherentMemory = machine.CoherentDriver
				m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true
			},
			wants: []want{{"modes.coherent-memory", "0000:11:00.0", conformance.Differs, "please report that it works"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			changes := []func(*machine.Machine){persistent}
			if test.before != nil {
				changes = append(changes, test.before)
			}
			n := harness.NewNode(t, test.machine, changes...)
			for _, f := range test.make {
				f(t, n)
			}
			report, code := examine(t, n, test.flags...)
			for _, w := range test.wants {
				r := result(t, report, w.check, w.subject)
				if r.Verdict != w.verdict || !strings.Contains(r.Observed+r.Reason, w.text) {
					t.Errorf("got %+v, want %q with %q", r, w.verdict, w.text)
				}
			}
			expect.Equal(t, code, conformance.ExitDiffers, "exit code")
		})
	}
}

func withoutCUDA(t *testing.T, n *harness.Node) {
	t.Helper()
	removeFile(t, filepath.Join(sysroot.LibraryDir(n.Root), "libcuda.so.1"))
}

// withOldMPS puts a program in place that knows less.
func withOldMPS(t *testing.T, n *harness.Node) {
	t.Helper()
	program := filepath.Join(n.Root, "usr/bin/nvidia-cuda-mps-control")
	removeFile(t, program)
	must.Do(t, os.WriteFile(program, []byte("#!/bin/sh\necho -f\n"), 0o755))
}

func remove(path string) func(*testing.T, *harness.Node) {
	return func(t *testing.T, n *harness.Node) {
		t.Helper()
		removeFile(t, filepath.Join(n.Root, path))
	}
}

func removeFile(t *testing.T, path string) {
	t.Helper()
	must.Do(t, os.Remove(path))
}

// hold keeps a node open in this process. No kernel driver is behind it, so that it is
// opened as a path only.
func hold(path string) func(*testing.T, *harness.Node) {
	return func(t *testing.T, n *harness.Node) {
		t.Helper()
		fd := must.Get(unix.Open(filepath.Join(n.Root, path), unix.O_PATH|unix.O_CLOEXEC, 0))(t)
		t.Cleanup(func() { _ = unix.Close(fd) })
	}
}

// TestReadOnlyHang: a driver that does not answer makes nothing hang.
func TestReadOnlyHang(t *testing.T) {
	for name, test := range map[string]struct{ function, check, subject string }{
		"the library": {"nvmlInitWithFlags", "driver.nvml", ""},
		"a function":  {"nvmlDeviceGetPersistenceMode", "driver.persistence", h100[0]},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, "dgx-h100", persistent, func(m *machine.Machine) {
				m.Faults = append(m.Faults, machine.Fault{ID: 1, Function: test.function, GPU: -1, Hang: true, Effect: machine.Proceed})
			})
			report, code := examine(t, n, "--limit=2s")
			r := result(t, report, test.check, test.subject)
			if r.Verdict != conformance.NotTestable || !strings.Contains(r.Reason, "no answer in ") {
				t.Errorf("got %+v", r)
			}
			expect.Equal(t, code, 2-min(report.Summary.Differs, 1), "exit code")
		})
	}
}

// TestReplay: a transcript gives the same report and the same patch as the run that wrote
// it, also where the machine is gone.
func TestReplay(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "mixed")
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	live, code := examine(t, n, "--transcript="+path("t"), "--catalogue-patch="+path("live"))
	remove("proc")(t, n)
	must.Do(t, os.MkdirAll(filepath.Join(n.Root, "proc"), 0o755))
	replayed, again := examine(t, n, "--replay="+path("t"), "--catalogue-patch="+path("replayed"))
	if diff := cmp.Diff(text(t, live.WriteTable), text(t, replayed.WriteTable)); diff != "" || code != again {
		t.Errorf("exit codes %d and %d (-live +replayed):\n%s", code, again, diff)
	}
	expect.Same(t, read(t, path("replayed")), read(t, path("live")), "replayed")
}

func text(t *testing.T, write func(io.Writer) error) string {
	t.Helper()
	var out bytes.Buffer
	must.Do(t, write(&out))
	return out.String()
}

func read(t *testing.T, path string) string {
	t.Helper()
	content := must.Get(os.ReadFile(path))(t)
	return string(content)
}

// aNode has the answers of an ordinary node, instead of those of the machine on which the
// tests run.
var aNode = map[string]any{
	"program of process 1":                 "systemd",
	"kernel release":                       "6.8.0-45-generic",
	"cgroup v2":                            true,
	"SELinux":                              map[string]any{"Enforcing": true, "Context": ""},
	"Node object":                          conformance.NodeInfo{Runtime: "containerd://2.1.4", UserNamespaces: []string{"", "runc"}},
	"most user namespaces":                 "96365",
	"limits of open files":                 map[string]any{"Soft": 1024, "Hard": 524288, "Raise": true, "Most": 1048576},
	"folder for CDI specs":                 "/var/run/cdi",
	"socket of NRI":                        true,
	"processes with GPU 0000:17:00.0 open": []map[string]any{{"PID": 4711, "Name": "dcgm-exporter"}, {"PID": 812, "Name": "nvidia-persiste", "Harmless": true}},
	"processes with GPU 0000:31:00.0 open": []any{},
	"processes with GPU 0000:4b:00.0 open": []any{},
	"processes with GPU 0000:b1:00.0 open": []any{},
	"processes with GPU 0000:ca:00.0 open": []any{},
}

// TestRecord writes the transcript of a machine with troubles:
// go test ./test/flow/conformance -run TestRecord -record && go test ./pkg/conformance -update
func TestRecord(t *testing.T) {
	if !*record {
		t.Skip("without -record")
	}
	n := harness.NewNode(t, "mixed", persistent, func(m *machine.Machine) {
		m.GPUs[0].Persistence = false
		m.GPUs[1].ComputeMode = 2
		m.GPUs[2].MIG.Pending = true
		m.GPUs[3].Failure = 15
		m.GPUs[4].MemoryBytes -= 1 << 30
	})
	recorded := filepath.Join(t.TempDir(), "transcript")
	examine(t, n, "--transcript="+recorded)

	// The folder of the machine is another one each time.
	lines := strings.Split(strings.TrimSpace(strings.ReplaceAll(read(t, recorded), filepath.Dir(n.Root), "/simulated")), "\n")
	header := conformance.Header{Transcript: 1, Version: "v0.1.0", Node: "node-1", Time: "2026-01-02T03:04:05Z", Parts: []conformance.Part{conformance.ReadOnly}}
	out := []string{encode(t, header)}
	for _, line := range lines[1:] {
		var entry conformance.Entry
		must.Do(t, json.Unmarshal([]byte(line), &entry))
		if answer, ok := aNode[entry.Question]; ok {
			entry.Answer, entry.Failure = json.RawMessage(encode(t, answer)), nil
			line = encode(t, entry)
		}
		out = append(out, line)
	}
	must.Do(t, os.WriteFile("../../../pkg/conformance/testdata/simulated.jsonl", []byte(strings.Join(out, "\n")+"\n"), 0o600))
}

func encode(t *testing.T, value any) string {
	t.Helper()
	data := must.Get(json.Marshal(value))(t)
	return string(data)
}
