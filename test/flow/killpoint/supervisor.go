// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package killpoint

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrForbidden means that this machine does not let programs be supervised: its
// kernel is too old, or whatever this process runs in forbids seccomp.
var ErrForbidden = errors.New("the kernel does not allow a seccomp filter with a listener here")

// Supervisor watches one program. Its methods may be called concurrently.
type Supervisor struct {
	listener int
	process  *os.Process
	ended    chan struct{}

	mu       sync.Mutex
	counting bool
	killAt   int
	counts   func(Effect) bool // nil: all
	killed   bool
	effects  []Effect
}

// Start starts a command under supervision. Its effects are let through and not
// counted until Arm is called. The command's fields must be complete and its
// process is waited for as usual; the process is the program itself.
//
// The program that calls it must call LaunchIfAsked when it starts. The error
// wraps ErrForbidden where this cannot work.
func Start(cmd *exec.Cmd) (*Supervisor, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "supervisor"), os.NewFile(uintptr(pair[1]), "launcher")
	defer func() { _ = ours.Close() }()

	self, err := os.Executable()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("find the launcher: %w", err), theirs.Close())
	}
	const firstExtraFile = 3
	number := strconv.Itoa(firstExtraFile + len(cmd.ExtraFiles))
	cmd.Args = append([]string{self, cmd.Path}, cmd.Args...)
	cmd.Path = self
	cmd.Env = append(slices.Clip(cmd.Environ()), socketVariable+"="+number)
	cmd.ExtraFiles = append(slices.Clip(cmd.ExtraFiles), theirs)
	err = cmd.Start()
	// Without our copy, reading fails when the launcher is gone.
	if err := errors.Join(err, theirs.Close()); err != nil {
		return nil, err
	}
	listener, err := receive(pair[0])
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), ignoreExit(cmd.Wait()))
	}
	s := &Supervisor{listener: listener, process: cmd.Process, ended: make(chan struct{})}
	go s.serve()
	return s, nil
}

func ignoreExit(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil
	}
	return err
}

// receive waits for the listener.
func receive(socket int) (int, error) {
	text, rights := make([]byte, 16), make([]byte, unix.CmsgSpace(4))
	n, rightsLength, _, _, err := unix.Recvmsg(socket, text, rights, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("receive the listener: %w", err)
	}
	code, err := strconv.Atoi(string(text[:n]))
	if err != nil {
		return 0, fmt.Errorf("the launcher ended early: %w", err)
	}
	if code != 0 {
		return 0, fmt.Errorf("%w: %w", ErrForbidden, syscall.Errno(code))
	}
	messages, err := unix.ParseSocketControlMessage(rights[:rightsLength])
	if err != nil || len(messages) != 1 {
		return 0, fmt.Errorf("the launcher sent %d control messages: %w", len(messages), err)
	}
	files, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return 0, fmt.Errorf("the launcher sent no listener: %w", err)
	}
	return files[0], nil
}

// Arm begins to count effects. The program is killed instead of the nth from
// now; with 0 it is not killed.
func (s *Supervisor) Arm(n int) { s.ArmFor(n, nil) }

// ArmFor is Arm for some effects. The others are let through and not counted.
func (s *Supervisor) ArmFor(n int, counts func(Effect) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counting, s.killAt, s.counts, s.effects = true, n, counts, nil
}

// Disarm stops counting and returns the effects since Arm, the one that was
// prevented included, and whether the program was killed by that.
func (s *Supervisor) Disarm() (effects []Effect, killed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counting = false
	return slices.Clone(s.effects), s.killed
}

// Ended is closed when the program and all its children are gone.
func (s *Supervisor) Ended() <-chan struct{} { return s.ended }

// notification is struct seccomp_notif.
type notification struct {
	id        uint64
	thread    uint32
	_         uint32
	number    int32
	_         uint32
	_         uint64
	arguments [6]uint64
}

// response is struct seccomp_notif_resp.
type response struct {
	id    uint64
	_     int64
	_     int32
	flags uint32
}

// serve answers until no process has the filter any more.
func (s *Supervisor) serve() {
	defer close(s.ended)
	defer func() { _ = unix.Close(s.listener) }()
	poll := []unix.PollFd{{Fd: int32(s.listener), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(poll, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		if poll[0].Revents&unix.POLLIN == 0 {
			if poll[0].Revents != 0 {
				return
			}
			continue
		}
		n := &notification{}
		// It fails for a thread that has gone, or was interrupted, in between.
		if control(s.listener, unix.SECCOMP_IOCTL_NOTIF_RECV, n) == nil && s.passes(n) {
			_ = control(s.listener, unix.SECCOMP_IOCTL_NOTIF_SEND, &response{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE})
		}
	}
}

// passes decides about one call. A program that is being killed gets no answer
// any more, so that none of its threads goes on. Its children do.
func (s *Supervisor) passes(n *notification) bool {
	if !s.own(n.thread) {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.killed || !s.counting {
		return !s.killed
	}
	effect, counts := describe(n)
	if !counts || s.counts != nil && !s.counts(effect) {
		return true
	}
	s.effects = append(s.effects, effect)
	if len(s.effects) != s.killAt {
		return true
	}
	s.killed = true
	// It fails only for a process that has ended by itself.
	_ = s.process.Kill()
	return false
}

// own tells a thread of the program from one of its children, which have the
// filter as well. A thread that has just died may pass for a child's: it does not
// go on with any answer.
func (s *Supervisor) own(thread uint32) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", s.process.Pid, thread))
	return err == nil
}

// control is the ioctl that takes a structure of this type.
func control[T notification | response](fd int, request uintptr, argument *T) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(argument))) //nolint:gosec // the type has the kernel's layout
		if errno == 0 {
			return nil
		}
		if errno != unix.EINTR {
			return errno
		}
	}
}
