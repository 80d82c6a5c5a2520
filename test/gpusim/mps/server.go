// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/partage-dev/partage/test/gpusim/cuda"
	"github.com/partage-dev/partage/test/gpusim/machine"
	"github.com/partage-dev/partage/test/gpusim/state"
)

// Server is an MPS server process.
type Server struct {
	config  config
	log     *logger
	state   *state.File
	root    string
	boot    string
	owner   uint64
	daemon  *link
	devices []cuda.Device
	nodes   cuda.Nodes // of the devices, until the process ends
	shared  string     // file in SharedMemory, if there is one
	region  *os.File   // that file
	token   string
	ended   chan struct{}
	endOnce sync.Once

	mu         sync.Mutex
	started    bool
	retiring   bool
	status     machine.MPSStatus
	undefined  bool    // see lose
	percentage float64 // for the next client
	memory     memoryLimits
	clients    []*member
	visitors   int // connections that the daemon has handed over, of clients or not yet
}

// daemonFD is the file descriptor of the link to the daemon.
const daemonFD = 3

// RunServer is the whole life of a server that a daemon has started.
func RunServer() error {
	l, err := newLink(os.NewFile(daemonFD, "daemon"))
	if err != nil {
		return fmt.Errorf("%s is started by nvidia-cuda-mps-control: %w", serverProgram, err)
	}
	var first order
	if _, err := l.receive(&first); err != nil || first.Config == nil {
		return fmt.Errorf("%s is started by nvidia-cuda-mps-control: no configuration (%w)", serverProgram, err)
	}
	s := &Server{
		config: *first.Config, daemon: l, ended: make(chan struct{}),
		percentage: first.Config.Percentage, memory: first.Config.Memory,
	}
	if s.log, err = openLog("Server", "server.log", nil); err != nil {
		return err
	}
	s.log.printf("Startup")
	s.log.printf("Connecting to control daemon on socket: %s", filepath.Join(PipeDirectory(), controlSocket))
	if err := s.run(); err != nil {
		s.log.printf("MPS server failed to start: %v", err)
		return err
	}
	return nil
}

// initialization is how long the driver needs to initialise those of the GPUs that
// nothing keeps initialised.
func initialization(m *machine.Machine, devices []cuda.Device) (sum time.Duration) {
	i := slices.IndexFunc(m.Latencies, func(l machine.Latency) bool { return l.Function == ServerStart })
	if i < 0 {
		return 0
	}
	for _, d := range devices {
		if !m.GPUs[d.GPU].Persistence {
			sum += m.Latencies[i].Base
		}
	}
	return sum
}

func (s *Server) run() error {
	at, err := state.Find()
	if err != nil {
		return err
	}
	if s.state, err = state.Open(at.State); err != nil { // until this process ends: others use it, too
		return err
	}
	s.root = at.Root
	if s.boot, err = s.state.BootID(); err != nil {
		return err
	}
	go s.obey()
	go s.watch()
	s.log.printf("Initializing server process")
	m, err := s.state.Snapshot()
	if err != nil {
		return err
	}
	gpus, deviceErr := serverDevices(m, s.root)
	err = s.state.Around(ServerStart, gpusOf(gpus), func() error {
		time.Sleep(initialization(m, gpus))
		return errors.Join(deviceErr, s.start())
	})
	if err != nil {
		return err
	}
	<-s.ended
	s.unshare()
	s.log.printf("Exiting")
	return nil
}

// serverDevices are what CUDA_VISIBLE_DEVICES of the daemon names. Unlike a
// program's, every entry must be there.
func serverDevices(m *machine.Machine, root string) ([]cuda.Device, error) {
	here := cuda.Here(m, root)
	list, set := os.LookupEnv(VisibleVariable)
	devices := cuda.Enumerate(here)
	if set {
		devices = cuda.Select(here, list)
		if wanted := strings.Count(list, ",") + 1; len(devices) < wanted {
			return nil, fmt.Errorf("%w: %s=%q has %d devices, %d of which can be used", cuda.NoDevice, VisibleVariable, list, wanted, len(devices))
		}
	}
	if len(devices) == 0 {
		return nil, cuda.NoDevice
	}
	return devices, nil
}

