// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

const (
	shim     = "/usr/bin/containerd-shim-runc-v2\x00-namespace\x00k8s.io\x00-id\x00abc\x00"
	refuse   = option + " = false\n"
	accept   = option + " = true\n"
	operator = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
	beside   = "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
	hookFile = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json"
)

// machine makes the proc file system of a host on which process 42 has started the
// container. Files are the host's; "runtime", "cmdline" and "environ" are the process's.
func machine(t *testing.T, files map[string]string) Starter {
	t.Helper()
	proc, root, bundle := t.TempDir(), t.TempDir(), t.TempDir()
	process := filepath.Join(proc, "42")
	must.Do(t, os.Mkdir(process, 0o755))
	for name, target := range map[string]string{"root": root, "cwd": bundle} {
		must.Do(t, os.Symlink(target, filepath.Join(process, name)))
	}
	for name, content := range files {
		path := filepath.Join(process, name)
		switch {
		case name == "runtime":
			path = filepath.Join(bundle, name)
		case filepath.IsAbs(name):
			path = filepath.Join(root, name)
		}
		must.Do(t, os.MkdirAll(filepath.Dir(path), 0o755))
		if target, link := strings.CutPrefix(content, "-> "); link {
			must.Do(t, os.Symlink(target, path))
			continue
		}
		must.Do(t, os.WriteFile(path, []byte(content), 0o644))
	}
	return Starter{Proc: proc, PID: 42}
}

// trusted is what the chart's policy takes.
var trusted = []string{"partage", "gpu-operator"}

func TestAccess(t *testing.T) {
	t.Parallel()
	const nvidia, crun = "/usr/bin/nvidia-container-runtime", "/usr/bin/conmon\x00-r\x00/usr/bin/crun\x00"
	const named = "/opt/nvidia-container-runtime/config.toml"
	// containerd starts a runtime on a host that has these files, by name and content.
	containerd := func(runtime string, more ...string) map[string]string {
		files := map[string]string{"cmdline": shim, "runtime": runtime}
		for i := 0; i < len(more); i += 2 {
			files[more[i]] = more[i+1]
		}
		return files
	}
	through := func(runtime, config string, accepts bool) Access {
		return Access{Runtime: runtime, Through: runtime, Config: config, Accepts: accepts}
	}
	handlers := func(config string, accepts bool, names ...string) Access {
		return Access{Runtime: "runc", Handlers: names, Config: config, Accepts: accepts}
	}
	for name, test := range map[string]struct {
		files    map[string]string
		handlers []string
		want     Access
		open     bool
	}{
		"containerd": {containerd("/usr/sbin/runc", systemConfig, accept), nil, Access{Runtime: "/usr/sbin/runc"}, false},
		"containerd with the runtime that it is built for": {containerd(""), nil, Access{Runtime: "runc"}, false},
		"NVIDIA's as installed":                            {containerd(nvidia), nil, through(nvidia, systemConfig, true), true},
		"a variant by name, with the option left out": {
			containerd("nvidia-container-runtime.cdi", systemConfig, "disable-require = true\n"), nil, through("nvidia-container-runtime.cdi", systemConfig, true), true,
		},
		"NVIDIA's that refuses": {containerd(nvidia, systemConfig, refuse), nil, through(nvidia, systemConfig, false), false},
		"the operator's: its own configuration counts": {
			containerd(operator, beside, accept, systemConfig, refuse), nil, through(operator, beside, true), true,
		},
		"the operator's that refuses": {containerd(operator, beside, refuse, systemConfig, accept), nil, through(operator, beside, false), false},
		"a configuration named by the environment": {containerd(nvidia, systemConfig, accept,
			"environ", "PATH=/bin\x00XDG_CONFIG_HOME=/srv\x00NVIDIA_CTK_CONFIG_FILE_PATH=/opt/config.toml\x00", "/opt/config.toml", refuse,
			"/srv/nvidia-container-runtime/config.toml", accept), nil, through(nvidia, "/opt/config.toml", false), false},
		"a folder of configurations named by the environment": {
			containerd(nvidia, systemConfig, accept, "environ", "XDG_CONFIG_HOME=/opt\x00", named, refuse), nil, through(nvidia, named, false), false,
		},
		"a link that is the host's": {
			containerd(nvidia, systemConfig, "-> /opt/nvidia.toml", "/opt/nvidia.toml", refuse), nil, through(nvidia, systemConfig, false), false,
		},
		"CRI-O": {
			map[string]string{"cmdline": "/usr/bin/conmon\x00-b\x00/run/x\x00-r\x00/usr/bin/crun\x00--runtime-arg\x00--root=/run/crun\x00"}, nil,
			Access{Runtime: "/usr/bin/crun"}, false,
		},
		"CRI-O with NVIDIA's": {map[string]string{"cmdline": "conmonrs\x00--runtime=" + nvidia + "\x00"}, nil, through(nvidia, systemConfig, true), true},
		"CRI-O with NVIDIA's hook": {map[string]string{
			"cmdline": crun, systemConfig: refuse, beside: accept,
			hookFile: `{"version": "1.0.0", "hook": {"path": "/usr/local/nvidia/toolkit/nvidia-container-runtime-hook"}, "when": {"always": true}, "stages": ["prestart"]}`,
			"/usr/share/containers/oci/hooks.d/a.json": `{"version": "1.0.0", "hook": {"path": "/usr/libexec/oci/other"}}`,
		}, nil, Access{Runtime: "/usr/bin/crun", Through: hookFile, Config: beside, Accepts: true}, true},
		"a hook that containerd does not read": {
			containerd("runc", hookFile, `{"hook": {"path": "/usr/bin/nvidia-container-runtime-hook"}}`), nil, Access{Runtime: "runc"}, false,
		},
		"a handler": {
			containerd("runc"), []string{"", "runc", "nvidia", "nvidia-cdi"}, handlers(systemConfig, true, "nvidia", "nvidia-cdi"), true,
		},
		"a handler that refuses": {containerd("runc", systemConfig, refuse), []string{"nvidia"}, handlers(systemConfig, false, "nvidia"), false},
		"a handler, one of two configurations accepts": {
			containerd("runc", beside, refuse, systemConfig, accept), []string{"nvidia"}, handlers(systemConfig, true, "nvidia"), true,
		},
		"other handlers": {containerd("runc", systemConfig, accept), []string{"", "runc", "kata"}, Access{Runtime: "runc"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := machine(t, test.files)
			s.Trusted, test.want.Trusted = trusted, trusted
			got, err := s.Access(append([]string{}, test.handlers...))
			if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
			if got.Open() != test.open || strings.Contains(got.Text(), "without a claim") != test.open {
				t.Errorf("open: %t, %s", got.Open(), got.Text())
			}
		})
	}
}

