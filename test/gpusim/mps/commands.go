// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/partage-dev/partage/test/gpusim/state"
)

// verb is a command of the control daemon.
type verb struct {
	usage string // of the arguments
	least int    // arguments that it needs
	most  int
	do    func(d *Daemon, args []string) (string, error)
}

var commands map[string]verb

func init() { // Functions and execute need the table, and what is in it needs them
	commands = map[string]verb{
		"get_server_list":                      {"", 0, 0, (*Daemon).serverList},
		"get_server_status":                    {"PID", 1, 1, asking("status")},
		"start_server":                         {"-uid UID", 2, 2, (*Daemon).startServer},
		"shutdown_server":                      {"PID [-f]", 1, 2, (*Daemon).shutdownServer},
		"get_client_list":                      {"PID", 1, 1, asking("clients")},
		"get_device_client_list":               {"[PID]", 0, 1, askingAny("devices")},
		"set_default_active_thread_percentage": {"PERCENTAGE", 1, 1, (*Daemon).setDefaultPercentage},
		"get_default_active_thread_percentage": {"", 0, 0, (*Daemon).getDefaultPercentage},
		"set_active_thread_percentage":         {"PID PERCENTAGE", 2, 2, (*Daemon).setPercentage},
		"get_active_thread_percentage":         {"PID", 1, 1, asking("percentage")},
		"set_default_device_pinned_mem_limit":  {"DEVICE VALUE", 2, 2, (*Daemon).setDefaultMemory},
		"get_default_device_pinned_mem_limit":  {"DEVICE", 1, 1, (*Daemon).getDefaultMemory},
		"set_device_pinned_mem_limit":          {"PID DEVICE VALUE", 3, 3, (*Daemon).setMemory},
		"get_device_pinned_mem_limit":          {"PID DEVICE", 2, 2, (*Daemon).getMemory},
		"set_default_client_priority":          {"PRIORITY", 1, 1, (*Daemon).setDefaultPriority},
		"get_default_client_priority":          {"", 0, 0, (*Daemon).getDefaultPriority},
		"terminate_client":                     {"SERVER_PID CLIENT_PID", 2, 2, (*Daemon).terminateClient},
		"ps":                                   {"[-p PID]", 0, 2, (*Daemon).ps},
		"quit":                                 {"[-t TIMEOUT]", 0, 2, (*Daemon).quitCommand},
	}
}

// execute is one line of a user.
func (d *Daemon) execute(line string) result {
	words := strings.Fields(line)
	if len(words) == 0 {
		return result{}
	}
	name, args := words[0], words[1:]
	v, ok := commands[name]
	if strings.HasSuffix(name, "_default_client_priority") && !d.priorities {
		ok = false
	}
	switch {
	case !ok:
		return result{Text: "Unknown command: " + name}
	case len(args) < v.least || len(args) > v.most:
		return result{Text: strings.TrimSpace("Usage: " + name + " " + v.usage)}
	}
	var text string
	err := d.state.Around(state.MPS+name, d.gpus(), func() (err error) {
		text, err = v.do(d, args)
		return err
	})
	switch {
	case errors.Is(err, state.ErrStruck):
		return result{Text: "Failed to execute " + name, Failed: true}
	case err != nil:
		return result{Text: err.Error()}
	}
	return result{Text: text}
}

// find is the server of a process id.
func (d *Daemon) find(pid string) (*serverProcess, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server == nil || strconv.Itoa(d.server.pid) != pid {
		return nil, fmt.Errorf("Server %s not found", pid)
	}
	return d.server, nil
}

// asking is a command that a server answers.
func asking(op string) func(*Daemon, []string) (string, error) {
	return func(d *Daemon, args []string) (string, error) {
		s, err := d.find(args[0])
		if err != nil {
			return "", err
		}
		return s.ask(order{Op: op})
	}
}

// askingAny is one where the server need not be named.
func askingAny(op string) func(*Daemon, []string) (string, error) {
	return func(d *Daemon, args []string) (string, error) {
		if len(args) > 0 {
			return asking(op)(d, args)
		}
		d.mu.Lock()
		s := d.server
		d.mu.Unlock()
		if s == nil {
			return "", nil
		}
		return s.ask(order{Op: op})
	}
}

