// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/buildinfo"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/node/process"
)

// build makes the program as releases do.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-buildvcs=false")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return program
}

// machine has what the hook looks at: a daemon's socket and two bundles.
type machine struct {
	control, mpsClient, limited string
}

func newMachine(t *testing.T) machine {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "hook") // t.TempDir's is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	write := func(path, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	self, err := process.Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(dir, "gpu-0/session.json"), fmt.Sprintf(`{"daemon": {"pid": %d, "start": %d}}`, self.PID, self.Start))
	m := machine{control: filepath.Join(dir, "gpu-0/control"), mpsClient: filepath.Join(dir, "client"), limited: filepath.Join(dir, "limited")}
	listener, err := net.Listen("unixpacket", m.control)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	write(m.mpsClient+"/config.json", fmt.Sprintf(`{"process": {"env": ["PARTAGE_MPS_0=gpu-0"]}, "mounts": [{"source": %q, "destination": "/tmp/nvidia-mps"}]}`,
		filepath.Dir(m.control)))
	preload, library := filepath.Join(dir, "preload"), filepath.Join(dir, "library.so")
	write(preload, "/usr/local/vgpu/libvgpu.so\n")
	write(library, libraryHeader(t))
	write(m.limited+"/config.json", `{"process": {"env": ["PARTAGE_LIMITS_0=gpu-0"]}, "mounts": [`+
		`{"destination": "/usr/local/vgpu/libvgpu.so", "source": "`+library+`"}, {"destination": "/etc/ld.so.preload", "source": "`+preload+`"}]}`)
	return m
}