// TestInjector: NVIDIA's NRI plugin is found by its program, if it is told to be one and has the host's socket of the container runtime.
func TestInjector(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		cmdline, environ string
		// socket is where the process has the host's, and own one that it has made itself.
		socket, own string
		// circle is a symbolic link to itself.
		circle string
		want   bool
	}{
		"by a variable":      {cmdline: "nvidia-toolkit\x00--no-daemon=false\x00", environ: "A=b\x00ENABLE_NRI_PLUGIN=true\x00", socket: nriSocket, want: true},
		"by a flag":          {cmdline: "/work/nvidia-ctk-installer\x00--enable-nri-plugin\x00", environ: "A=b\x00", socket: nriSocket, want: true},
		"flags come first":   {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin=false\x00", environ: "ENABLE_NRI_PLUGIN=true\x00", socket: nriSocket},
		"another socket":     {cmdline: "nvidia-ctk-installer\x00--nri-socket\x00/nri.sock\x00", environ: "ENABLE_NRI_PLUGIN=1\x00", socket: "/nri.sock", want: true},
		"not told":           {cmdline: "nvidia-ctk-installer\x00", environ: "A=b\x00", socket: nriSocket},
		"another program":    {cmdline: "installer\x00--enable-nri-plugin\x00", environ: "A=b\x00", socket: nriSocket},
		"without the socket": {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin\x00", environ: "A=b\x00"},
		"that of a tenant":   {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin\x00", environ: "A=b\x00", own: nriSocket},
		"a thread":           {cmdline: "", environ: ""},
		// What it says of itself must not keep anything from being found out.
		"of a tenant, without variables": {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin\x00", environ: "", own: nriSocket},
		"of a tenant, in a circle":       {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin\x00--nri-socket=/x/s\x00", environ: "A=b\x00", circle: "/x"},
		"of a tenant, below a file":      {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin\x00--nri-socket=/x/s\x00", environ: "A=b\x00", own: "/x"},
		"without variables":              {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin\x00", environ: "", socket: nriSocket, want: true},
		"it hides its setting":           {cmdline: "nvidia-ctk-installer\x00--enable-nri-plugin=\x00", environ: "ENABLE_NRI_PLUGIN=yes\x00", socket: nriSocket},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := machine(t, map[string]string{"cmdline": shim, "runtime": "runc", nriSocket: "the host's"})
			process := machine(t, map[string]string{"cmdline": test.cmdline, "environ": test.environ})
			must.Do(t, os.Rename(filepath.Join(process.Proc, "42"), filepath.Join(s.Proc, "77")))
			put := func(path string, make func(path string) error) {
				if path == "" {
					return
				}
				at := filepath.Join(s.Proc, "77", "root", path)
				must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), make(at)))
			}
			put(test.socket, func(at string) error { return os.Link(filepath.Join(s.path("root"), nriSocket), at) })
			put(test.circle, func(at string) error { return os.Symlink(filepath.Base(at), at) })
			put(test.own, func(at string) error { return os.WriteFile(at, nil, 0o600) })
			got := must.Get(s.Access([]string{}))(t)
			if is := got.Injector == 77; is != test.want || got.Open() != test.want {
				t.Errorf("got %+v", got)
			}
			if strings.Contains(got.Text(), "process 77") != test.want {
				t.Errorf("it is told as %s", got.Text())
			}
			got.Trusted = trusted
			if got.Open() || strings.Contains(got.Text(), "partage, gpu-operator") != test.want {
				t.Errorf("where a policy refuses the annotations: %s", got.Text())
			}
		})
	}
}

// TestDoubt: what cannot be looked at is unknown, unless something else is open.
func TestDoubt(t *testing.T) {
	t.Parallel()
	const crio, nvidia = "conmon\x00-r\x00/usr/bin/crun\x00", "/usr/bin/nvidia-container-runtime"
	for name, test := range map[string]struct {
		files    map[string]string
		handlers []string
		trusted  []string
		want     string
		open     bool
	}{
		"CRI-O, no policy":                      {files: map[string]string{"cmdline": crio}, handlers: []string{}, want: "annotationPolicy"},
		"CRI-O with a policy":                   {files: map[string]string{"cmdline": crio}, handlers: []string{}, trusted: trusted},
		"NVIDIA's refuses variables, no policy": {files: map[string]string{"cmdline": shim, "runtime": nvidia, systemConfig: refuse}, handlers: []string{}, want: "annotationPolicy"},
		"a handler refuses, no policy":          {files: map[string]string{"cmdline": shim, "runtime": "runc", systemConfig: refuse}, handlers: []string{"nvidia"}, want: "annotationPolicy"},
		"CRI-O with NVIDIA's, no policy":        {files: map[string]string{"cmdline": "conmon\x00-r\x00" + nvidia + "\x00"}, handlers: []string{}, open: true},
		"handlers that nobody tells":            {files: map[string]string{"cmdline": shim, "runtime": "runc"}, trusted: trusted, want: "does not tell the kubelet"},
		"NVIDIA's, handlers that nobody tells":  {files: map[string]string{"cmdline": shim, "runtime": nvidia}, trusted: trusted, open: true},
		"containerd alone, no policy":           {files: map[string]string{"cmdline": shim, "runtime": "runc"}, handlers: []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := machine(t, test.files)
			s.Trusted = test.trusted
			got, err := s.Access(test.handlers)
			if got.Open() != test.open || (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("open %t, error %v, want %t and one with %q", got.Open(), err, test.open, test.want)
			}
		})
	}
}

