// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/test/must"
)

// bundle makes what a runtime makes for a container with these variables.
func bundle(t *testing.T, env ...string) string {
	t.Helper()
	return bundleWith(t, nil, env...)
}

func bundleWith(t *testing.T, mounts []mount, env ...string) string {
	t.Helper()
	dir := t.TempDir()
	config := map[string]any{
		"ociVersion": "1.2.1",
		"process":    map[string]any{"terminal": false, "args": []string{"sh"}, "env": append([]string{"PATH=/bin"}, env...), "cwd": "/"},
		"root":       map[string]any{"path": "rootfs"},
		"mounts":     append([]mount{{"proc", "/proc"}}, mounts...),
	}
	data, err := json.Marshal(config)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// input is what runc and crun write to a hook.
func input(bundle string) string {
	return fmt.Sprintf(`{"ociVersion":"1.2.1","id":"c0ffee","status":"creating","pid":4711,"bundle":%q,"annotations":{"a":"b"}}`, bundle)
}

// session is a folder of a session, gpu-0, with the socket that containers get.
type session struct {
	*testing.T

	folder, control string
}

func newSession(t *testing.T) *session {
	t.Helper()
	dir := must.Get(os.MkdirTemp("/tmp", "hook"))(t) // t.TempDir's may be too long
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &session{T: t, folder: filepath.Join(dir, "gpu-0")}
	s.control = filepath.Join(s.folder, "pipe/client/control")
	must.Do(t, os.MkdirAll(filepath.Dir(s.control), 0o755))
	return s
}

// listen makes this process listen, unless network is empty.
func (s *session) listen(network string) *session {
	s.Helper()
	if network == "" {
		return s
	}
	listener, err := net.Listen(network, s.control)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = listener.Close() })
	return s
}

// record writes what the supervisor does, about the present socket.
func (s *session) record(change func(*daemonRecord)) *session {
	s.Helper()
	self, err := process.Identify(os.Getpid())
	if err != nil {
		s.Fatal(err)
	}
	r := daemonRecord{Daemon: &self, Sockets: map[string]process.Socket{}}
	if socket, err := process.IdentifySocket(s.folder, "pipe/client/control"); err == nil {
		r.Sockets["control"] = socket
	}
	if change != nil {
		change(&r)
	}
	data, err := json.Marshal(r)
	if err == nil {
		err = os.WriteFile(filepath.Join(s.folder, "session.json"), data, 0o600)
	}
	if err != nil {
		s.Fatal(err)
	}
	return s
}

// check is what the hook of a container does.
func (s *session) check(env ...string) error {
	s.Helper()
	return CheckMPSClient(s.Context(), strings.NewReader(input(bundleWith(s.T, []mount{{filepath.Dir(s.control), MPSFolder}}, env...))), s.control, "gpu-0")
}