// start makes the server's contexts and reports to the daemon.
func (s *Server) start() (err error) {
	if s.owner, err = s.state.Own(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = machine.MPSActive
	err = s.state.Update(func(m *machine.Machine) error {
		if m.BootID != s.boot {
			return errors.New("the machine has rebooted")
		}
		if s.devices, err = serverDevices(m, s.root); err != nil {
			return err
		}
		for _, d := range s.devices {
			err := d.Free(m)
			if err == nil && d.Used(m)+d.ServerMemory > d.Memory {
				err = cuda.OutOfMemory
			}
			if err != nil {
				return fmt.Errorf("%s: %w", d.UUID, err)
			}
		}
		s.enter(m)
		return nil
	})
	if err != nil {
		return err
	}
	if s.nodes, err = cuda.Open(s.root, s.devices...); err != nil {
		return err
	}
	for i, d := range s.devices {
		s.log.printf("Creating server context on device %d (%s)", i, d.Name)
	}
	if err := becomeUser(s.config.UID); err != nil {
		return err
	}
	if err := s.share(); err != nil {
		return err
	}
	s.log.printf("Active Threads Percentage set to %s", formatPercentage(s.percentage))
	for i, d := range s.devices {
		if limit := s.memory.of(i, d.UUID); limit > 0 {
			s.log.printf("Device pinned memory limit for device %d set to 0x%x bytes", i, limit)
		}
	}
	s.log.printf("Server has started")
	s.started = true
	return s.daemon.send(answer{}, nil)
}

// becomeUser gives root's rights up. What is open stays open.
func becomeUser(uid int) error {
	if uid == os.Geteuid() {
		return nil
	}
	for _, err := range []error{syscall.Setgroups(nil), syscall.Setgid(uid), syscall.Setuid(uid)} {
		if err != nil {
			return fmt.Errorf("become user %d: %w", uid, err)
		}
	}
	return nil
}

// share makes the file by which clients show that they see the same shared memory, on a machine whose driver's has a name.
func (s *Server) share() error {
	name := fmt.Sprintf("mps.shm.%d.%d", s.config.UID, os.Getpid())
	m, err := s.state.Snapshot()
	if err != nil {
		return err
	}
	if !m.MPS.NamedSharedMemory {
		s.log.printf("Created anonymous shared memory region %s", name)
		return nil
	}
	mode := os.FileMode(0o600)
	if s.config.MultiUser {
		mode = 0o644
	}
	s.token = rand.Text()
	// It stays open, as what a server has mapped does.
	if s.region, err = os.OpenFile(filepath.Join(SharedMemory, name), os.O_CREATE|os.O_TRUNC|os.O_RDWR, mode); err == nil {
		_, err = s.region.WriteString(s.token)
		err = errors.Join(err, s.region.Chmod(mode)) // past the umask
	}
	if err != nil {
		return fmt.Errorf("shared memory: %w", err)
	}
	s.shared = name
	s.log.printf("Created shared memory region %s", name)
	return nil
}

func (s *Server) unshare() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shared != "" {
		_ = os.Remove(filepath.Join(SharedMemory, s.shared))
	}
}

// end ends the process, also from within its start.
func (s *Server) end() {
	s.endOnce.Do(func() { close(s.ended) })
	if !s.started {
		s.log.printf("Exiting")
		os.Exit(0)
	}
}

// watch ends the server with the machine, and has the faults that were asked for.
func (s *Server) watch() {
	for range time.Tick(poll) {
		if gone(s.state, s.boot) {
			s.unshare()
			os.Exit(1) // as if it had been switched off
		}
		s.mu.Lock()
		if s.started {
			s.wantedFaults()
		}
		s.mu.Unlock()
	}
}

func (s *Server) wantedFaults() {
	gpus, err := s.state.WantedFaults(s.owner)
	if err != nil || len(gpus) == 0 {
		return
	}
	for i, d := range s.devices {
		if slices.Contains(gpus, d.GPU) {
			s.fault(i, nil)
		}
	}
}

// obey does what the daemon wants. Without a daemon the server goes on.
func (s *Server) obey() {
	for {
		var o order
		client, err := s.daemon.receive(&o)
		if err != nil {
			if !errors.Is(err, io.EOF) {
				s.log.printf("Lost the control daemon: %v", err)
			}
			return
		}
		switch o.Op {
		case "client":
			s.mu.Lock()
			s.visitors++
			s.mu.Unlock()
			go s.welcome(client, newMember(s, client, o))
		case "retire":
			s.mu.Lock()
			s.retiring = true
			s.leaveIfIdle()
			s.mu.Unlock()
		case "exit":
			s.mu.Lock()
			s.end()
			s.mu.Unlock()
		default:
			_ = s.daemon.send(answer{ID: o.ID, Text: s.command(o)}, nil)
		}
	}
}

// leaveIfIdle ends a server that is not wanted any more. The daemon hands no
// program over to one that it has told so.
func (s *Server) leaveIfIdle() {
	if s.retiring && s.visitors == 0 {
		s.end()
	}
}

func (s *Server) welcome(c *net.UnixConn, mb *member) {
	defer c.Close()
	if err := mb.serve(); err != nil && !errors.Is(err, io.EOF) {
		s.log.printf("Client {PID: %d}: %v", mb.pid, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leave(mb)
	s.visitors--
	s.leaveIfIdle()
}