// TestAccessFails: what cannot be found out is neither open nor closed.
func TestAccessFails(t *testing.T) {
	t.Parallel()
	nvidia := map[string]string{"cmdline": shim, "runtime": "/usr/bin/nvidia-container-runtime"}
	with := func(name, content string) map[string]string {
		files := map[string]string{name: content}
		for name, content := range nvidia {
			files[name] = content
		}
		return files
	}
	for name, test := range map[string]struct {
		files map[string]string
		want  string
	}{
		"no process":           {want: "find out what started this container: open"},
		"a kernel thread":      {files: map[string]string{"cmdline": ""}, want: "cmdline: it is empty"},
		"a shell":              {files: map[string]string{"cmdline": "/bin/bash\x00"}, want: "process 42 (bash): it is none of the programs"},
		"a shim without notes": {files: map[string]string{"cmdline": shim}, want: "process 42 (containerd-shim-runc-v2): open"},
		"a silent monitor":     {files: map[string]string{"cmdline": "conmon\x00-b\x00"}, want: "process 42 (conmon): its command line names no runtime"},
		"no TOML":              {files: with(systemConfig, "["), want: "in " + systemConfig},
		"another type":         {files: with(systemConfig, option+" = \"no\"\n"), want: option + " is no, want true or false"},
		"a damaged hook": {
			files: map[string]string{"cmdline": "conmon\x00-r\x00crun\x00", hookFile: "{"},
			want:  "read the hook " + hookFile,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := machine(t, test.files).Access([]string{})
			expect.Says(t, err, test.want, "found", got)
		})
	}
}
