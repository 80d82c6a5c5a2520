// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/test/gpusim/cuda"
)

// command is the server's part of a command of its daemon.
func (s *Server) command(o order) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch o.Op {
	case "status":
		return s.status.String()
	case "clients":
		var lines []string
		for _, mb := range s.clients {
			lines = append(lines, strconv.Itoa(mb.pid))
		}
		return strings.Join(lines, "\n")
	case "devices":
		return s.clientsByDevice()
	case "ps":
		return s.processes()
	case "percentage":
		return formatPercentage(s.percentage)
	case "setPercentage":
		s.percentage = o.Percentage
		return formatPercentage(o.Percentage)
	case "memory":
		if bytes, ok := s.memory.get(o.Key); ok {
			return formatMemory(bytes)
		}
		return ""
	case "setMemory":
		s.memory = s.memory.with(o.Key, o.Bytes)
		s.log.printf("Device pinned memory limit for device %s set to 0x%x bytes", o.Key, o.Bytes)
		return ""
	case "terminate":
		return s.terminate(o.PID)
	}
	return "Unknown order: " + o.Op
}

// clientsByDevice has a line for each device.
func (s *Server) clientsByDevice() string {
	var lines []string
	for i, d := range s.devices {
		line := []string{d.UUID + ":"}
		for _, mb := range s.clients {
			if slices.ContainsFunc(mb.uses, func(u use) bool { return u.device == i }) {
				line = append(line, strconv.Itoa(mb.pid))
			}
		}
		lines = append(lines, strings.Join(line, " "))
	}
	return strings.Join(lines, "\n")
}

// shortUUID is how much of a UUID ps shows.
const shortUUID = len("GPU-cb1213a3-d6a4")

func (s *Server) processes() string {
	var lines []string
	for _, mb := range s.clients {
		for n, u := range mb.uses {
			uuid := s.devices[u.device].UUID
			lines = append(lines, fmt.Sprintf("%-9d %-5d %-9d %-18s %-12d %s", mb.pid, n, os.Getpid(),
				uuid[:min(len(uuid), shortUUID)], namespaceOf(mb.pid), programOf(mb.pid)))
		}
	}
	return strings.Join(lines, "\n")
}

// namespaceOf is the number of a process's PID namespace, 0 if it cannot be told.
func namespaceOf(pid int) (number uint64) {
	text, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		return 0
	}
	if _, err := fmt.Sscanf(text, "pid:[%d]", &number); err != nil {
		return 0
	}
	return number
}

// terminate ends what a client does, which it is told. The answer is the CUresult.
func (s *Server) terminate(pid int) string {
	found := false
	for _, mb := range s.clients {
		if mb.pid != pid {
			continue
		}
		found = true
		for i := range mb.uses {
			u := &mb.uses[i]
			for n := range u.contexts {
				s.log.printf("Volta MPS: status of client {%d, %d} is INACTIVE", pid, n+1)
			}
			u.contexts, u.memory, u.busy = 0, 0, false
		}
		mb.end(cuda.MPSClientTerminated)
	}
	if !found {
		return strconv.Itoa(int(cuda.InvalidValue))
	}
	s.publish()
	return "0"
}
