// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package loop

import "testing"

func TestTrigger(t *testing.T) {
	trigger := NewTrigger()
	for range 3 {
		trigger.Fire()
	}
	<-trigger
	select {
	case <-trigger:
		t.Error("requests made before the loop got to them count more than once")
	default:
	}
	trigger.Fire()
	<-trigger
}
