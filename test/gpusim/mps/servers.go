// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/partage-dev/partage/test/gpusim/cuda"
)

// serverProcess is a server as its daemon sees it. Fields after mu are guarded by
// it, the others by the daemon's lock or by nothing.
type serverProcess struct {
	uid, pid int
	process  *os.Process
	link     *link
	ready    bool
	retiring bool
	ended    chan struct{} // closed when it is

	mu      sync.Mutex
	next    int
	answers map[int]chan string
}

// program is a new CUDA program, or a start_server. Its server is there, is
// started, or has to wait for that of another user to lose its clients.
func (d *Daemon) program(w waiter) {
	if d.multiUser {
		w.uid = os.Geteuid()
	}
	if w.conn != nil && d.quitting {
		refuse(w)
		return
	}
	if s := d.server; w.conn != nil {
		if s != nil && s.uid == w.uid && s.ready && !s.retiring {
			d.log.printf("NEW CLIENT %d from user %d: Server already exists", w.pid, w.uid)
		} else {
			d.log.printf("NEW CLIENT %d from user %d: Server is not ready, push client to pending list", w.pid, w.uid)
		}
	}
	d.waiting = append(d.waiting, w)
	d.schedule()
}

// schedule does for those that wait what can be done now, in their order.
func (d *Daemon) schedule() {
	for len(d.waiting) > 0 {
		w, s := d.waiting[0], d.server
		switch {
		case s == nil:
			if err := d.start(w.uid); err != nil {
				d.log.printf("Failed to start a server for user %d: %v", w.uid, err)
				d.failed(w.uid)
				continue
			}
			return
		case s.uid != w.uid:
			if !s.retiring {
				s.retiring = true
				d.log.printf("Server %d is asked to exit when its clients have: user %d waits", s.pid, w.uid)
				_ = s.link.send(order{Op: "retire"}, nil)
			}
			return
		case s.retiring || !s.ready && w.conn != nil:
			return
		}
		if w.conn != nil {
			if err := s.link.send(order{Op: "client", PID: w.pid, UID: w.uid, Priority: d.priority, Priorities: d.priorities}, w.conn); err != nil {
				s.retiring = true // it is dead: reap comes, and then the next server
				return
			}
			_ = w.conn.Close() // the server has it
		}
		d.waiting = d.waiting[1:]
	}
}

// failed turns away all that waited for a server of the user.
func (d *Daemon) failed(uid int) {
	d.waiting = slices.DeleteFunc(d.waiting, func(w waiter) bool {
		if w.uid != uid {
			return false
		}
		refuse(w)
		return true
	})
}

func refuse(w waiter) {
	if w.conn == nil {
		return
	}
	_ = json.NewEncoder(w.conn).Encode(welcome{Code: cuda.MPSConnectionFailed})
	_ = w.conn.Close()
}

// start starts a server with the present defaults.
func (d *Daemon) start(uid int) error {
	if uid != os.Geteuid() && os.Geteuid() != 0 {
		return fmt.Errorf("the daemon is not root and cannot start a server of another user")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	l, theirs, err := linkPair()
	if err != nil {
		return err
	}
	defer theirs.Close()
	cmd := exec.Command(filepath.Join(filepath.Dir(self), serverProgram)) //nolint:noctx // it outlives everything here
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		l.close()
		return err
	}
	s := &serverProcess{
		uid: uid, pid: cmd.Process.Pid, process: cmd.Process, link: l,
		ended: make(chan struct{}), answers: map[int]chan string{},
	}
	d.log.printf("Starting new server %d for user %d", s.pid, uid)
	d.server = s
	_ = l.send(order{Op: "config", Config: &config{uid, d.multiUser, d.percentage, d.memory}}, nil)
	go d.listenTo(s)
	go d.reap(s, cmd)
	return nil
}

// listenTo takes what a server says.
func (d *Daemon) listenTo(s *serverProcess) {
	for {
		var a answer
		if _, err := s.link.receive(&a); err != nil {
			return
		}
		if a.ID == 0 {
			d.mu.Lock()
			d.log.printf("NEW SERVER %d: Ready", s.pid)
			s.ready = true
			d.schedule()
			d.mu.Unlock()
			continue
		}
		s.mu.Lock()
		if reply, ok := s.answers[a.ID]; ok {
			reply <- a.Text
			delete(s.answers, a.ID)
		}
		s.mu.Unlock()
	}
}

// reap waits for the end of a server.
func (d *Daemon) reap(s *serverProcess, cmd *exec.Cmd) {
	err := cmd.Wait()
	s.link.close()
	d.mu.Lock()
	defer d.mu.Unlock()
	if code := cmd.ProcessState.ExitCode(); code >= 0 {
		d.log.printf("Server %d exited with status %d", s.pid, code)
	} else {
		d.log.printf("Server %d ended: %v", s.pid, err)
	}
	d.server = nil
	close(s.ended)
	if !s.ready && !s.retiring {
		d.failed(s.uid) // another try would not be better
	}
	d.schedule()
}

// ask gives a server an order and waits for the answer. It fails when the server
// ends before that.
func (s *serverProcess) ask(o order) (string, error) {
	reply := make(chan string, 1)
	s.mu.Lock()
	s.next++
	o.ID = s.next
	s.answers[o.ID] = reply
	s.mu.Unlock()
	if err := s.link.send(o, nil); err != nil {
		return "", fmt.Errorf("server %d: %w", s.pid, err)
	}
	select {
	case text := <-reply:
		return text, nil
	case <-s.ended:
		return "", fmt.Errorf("server %d ended", s.pid)
	}
}

// grace is how long a server has to end when it is told to at once.
const grace = time.Second

// end waits for the server's end after it was told to: until its clients have
// gone, or, forced, after the timeout.
func (s *serverProcess) end(force bool, timeout time.Duration) {
	_ = s.link.send(order{Op: "retire"}, nil)
	if !force {
		<-s.ended
		return
	}
	select {
	case <-s.ended:
		return
	case <-time.After(timeout):
	}
	_ = s.link.send(order{Op: "exit"}, nil)
	select {
	case <-s.ended:
	case <-time.After(grace):
		_ = s.process.Kill()
		<-s.ended
	}
}

// quit ends the servers and then the daemon.
func (d *Daemon) quit(force bool, timeout time.Duration) {
	d.mu.Lock()
	d.quitting = true
	for _, w := range d.waiting {
		refuse(w)
	}
	d.waiting = nil
	s := d.server
	if s != nil {
		s.retiring = true
	}
	d.mu.Unlock()
	if s != nil {
		s.end(force, timeout)
	}
	d.release()
}
