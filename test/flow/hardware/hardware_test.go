// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/partage-dev/partage/pkg/conformance"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/must"
)

const aMachine = "h100-80-sxmx1"

// unchanged fails if the GPUs are not as before.
func unchanged(t *testing.T, n *harness.Node, before *machine.Machine) {
	t.Helper()
	after := n.Machine(t)
	if len(after.Processes) != len(before.Processes) {
		t.Errorf("processes before and after: %+v, %+v", before.Processes, after.Processes)
	}
	expect.Same(t, after.GPUs, before.GPUs, "the GPUs have changed")
}

// wants are what files of the archive have in them.
var wants = map[string][]string{
	"facts/nvidia-smi-q.txt":          {"NVSMI LOG", "GPU UUID                              : GPU-UUID-1"},
	"facts/mig-lgip.txt":              {"MIG 1g.10gb"},
	"facts/mig-lgipp.txt":             {"Placements: {0,1,2,3,4,5,6}:1"},
	"facts/compute-policy-l.txt":      {"Timeslice"},
	"facts/proc-driver-nvidia.txt":    {"== /proc/driver/nvidia/params", "/information", "capabilities/mig/monitor"},
	"facts/dev.txt":                   {"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm"},
	"facts/system.txt":                {"kernel Linux", "glibc 2."},
	"settings/nvidia-smi-q-after.txt": {"NVSMI LOG"},
	"settings/before.txt":             {"compute_mode                   Default", "mig.mode.current               Disabled"},
	"conformance/transcript.jsonl":    {`"question":"all GPUs"`},
	"conformance/report.txt":          {"holds         driver.nvml"},
	"conformance-mps/report.txt":      {"skipped       mps.ends", "skipped       mps.server-lost", "holds         mps.quit", " 2 skipped"},
	"conformance/patch.yaml":          {"name: h100-80-sxm"},
	"trials/control.log":              {"Starting new server"},
	"summary.txt":                     {"settings of the GPUs: as before"},
}

// trialWants are what the simulated MPS does, by trial.
var trialWants = map[string]string{
	"server":                  `status "ACTIVE"; a client: 132 multiprocessors`,
	"command client":          `get_server_list: "SERVER"`,
	"command client, own shm": `get_server_list: "SERVER"`,
	"memory 512M":             `get: "512M"`,
	"memory 1100M":            `get: "1G"; a client: 132 multiprocessors; took 586 MiB`,
	"memory 1536M":            `get: "1G"; a client: 132 multiprocessors; took 1022 MiB`,
	"memory 5G":               `get: "5G"; a client: 132 multiprocessors; took 4606 MiB`,
	"percentage 10":           `get: "10.0"; a client, of 132: 12 multiprocessors`,
	"percentage 25":           `get: "25.0"; a client, of 132: 32 multiprocessors`,
	"percentage 33":           `get: "33.0"; a client, of 132: 42 multiprocessors`,
	"percentage 50":           `get: "50.0"; a client, of 132: 66 multiprocessors`,
	"control alone":           "a client with the limits",
	"client, own shm":         "a client with the limits",
	"same PID twice":          "2 clients are listed; by their process IDs on the host: true, true; the first ends well, the second ends well",
	"uid 1000":                "a client with the limits",
	"absent device":           "0=512M,7=512M: 66 multiprocessors; took 2560 MiB",
	"idle client ends":        `the client ends well; server "ACTIVE"; the other client ends well; the next one ends well`,
	"idle client killed":      `the client was killed; server "ACTIVE"; the other client ends well; the next one ends well`,
	"terminate_client":        `CUDA_ERROR_MPS_CLIENT_TERMINATED; server "ACTIVE"; the other client ends well; the next one ends well`,
	"quit":                    "both ended with quit -t 1",
}