func (d *Daemon) serverList([]string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server == nil {
		return "", nil
	}
	return strconv.Itoa(d.server.pid), nil
}

func (d *Daemon) startServer(args []string) (string, error) {
	uid, err := strconv.ParseUint(args[1], 10, 31)
	if err != nil || args[0] != "-uid" {
		return "", fmt.Errorf("Usage: start_server %s", commands["start_server"].usage) //nolint:staticcheck // text for the user, not an error of ours
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.program(waiter{uid: int(uid)})
	return "", nil
}

func (d *Daemon) shutdownServer(args []string) (string, error) {
	s, err := d.find(args[0])
	if err != nil {
		return "", err
	}
	force := len(args) == 2
	if force && args[1] != "-f" {
		return "", fmt.Errorf("Usage: shutdown_server %s", commands["shutdown_server"].usage) //nolint:staticcheck // text for the user, not an error of ours
	}
	d.mu.Lock()
	s.retiring = true
	d.mu.Unlock()
	if !force {
		d.log.printf("Server %d is asked to exit when its clients have", s.pid)
	}
	s.end(force, 0)
	return "", nil
}

func (d *Daemon) setDefaultPercentage(args []string) (string, error) {
	p, err := parsePercentage(args[0])
	if err != nil {
		return "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.percentage = p
	return formatPercentage(p), nil
}

func (d *Daemon) getDefaultPercentage([]string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return formatPercentage(d.percentage), nil
}

func (d *Daemon) setPercentage(args []string) (string, error) {
	s, err := d.find(args[0])
	if err != nil {
		return "", err
	}
	p, err := parsePercentage(args[1])
	if err != nil {
		return "", err
	}
	return s.ask(order{Op: "setPercentage", Percentage: p})
}

func (d *Daemon) setDefaultMemory(args []string) (string, error) {
	bytes, err := parseMemory(args[1])
	if err != nil {
		return "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.memory = d.memory.with(args[0], bytes)
	return "", nil
}

func (d *Daemon) getDefaultMemory(args []string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if bytes, ok := d.memory.get(args[0]); ok {
		return formatMemory(bytes), nil
	}
	return "", nil
}

func (d *Daemon) setMemory(args []string) (string, error) {
	s, err := d.find(args[0])
	if err != nil {
		return "", err
	}
	bytes, err := parseMemory(args[2])
	if err != nil {
		return "", err
	}
	return s.ask(order{Op: "setMemory", Key: args[1], Bytes: bytes})
}

func (d *Daemon) getMemory(args []string) (string, error) {
	s, err := d.find(args[0])
	if err != nil {
		return "", err
	}
	return s.ask(order{Op: "memory", Key: args[1]})
}

func (d *Daemon) terminateClient(args []string) (string, error) {
	s, err := d.find(args[0])
	if err != nil {
		return "", err
	}
	pid, err := strconv.Atoi(args[1])
	if err != nil {
		return "", fmt.Errorf("%q is not the process id of a client", args[1])
	}
	return s.ask(order{Op: "terminate", PID: pid})
}

const psHeader = "PID       ID    SERVER    DEVICE             NAMESPACE    COMMAND"

func (d *Daemon) ps(args []string) (string, error) {
	if len(args) == 1 || len(args) == 2 && args[0] != "-p" {
		return "", fmt.Errorf("Usage: ps %s", commands["ps"].usage) //nolint:staticcheck // text for the user, not an error of ours
	}
	text, err := askingAny("ps")(d, args[min(1, len(args)):])
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(psHeader+"\n"+text, "\n"), nil
}

func (d *Daemon) quitCommand(args []string) (string, error) {
	var timeout time.Duration
	if len(args) > 0 {
		seconds, err := strconv.ParseUint(args[len(args)-1], 10, 16)
		if err != nil || len(args) != 2 || args[0] != "-t" {
			return "", fmt.Errorf("Usage: quit %s", commands["quit"].usage) //nolint:staticcheck // text for the user, not an error of ours
		}
		timeout = time.Duration(seconds) * time.Second
	}
	d.quit(len(args) > 0, timeout)
	return "", nil
}
