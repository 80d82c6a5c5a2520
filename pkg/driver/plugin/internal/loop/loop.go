// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package loop has what the plugin's loops wait with.
package loop

// Trigger asks a loop to do something soon. Requests that are made before the loop
// gets to it count as one.
type Trigger chan struct{}

// NewTrigger makes a Trigger.
func NewTrigger() Trigger { return make(Trigger, 1) }

// Fire never blocks.
func (t Trigger) Fire() {
	select {
	case t <- struct{}{}:
	default:
	}
}