// TestRun: all steps are taken, the archive has what they saw and tells nobody which machine
// it was, and nothing is left.
func TestRun(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	before := n.Machine(t)
	r := script(t, n, bundleFolder(t))
	expect.Equal(t, r.finish(t, n, r.Run()), 0, "exit code")
	unchanged(t, n, before)
	files := r.archive(t)
	for name, texts := range wants {
		for _, text := range texts {
			expect.Contains(t, files[name], text, name)
		}
	}
	for name, want := range trialWants {
		line := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(fmt.Sprintf("%-24s ", name)) + `.*$`).FindString(files["trials/trials.txt"])
		expect.Contains(t, line, want, "trial", name)
	}
	expect.Equal(t, strings.Count(files["trials/trials.txt"], "\n"), len(trialWants), "trials")
	if all := fmt.Sprint(files); strings.Contains(all, "intrusive.") {
		t.Error("checks of --intrusive have run")
	}
	sameReports(t, files)
	noSecrets(t, files, n, before.GPUs[0].Serial)
}

// sameReports fails unless the redacted transcripts give what was seen on the machine.
func sameReports(t *testing.T, files map[string]string) {
	t.Helper()
	for _, step := range []string{"conformance", "conformance-mps"} {
		lines := strings.Split(strings.TrimSpace(files[step+"/report.txt"]), "\n")
		if want := lines[len(lines)-1]; !strings.Contains(files["summary.txt"], want) || !strings.Contains(want, " hold, ") {
			t.Errorf("the transcript of %s says %q, and the summary:\n%s", step, want, files["summary.txt"])
		}
		replayed, err := conformance.Replay(strings.NewReader(files[step+"/transcript.jsonl"]))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, result := range conformance.Run(t.Context(), replayed).Results {
			if strings.Contains(result.Reason, "the transcript does not have") {
				t.Errorf("%s: %s: %s", step, result.Check, result.Reason)
			}
		}
	}
}

// noSecrets fails if the archive tells where it was made.
func noSecrets(t *testing.T, files map[string]string, n *harness.Node, more ...string) {
	t.Helper()
	host := must.Get(os.Hostname())(t)
	secrets := append([]string{userName}, more...)
	if len(host) > 3 && host != "localhost" {
		secrets = append(secrets, host)
	}
	for _, g := range n.Machine(t).GPUs {
		secrets = append(secrets, g.UUID, strings.TrimPrefix(g.UUID, "GPU-"), g.Serial)
	}
	if len(files) == 0 {
		t.Error("there is no archive")
	}
	for name, text := range files {
		for _, secret := range secrets {
			if secret == "" {
				t.Fatal("a secret is empty")
			}
			if strings.Contains(strings.ToLower(text), strings.ToLower(secret)) {
				t.Errorf("%s has %q in it", name, secret)
			}
		}
	}
}

// train is a program of somebody who works on the machine.
var train = machine.Process{PID: 47114711, Name: "/opt/jobs/train-llm", GPU: 0, InstanceID: -1, ComputeID: -1, MemoryBytes: 1 << 30}

// TestRefused: where somebody works nothing is started, and --read-only only looks.
func TestRefused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*machine.Machine)
		driver bool
		want   string
	}{
		"MIG mode is on": {change: func(m *machine.Machine) { m.GPUs[0].MIG.Current, m.GPUs[0].MIG.Pending = true, true }, want: "MIG mode is on"},
		"MIG mode is going to be on": {
			change: func(m *machine.Machine) { m.GPUs[0].MIG.Pending = true }, want: "MIG mode is on (mig.mode.pending)",
		},
		"exclusive": {change: func(m *machine.Machine) { m.GPUs[0].ComputeMode = harness.ExclusiveProcess }, want: "compute mode is Exclusive_Process"},
		"processes": {change: func(m *machine.Machine) { m.Processes = append(m.Processes, train) }, want: "1 processes compute on it"},
		"a cluster": {driver: true, want: "a driver of a cluster keeps the GPUs"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := harness.NewNode(t, aMachine)
			if test.change != nil {
				n.Update(t, test.change)
			}
			var args []string
			if test.driver {
				must.Do(t, os.Mkdir(filepath.Join(n.PluginsDir, "gpu.nvidia.com"), 0o700))
				args = append(args, "--kubelet-plugins-dir="+n.PluginsDir)
			}
			before := n.Machine(t)
			r := script(t, n, bundleFolder(t), args...)
			if code := r.finish(t, n, r.Run()); code != 3 || !strings.Contains(r.output.String(), test.want) {
				t.Errorf("exit code %d, want 3 and %q", code, test.want)
			}
			if files := r.archive(t); files != nil {
				t.Errorf("there is an archive")
			}
			look := script(t, n, bundleFolder(t), append(args, "--read-only")...)
			expect.Equal(t, look.finish(t, n, look.Run()), 0, "--read-only: exit code")
			files := look.archive(t)
			if files["facts/nvidia-smi-q.txt"] == "" || files["conformance/report.txt"] == "" || files["trials/trials.txt"] != "" || files["conformance-mps/report.txt"] != "" {
				t.Errorf("--read-only: the archive has %d files", len(files))
			}
			noSecrets(t, files, n, "47114711", "train-llm")
			unchanged(t, n, before)
		})
	}
}

