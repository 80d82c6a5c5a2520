// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// Errors of a daemon's start, in the words of NVIDIA's program.
var (
	ErrNoDaemon = errors.New("Cannot find MPS control daemon process")        //nolint:staticcheck // these are
	ErrRunning  = errors.New("An instance of this daemon is already running") //nolint:staticcheck // its words
	errStart    = errors.New("MPS control daemon failed to start")            //nolint:staticcheck // and assumed
)

// DaemonOptions are the command line of a control daemon. All else it reads from
// the environment.
type DaemonOptions struct {
	// MultiUser is -multiuser-server.
	MultiUser bool
	// Log is where control.log goes as well, if it is not nil.
	Log io.Writer
}

// Daemon is a control daemon.
type Daemon struct {
	pipe      string
	log       *logger
	state     *state.File
	root      string // of the simulated machine
	boot      string
	multiUser bool
	// priorities says that clients have priorities at all.
	priorities bool
	// clients is the listener of programs, users the one of commands.
	clients, users *net.UnixListener
	lock, logPipe  *os.File
	ended          chan struct{}  // closed by release
	busy           sync.WaitGroup // commands

	mu         sync.Mutex
	percentage float64 // defaults of the next server
	memory     memoryLimits
	priority   priority       // of the next client
	server     *serverProcess // nil: none
	waiting    []waiter
	quitting   bool
	endOnce    sync.Once
}

// waiter wants a server of a user: a program, or the command start_server, which
// has no connection.
type waiter struct {
	uid, pid int
	conn     *net.UnixConn
}

// StartDaemon takes the pipe folder over and listens. Serve does the rest.
func StartDaemon(o DaemonOptions) (*Daemon, error) {
	at, err := state.Find()
	if err != nil {
		return nil, err
	}
	d := &Daemon{pipe: PipeDirectory(), root: at.Root, multiUser: o.MultiUser, percentage: 100, ended: make(chan struct{})}
	if err := d.defaults(); err != nil {
		return nil, err
	}
	if o.MultiUser && os.Geteuid() != 0 {
		return nil, errors.New("-multiuser-server needs root")
	}
	if d.state, err = state.Open(at.State); err != nil {
		return nil, err
	}
	if d.boot, err = d.state.BootID(); err != nil {
		return nil, err
	}
	if err := d.defaultPriority(); err != nil {
		return nil, err
	}
	err = d.state.Around(ControlStart, d.gpus(), func() error { return d.listen(o.Log) })
	switch {
	case errors.Is(err, state.ErrStruck):
		d.release()
		return nil, errStart
	case err != nil:
		return nil, err
	case d.clients == nil: // a fault pretends
		return nil, nil
	}
	return d, nil
}

// defaults takes those of servers from the environment.
func (d *Daemon) defaults() (err error) {
	if text := os.Getenv(PercentageVariable); text != "" {
		if d.percentage, err = parsePercentage(text); err != nil {
			return fmt.Errorf("%s: %w", PercentageVariable, err)
		}
	}
	d.memory, err = parseLimits(os.Getenv(MemoryVariable))
	return err
}

// gpus are the indexes of those that the daemon's servers use, for faults.
func (d *Daemon) gpus() []int {
	m, err := d.state.Snapshot()
	if err != nil {
		return nil
	}
	devices, _ := serverDevices(m, d.root)
	return gpusOf(devices)
}

func gpusOf(devices []cuda.Device) []int {
	var gpus []int
	for _, dev := range devices {
		gpus = append(gpus, dev.GPU)
	}
	return gpus
}

// listen makes the files of the pipe folder.
func (d *Daemon) listen(also io.Writer) (err error) {
	if err := os.Mkdir(d.pipe, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("pipe folder: %w", err)
	}
	if d.lock, err = os.OpenFile(filepath.Join(d.pipe, lockFile), os.O_CREATE|os.O_RDWR, 0o666); err != nil {
		return fmt.Errorf("pipe folder: %w", err)
	}
	if err := syscall.Flock(int(d.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = d.lock.Close()
		return ErrRunning
	}
	if d.log, err = openLog("Control", "control.log", also); err != nil {
		return err
	}
	socket := filepath.Join(d.pipe, controlSocket)
	d.log.printf("Starting control daemon using socket %s", socket)
	d.log.printf("To connect CUDA applications to this daemon, set env %s=%s", PipeVariable, d.pipe)
	if err := d.listenForLog(); err != nil {
		return err
	}
	if d.users, err = d.listenAt(privilegedSocket, 0o755); err != nil {
		return err
	}
	// Programs of all users connect.
	if d.clients, err = d.listenAt(controlSocket, 0o666); err != nil {
		return err
	}
	// Everybody may write both files, whatever the umask.
	pid := filepath.Join(d.pipe, pidFile)
	if err := errors.Join(os.WriteFile(pid, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o666), os.Chmod(pid, 0o666), d.lock.Chmod(0o666)); err != nil {
		return fmt.Errorf("pipe folder: %w", err)
	}
	return nil
}

// listenAt makes a socket in the place of one that a killed daemon has left.
func (d *Daemon) listenAt(name string, mode os.FileMode) (*net.UnixListener, error) {
	path := filepath.Join(d.pipe, name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	l, err := net.ListenUnix(network, &net.UnixAddr{Name: path, Net: network})
	if err != nil {
		d.log.printf("Failed to bind to %s: %v", path, err)
		return nil, ErrNoDaemon
	}
	if err := os.Chmod(path, mode); err != nil {
		return nil, fmt.Errorf("%s: %w", name, errors.Join(err, l.Close()))
	}
	return l, nil
}

// listenForLog makes the FIFO.
func (d *Daemon) listenForLog() (err error) {
	path := filepath.Join(d.pipe, logPipe)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("log pipe: %w", err)
	}
	if err := errors.Join(syscall.Mkfifo(path, 0o777), os.Chmod(path, 0o777)); err != nil {
		return fmt.Errorf("log pipe: %w", err)
	}
	// Open for writing as well, so that it never ends.
	if d.logPipe, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return fmt.Errorf("log pipe: %w", err)
	}
	return nil
}