// libraryHeader is how a library for this machine begins.
func libraryHeader(t *testing.T) string {
	t.Helper()
	own, err := elf.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	var b strings.Builder
	h := elf.Header64{Type: uint16(elf.ET_DYN), Machine: uint16(own.Machine), Version: uint32(elf.EV_CURRENT)}
	copy(h.Ident[:], "\x7fELF\x02\x01\x01") // 64 bits, little endian, version 1
	if err := binary.Write(&b, binary.LittleEndian, h); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func state(bundle string) string { return fmt.Sprintf(`{"ociVersion": "1.2.0", "bundle": %q}`, bundle) }

// hostile is what an image or a pod could set. Some runtimes would give it to hooks.
var hostile = []string{
	"LOG_LEVEL=bogus", "HEALTH_PORT=x", "CHECK_INTERVAL=y", "LOGGING_FORMAT=z", "MPS_DIR=relative", "DRIVER_ROOT=",
	"CONTROL=/nowhere", "SESSION=another", "SOFTWARE_LIMITS=true", "PATH=",
	"LD_PRELOAD=/evil.so", "LD_LIBRARY_PATH=/evil", "LD_AUDIT=/evil.so", "GCONV_PATH=/evil", "LOCALDOMAIN=evil",
	"GODEBUG=netdns=go+9,inittrace=1,execerrdot=1,nonsense=1", "GOTRACEBACK=crash", "GOMAXPROCS=bogus", "GOGC=off", "GOMEMLIMIT=bogus",
	"HOME=/evil", "TMPDIR=/evil", "SSL_CERT_FILE=/evil",
}

// harmless is hostile without what the Go runtime itself obeys: with GODEBUG it prints
// more. GOMEMLIMIT ends every Go program, which is why specs give hooks an environment.
var (
	harmless = without(hostile, "GODEBUG=", "GOMEMLIMIT=")
	noisy    = without(hostile, "GOMEMLIMIT=")
)

func without(env []string, prefixes ...string) (kept []string) {
	for _, v := range env {
		keep := true
		for _, prefix := range prefixes {
			keep = keep && !strings.HasPrefix(v, prefix)
		}
		if keep {
			kept = append(kept, v)
		}
	}
	return kept
}

func TestProgram(t *testing.T) {
	program, m := build(t), newMachine(t)
	client := []string{"mps-client", "--control", m.control, "--session", "gpu-0"}
	const refused = 1
	for what, test := range map[string]struct {
		args  []string
		input string
		code  int
		want  []string // on stderr
	}{
		"MPS client":           {client, state(m.mpsClient), 0, nil},
		"software limits":      {[]string{"software-limits"}, state(m.limited), 0, nil},
		"unlimited":            {[]string{"software-limits"}, state(m.mpsClient), refused, []string{"without its limits"}},
		"no state":             {client, "", refused, []string{"container's state"}},
		"another state":        {client, `{"bundle": "../\u001b[2J"}`, refused, []string{`"../\x1b[2J"`}},
		"no daemon":            {[]string{"mps-client", "--control", filepath.Join(filepath.Dir(m.control), "none"), "--session", "gpu-0"}, state(m.mpsClient), refused, []string{"cannot be reached"}},
		"no command":           {nil, state(m.mpsClient), refused, []string{"no command is given: want one of mps-client, software-limits, memory-limit"}},
		"unknown command":      {[]string{"container-hook"}, state(m.mpsClient), refused, []string{`unknown command "container-hook": want one of`}},
		"odd command":          {[]string{"\x1b[2J\n" + strings.Repeat("x", 5000)}, "", refused, []string{`"\x1b[2J\n`, "…"}},
		"flag before":          {[]string{"--v=9", "software-limits"}, state(m.limited), refused, []string{`unknown command "--v=9"`}},
		"flag of another":      {[]string{"software-limits", "--control", m.control}, state(m.limited), refused, []string{"software-limits", "-control"}},
		"unknown flag":         {append(client, "--health-port=1"), state(m.mpsClient), refused, []string{"mps-client", "health-port"}},
		"odd flag":             {append(client, "--\x1b[2J\n"+strings.Repeat("x", 5000)), state(m.mpsClient), refused, []string{`\x1b[2J`, "…"}},
		"argument":             {append(client, "all"), state(m.mpsClient), refused, []string{`unknown argument "all"`}},
		"argument after limit": {[]string{"software-limits", "all"}, state(m.limited), refused, []string{`unknown argument "all"`}},
		"half of the flags":    {client[:3], state(m.mpsClient), refused, []string{"want --control and --session"}},
		"flag without a value": {client[:4], state(m.mpsClient), refused, []string{"session"}},
		"version and more":     {[]string{"version", "all"}, "", refused, []string{`unknown command "version"`}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			for _, env := range [][]string{nil, harmless} {
				code, stdout, stderr := start(t, program, env, test.input, test.args...)
				if code != test.code || stdout != "" {
					t.Errorf("with %q: exit code %d, stdout %q, stderr %q", env, code, stdout, stderr)
				}
				for _, want := range test.want {
					if !strings.Contains(stderr, want) {
						t.Errorf("stderr %q, want %q", stderr, want)
					}
				}
				lines := strings.Count(stderr, "\n")
				if lines != test.code || lines == 1 && !strings.HasPrefix(stderr, name+": ") || len(stderr) > 4000 || strings.Contains(stderr, "\x1b") {
					t.Errorf("stderr has %d bytes: %q", len(stderr), stderr)
				}
			}
			if code, _, stderr := start(t, program, noisy, test.input, test.args...); code != test.code {
				t.Errorf("with %q: exit code %d, stderr %q", noisy, code, stderr)
			}
		})
	}
}

// start runs the program with this environment only.
func start(t *testing.T, program string, env []string, input string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err strings.Builder
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Env = append([]string{}, env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &err
	_ = cmd.Run()
	return cmd.ProcessState.ExitCode(), out.String(), err.String()
}

func TestVersion(t *testing.T) {
	var stdout, stderr strings.Builder
	if code := run([]string{"version"}, nil, &stdout, &stderr); code != 0 || strings.Count(stdout.String(), "\n") != 1 || stderr.Len() > 0 {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout.String(), stderr.String())
	}
}

// TestStaticAndSmall: no loader that LD_PRELOAD could steer, no library of a container,
// and nothing in it that need not be there.
func TestStaticAndSmall(t *testing.T) {
	program := build(t)
	file, err := elf.Open(program)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	for _, p := range file.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("it is not static: it has a %v", p.Type)
		}
	}
	if info, err := os.Stat(program); err != nil || info.Size() > 4<<20 {
		t.Errorf("it has %d bytes, want 4 MiB at most: %v", info.Size(), err)
	}
	build, err := buildinfo.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range build.Deps {
		if d.Path != "golang.org/x/sys" {
			t.Errorf("it has the dependency %s", d.Path)
		}
	}
}