// TestOtherGPUInUse: with one of two GPUs free, no CUDA program takes anything of the other, not even one that
// does not reach MPS. The simulated GPU that is in use refuses such a program, which would be seen in the report.
func TestOtherGPUInUse(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, "h100-80-sxmx2", func(m *machine.Machine) {
		m.Processes = append(m.Processes, train)
		m.GPUs[0].ComputeMode = harness.ExclusiveProcess
	})
	before := n.Machine(t)
	r := script(t, n, bundleFolder(t))
	expect.Equal(t, r.finish(t, n, r.Run()), 0, "exit code")
	unchanged(t, n, before)
	if report := r.archive(t)["conformance-mps/report.txt"]; !strings.Contains(report, "holds         mps.without-daemon") {
		t.Errorf("a program without MPS did not run on the free GPU:\n%s", report)
	}
}

// TestChanged: a setting that is another one afterwards is said loudly, and is the exit code.
func TestChanged(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	gate := n.Inject(t, machine.Fault{Function: "mps_server_start", GPU: 0, Hang: true, Effect: machine.Proceed, Times: 1})
	r := script(t, n, bundleFolder(t))
	must.Do(t, r.Start())
	expect.Do(t, harness.Eventually(t.Context(), gate.CheckStruck))
	n.Update(t, func(m *machine.Machine) { m.GPUs[0].Persistence = !m.GPUs[0].Persistence })
	gate.Remove(t)
	expect.Equal(t, r.finish(t, n, r.Wait()), 1, "exit code")
	const want = `GPU 0: persistence_mode was "Disabled" and is "Enabled"`
	for where, text := range map[string]string{"output": r.output.String(), "summary": r.archive(t)["summary.txt"]} {
		if !strings.Contains(text, "THE SETTINGS OF A GPU ARE NOT AS BEFORE") || !strings.Contains(text, want) {
			t.Errorf("the %s lacks %q: %s", where, want, text)
		}
	}
}

// TestNotCompared: a setting that could not be read is not called the same, and the run is not finished.
func TestNotCompared(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	path := filepath.Join(n.Root, "usr/bin/nvidia-smi")
	must.Do(t, os.Rename(path, path+".real"))
	const killed = "#!/bin/bash\n[[ $* != 'mig -lgi' ]] || kill -9 $$\nexec \"$0.real\" \"$@\"\n"
	must.Do(t, os.WriteFile(path, []byte(killed), 0o755))
	r := script(t, n, bundleFolder(t), "--read-only")
	expect.Equal(t, r.finish(t, n, r.Run()), 2, "exit code")
	const want = "COULD NOT BE COMPARED with those before: GPU instances"
	for where, text := range map[string]string{"output": r.output.String(), "summary": r.archive(t)["summary.txt"]} {
		if !strings.Contains(text, want) || strings.Contains(text, "as before") {
			t.Errorf("the %s lacks %q: %s", where, want, text)
		}
	}
}