// copyLog logs what is written into the FIFO, as it is.
func (d *Daemon) copyLog() {
	for lines := bufio.NewScanner(d.logPipe); lines.Scan(); {
		d.log.raw(lines.Text())
	}
}

// Serve serves until the daemon ends: by quit, by Stop, or because the machine
// reboots or is no more.
func (d *Daemon) Serve() {
	go d.watch()
	go d.copyLog()
	go d.accept(d.clients, d.client)
	d.accept(d.users, d.user)
	<-d.ended
	d.finish()
}

// accept hands connections over until the listener is closed.
func (d *Daemon) accept(l *net.UnixListener, serve func(*net.UnixConn)) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return
		}
		d.log.printf("Accepting connection...")
		go serve(c)
	}
}

// finish lets commands answer, so that who says quit hears when that is done.
func (d *Daemon) finish() {
	done := make(chan struct{})
	go func() { d.busy.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(grace): // one that a fault keeps hanging
	}
}

// poll is how often daemons and servers look at the machine.
const poll = 25 * time.Millisecond

// watch ends the daemon with the machine.
func (d *Daemon) watch() {
	for range time.Tick(poll) {
		if gone(d.state, d.boot) {
			d.release()
			return
		}
	}
}

// gone reports whether the machine has been rebooted or removed.
func gone(f *state.File, boot string) bool {
	id, err := f.BootID()
	in, placeErr := f.InPlace()
	return err != nil || placeErr != nil || id != boot || !in
}

// client is a connection of a program.
func (d *Daemon) client(c *net.UnixConn) {
	pid, uid, err := peer(c)
	if err == nil {
		err = packets(c).Decode(&hello{})
	}
	if err != nil {
		d.log.printf("User did not send valid credentials")
		_ = c.Close()
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.program(waiter{uid: uid, pid: pid, conn: c})
}

// user is a connection of somebody who has commands, until there are no more.
func (d *Daemon) user(c *net.UnixConn) {
	defer c.Close()
	_, uid, err := peer(c)
	if err != nil || uid != 0 && uid != os.Geteuid() {
		d.log.printf("User did not send valid credentials")
		return
	}
	d.log.printf("NEW UI")
	defer d.log.printf("UI closed")
	proof, err := d.proof()
	if err != nil {
		d.log.printf("shared memory: %v", err)
		return
	}
	defer d.hangUp(proof)
	encoder, decoder := json.NewEncoder(c), packets(c)
	for {
		var next command
		if err := decoder.Decode(&next); err != nil {
			return
		}
		if name := proof.accept(next.Token); name != "" {
			if encoder.Encode(result{Shared: name}) != nil {
				return
			}
			continue
		}
		d.log.printf("Cmd:%s", next.Line)
		d.busy.Add(1)
		r := d.execute(next.Line)
		if r.Text != "" {
			d.log.printf("%s", r.Text)
		}
		err := encoder.Encode(r)
		d.busy.Done()
		if err != nil {
			return
		}
	}
}

// Stop ends the servers, whatever their clients do, and the daemon.
func (d *Daemon) Stop() { d.quit(true, 0) }

// release ends the daemon and leaves its servers alone.
func (d *Daemon) release() {
	d.endOnce.Do(func() {
		for _, l := range []*net.UnixListener{d.clients, d.users} {
			if l != nil {
				_ = l.Close() // also removes the socket
			}
		}
		if d.clients != nil {
			_ = os.Remove(filepath.Join(d.pipe, pidFile))
			_ = os.Remove(filepath.Join(d.pipe, logPipe))
			d.log.printf("Exit")
			_ = d.lock.Close() // the next one may come before this process is gone
		}
		close(d.ended)
	})
}
