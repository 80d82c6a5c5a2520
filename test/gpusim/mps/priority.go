// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"fmt"
	"os"
	"strconv"
)

// priority is a client's. It is a hint to the driver: work of clients with the lower number comes
// first, whatever the priorities of their streams. Nothing here depends on it.
type priority int

// priorities are the names that NVIDIA's documentation gives them.
var priorities = [...]string{"NORMAL", "BELOW NORMAL"}

func (p priority) String() string { return fmt.Sprintf("%d [%s]", int(p), priorities[p]) }

func parsePriority(text string) (priority, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n >= len(priorities) {
		return 0, fmt.Errorf("%q is not a client priority: %v or %v", text, priority(0), priority(1))
	}
	return priority(n), nil
}

// defaultPriority takes the first one from the daemon's environment.
func (d *Daemon) defaultPriority() error {
	m, err := d.state.Snapshot()
	if err != nil {
		return err
	}
	d.priorities = !m.MPS.NoPriorities
	text := os.Getenv(PriorityVariable)
	if !d.priorities || text == "" {
		return nil
	}
	if d.priority, err = parsePriority(text); err != nil {
		return fmt.Errorf("%s: %w", PriorityVariable, err)
	}
	return nil
}

func (d *Daemon) setDefaultPriority(args []string) (string, error) {
	p, err := parsePriority(args[0])
	if err != nil {
		return "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.priority = p
	return "", nil
}

func (d *Daemon) getDefaultPriority([]string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strconv.Itoa(int(d.priority)), nil
}

// ownPriority is the one that a program says in its environment, or nil.
func ownPriority(o ClientOptions) *priority {
	if o.Priority == nil {
		return nil
	}
	p, err := parsePriority(*o.Priority)
	if err != nil {
		return nil
	}
	return &p
}

// How says how the program runs.
func (c *Client) How() string {
	text := "as a client of an MPS server"
	if c.priority != 0 {
		text += ", with priority " + c.priority.String()
	}
	return text
}