// TestInterrupted: a run that is asked to end ends MPS, compares and makes its archive.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	before := n.Machine(t)
	gate := n.Inject(t, machine.Fault{Function: "mps_client_connect", GPU: 0, Hang: true, Effect: machine.Proceed, Times: 1})
	r := script(t, n, bundleFolder(t))
	must.Do(t, r.Start())
	expect.Do(t, harness.Eventually(t.Context(), gate.CheckStruck))
	must.Do(t, r.Process.Signal(syscall.SIGTERM))
	expect.Equal(t, r.finish(t, n, r.Wait()), 2, "exit code")
	gate.Remove(t)
	files := r.archive(t)
	if !strings.Contains(files["summary.txt"], "settings of the GPUs: as before") || !strings.Contains(files["summary.txt"], "not finished in time") {
		t.Errorf("the summary: %s", files["summary.txt"])
	}
	n.Update(t, func(m *machine.Machine) { m.Faults = nil })
	unchanged(t, n, before)
}

// TestKilledStep: where the conformance command is killed, the server that it leaves does not stay.
func TestKilledStep(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	before := n.Machine(t)
	// Only the conformance command asks for that, long after its server has started.
	gate := n.Inject(t, machine.Fault{Function: "mps_get_default_client_priority", GPU: 0, Hang: true, Effect: machine.Proceed, Times: 1})
	r := script(t, n, bundleFolder(t))
	must.Do(t, r.Start())
	ctx, end := context.WithCancel(t.Context())
	var err error
	go func() { err = r.Wait(); end() }()
	for gate.CheckStruck() != nil { // much comes before it: on a busy machine that takes minutes
		must.Do(t, harness.Soon(ctx), "wait for the call while the run goes on")
	}
	expect.Do(t, syscall.Kill(r.find(t, "gpu-kubelet-plugin", "--mps"), syscall.SIGKILL))
	<-ctx.Done()
	if code := r.finish(t, n, err); code != 2 || !strings.Contains(r.output.String(), "conformance-mps: signal: killed") {
		t.Errorf("exit code %d, want 2", code)
	}
	gate.Remove(t)
	n.Update(t, func(m *machine.Machine) { m.Faults = nil })
	unchanged(t, n, before)
}

// TestMPSDoesNotStart: that is said of each trial, costs the time of one, and all else goes on.
func TestMPSDoesNotStart(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	n.Inject(t, machine.Fault{Function: "mps_control_start", GPU: 0, Effect: machine.Fail})
	before := n.Machine(t)
	r := script(t, n, bundleFolder(t))
	expect.Equal(t, r.finish(t, n, r.Run()), 0, "exit code")
	files := r.archive(t)
	const want = "could not be tried: MPS could not be started: the control daemon does not answer: it has ended: it printed"
	if got := strings.Count(files["trials/trials.txt"], want); got != len(trialWants)-1 { // all but quit
		t.Errorf("%d trials say that, want %d:\n%s", got, len(trialWants)-1, files["trials/trials.txt"])
	}
	expect.Contains(t, files["conformance-mps/report.txt"], "differs       mps.start", "the report")
	unchanged(t, n, before)
}

// TestWithoutRights: where nothing can be mounted, what needs that could not be tried, which is
// no failure.
func TestWithoutRights(t *testing.T) {
	t.Parallel()
	n := harness.NewNode(t, aMachine)
	before := n.Machine(t)
	r := script(t, n, bundleFolder(t))
	r.Args = append([]string{"setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", r.Path}, r.Args[1:]...)
	var err error
	if r.Path, err = exec.LookPath("setpriv"); err != nil {
		t.Skip(err)
	}
	expect.Equal(t, r.finish(t, n, r.Run()), 0, "exit code")
	unchanged(t, n, before)
	files := r.archive(t)
	for name, text := range map[string]string{
		"summary.txt":       "could not be tried: gpu-kubelet-plugin: make a mount namespace, for which root is needed",
		"trials/trials.txt": "command client, own shm  could not be tried: a mount namespace cannot be made",
	} {
		expect.Contains(t, files[name], text, name)
	}
	if text := files["trials/trials.txt"]; !strings.Contains(text, `command client           get_server_list: "SERVER"`) {
		t.Errorf("what needs no rights was not tried:\n%s", text)
	}
}