func TestMPSClient(t *testing.T) {
	for name, test := range map[string]struct {
		env     []string
		network string
		want    []string // in the error; none if it is empty
	}{
		"reached":             {[]string{"PARTAGE_MPS_12ab34cd=gpu-0"}, "unixpacket", nil},
		"by a stream":         {[]string{"PARTAGE_MPS_12ab34cd=gpu-0"}, "unix", nil},
		"the same twice":      {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_MPS_12ab34cd=gpu-0"}, "unixpacket", nil},
		"without a marker":    {nil, "unixpacket", nil},
		"two of one GPU":      {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_MPS_ffffffff=gpu-0"}, "unixpacket", []string{"2 MPS shares, of gpu-0:", "one MPS share only", "with the sum"}},
		"and a GPU":           {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_GPU_12ab34cd=gpu-1"}, "unixpacket", []string{"client of the MPS session gpu-0", "also has gpu-1:", "different containers"}},
		"and a limited share": {[]string{"PARTAGE_MPS_12ab34cd=gpu-0", "PARTAGE_LIMITS_12ab34cd=gpu-1", "PARTAGE_GPU_12ab34cd=gpu-2"}, "unixpacket", []string{"also has gpu-1, gpu-2:"}},
		"two GPUs":            {[]string{"PARTAGE_MPS_12ab34cd=gpu-1", "PARTAGE_MPS_ffffffff=gpu-0"}, "unixpacket", []string{"of gpu-0, gpu-1:"}},
		"no daemon":           {[]string{"PARTAGE_MPS_12ab34cd=gpu-0"}, "", []string{"session gpu-0 cannot be reached", "/control", "without its limits", "mps-supervisor"}},
		"two, no daemon":      {[]string{"PARTAGE_MPS_12ab34cd=gpu-1", "PARTAGE_MPS_ffffffff=gpu-0"}, "", []string{"one MPS share only"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := newSession(t).listen(test.network).record(nil).check(test.env...)
			if len(test.want) == 0 && err != nil {
				t.Errorf("got %v", err)
			}
			for _, want := range test.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q", err, want)
				}
			}
		})
	}
}

// TestVolumeOverDaemon: a volume of the pod that hides the daemon's socket is refused; one beside it, or below the daemon's
// mount, is not.
func TestVolumeOverDaemon(t *testing.T) {
	t.Parallel()
	s := newSession(t).listen("unixpacket").record(nil)
	ours := mount{filepath.Dir(s.control), "/tmp/nvidia-mps"}
	for name, test := range map[string]struct {
		mounts []mount
		over   string
	}{
		"none":                  {[]mount{ours}, ""},
		"before it":             {[]mount{{"/v", "/tmp/nvidia-mps/"}, {"/v", "/tmp"}, ours}, ""},
		"beside it":             {[]mount{ours, {"/v", "/tmp/nvidia-mps2"}, {"/v", "/tmp/other"}}, ""},
		"at its folder":         {[]mount{ours, {"/v", "/tmp/nvidia-mps/"}}, "/tmp/nvidia-mps/"},
		"nothing":               {nil, "-"},
		"in place of it":        {[]mount{{"/v", "/tmp/nvidia-mps"}}, "/tmp/nvidia-mps"},
		"at its socket":         {[]mount{ours, {"/dev/null", "/tmp/nvidia-mps/control"}}, "/tmp/nvidia-mps/control"},
		"above it":              {[]mount{ours, {"/v", "/tmp/"}}, "/tmp/"},
		"at the root":           {[]mount{ours, {"/v", "/"}}, "/"},
		"and ours over that":    {[]mount{ours, {"/v", "/tmp"}, ours}, ""},
		"another daemon's pipe": {[]mount{ours, {filepath.Dir(s.control) + "2", "/tmp/nvidia-mps"}}, "/tmp/nvidia-mps"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := bundleWith(t, test.mounts, "PARTAGE_MPS_12ab34cd=gpu-0")
			err := CheckMPSClient(t.Context(), strings.NewReader(input(dir)), s.control, "gpu-0")
			want := "mount at " + quote.Text(test.over) + " that hides the socket"
			if test.over == "-" {
				want = "does not have the folder of the MPS daemon"
			}
			switch {
			case test.over == "" && err != nil:
				t.Error(err)
			case test.over != "" && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("got %v, want %q", err, want)
			}
		})
	}
}

// TestComesBack: a daemon that has just ended is given time.
func TestComesBack(t *testing.T) {
	s := newSession(t).record(func(r *daemonRecord) { r.Daemon = nil })
	back := make(chan struct{})
	time.AfterFunc(restartTime/8, func() {
		defer close(back)
		s.listen("unixpacket").record(nil)
	})
	if err := s.check(); err != nil {
		t.Error(err)
	}
	<-back
}

// TestSlowDisk: a daemon that came back while a look at its record took all the time is found.
func TestSlowDisk(t *testing.T) {
	t.Parallel()
	s := newSession(t)
	record := filepath.Join(s.folder, "session.json")
	must.Do(t, syscall.Mkfifo(record, 0o600))
	back := make(chan struct{})
	go func() {
		defer close(back)
		pipe, err := os.OpenFile(record, os.O_WRONLY, 0) // when it is looked at
		if err != nil {
			t.Error(err)
			return
		}
		<-time.After(restartTime + 100*time.Millisecond)
		if err := os.Remove(record); err != nil {
			t.Error(err)
		}
		s.listen("unixpacket").record(nil)
		_ = pipe.Close()
	}()
	if err := s.check(); err != nil {
		t.Error(err)
	}
	<-back
}

// TestWrongListener: no container starts on a socket that is not the daemon's.
func TestWrongListener(t *testing.T) {
	for name, test := range map[string]struct {
		make func(t *testing.T, s *session)
		want string
	}{
		"another process": {func(_ *testing.T, s *session) {
			s.listen("unixpacket").record(func(r *daemonRecord) { r.Daemon.PID = os.Getppid() })
		}, "PID " + strconv.Itoa(os.Getpid()) + " listens"},
		"a process with the PID of the daemon": {func(_ *testing.T, s *session) {
			s.listen("unixpacket").record(func(r *daemonRecord) { r.Daemon.Start-- })
		}, "listens, and the daemon is"},
		"another socket": {func(t *testing.T, s *session) {
			s.listen("unixpacket").record(nil)
			must.Do(t, os.Rename(s.control, s.control+".real"))
			s.listen("unixpacket")
		}, "inode"},
		"a symlink to the socket": {func(t *testing.T, s *session) {
			s.listen("unixpacket").record(nil)
			must.Do(t, errors.Join(os.Rename(s.control, s.control+".real"), os.Symlink("control.real", s.control)))
		}, "symbolic links"},
		"a symlink to the folder": {func(t *testing.T, s *session) {
			s.listen("unixpacket").record(nil)
			dir := filepath.Dir(s.control)
			must.Do(t, errors.Join(os.Rename(dir, dir+".real"), os.Symlink("client.real", dir)))
		}, "symbolic links"},
		"a file": {func(t *testing.T, s *session) {
			s.record(nil)
			must.Do(t, os.WriteFile(s.control, nil, 0o600))
		}, "is not a socket"},
		"no daemon": {func(_ *testing.T, s *session) {
			s.listen("unixpacket").record(func(r *daemonRecord) { r.Daemon = nil })
		}, "no daemon at the moment"},
		"no record": {func(_ *testing.T, s *session) { s.listen("unixpacket") }, "session.json"},
		"half of one": {func(t *testing.T, s *session) {
			s.listen("unixpacket")
			must.Do(t, os.WriteFile(filepath.Join(s.folder, "session.json"), []byte("{"), 0o600))
		}, "session.json"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSession(t)
			test.make(t, s)
			if err := s.check(); err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "session gpu-0 cannot be reached") {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// TestEarlierSupervisor: one that does not record sockets has the daemon recorded.
func TestEarlierSupervisor(t *testing.T) {
	s := newSession(t).listen("unixpacket").record(func(r *daemonRecord) { r.Sockets = nil })
	if err := s.check(); err != nil {
		t.Error(err)
	}
}

// TestUserNamespace: MPS does not work in one, and that should not be found out by the
// programs.
func TestUserNamespace(t *testing.T) {
	for name, test := range map[string]struct {
		namespaces []map[string]string
		refused    bool
	}{
		"of the pod": {[]map[string]string{{"type": "pid"}, {"type": "user", "path": "/proc/4711/ns/user"}}, true},
		"its own":    {[]map[string]string{{"type": "user"}, {"type": "mount"}}, true},
		"the host's": {[]map[string]string{{"type": "pid"}, {"type": "mount"}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSession(t).listen("unixpacket").record(nil)
			dir := bundleWith(t, []mount{{filepath.Dir(s.control), MPSFolder}}, "PARTAGE_MPS_12ab34cd=gpu-0")
			path := filepath.Join(dir, "config.json")
			var config map[string]any
			data, err := os.ReadFile(path)
			if err == nil {
				err = json.Unmarshal(data, &config)
			}
			config["linux"] = map[string]any{"namespaces": test.namespaces}
			if data, err2 := json.Marshal(config); errors.Join(err, err2) == nil {
				err = os.WriteFile(path, data, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			err = CheckMPSClient(t.Context(), strings.NewReader(input(dir)), s.control, "gpu-0")
			if (err != nil) != test.refused || err != nil && !strings.Contains(err.Error(), "hostUsers: false") {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestSocketElsewhere(t *testing.T) {
	for _, control := range []string{"/run/partage/mps/gpu-1/pipe/client/control", "/gpu-0", "gpu-0/x"} {
		err := CheckMPSClient(t.Context(), strings.NewReader(input(bundle(t))), control, "gpu-00")
		if err == nil || !strings.Contains(err.Error(), control) || !strings.Contains(err.Error(), "folder of that name") {
			t.Errorf("%s: got %v", control, err)
		}
	}
}
