// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// eventKey identifies what an event reports. Events with the same key update one
// Event object, which counts them and has the last message.
//
// The second key is for the recorder, which counts the different messages with the
// same key.
func eventKey(event *corev1.Event) (key, local string) {
	about := event.InvolvedObject
	return strings.Join([]string{
		event.Source.Component, event.Source.Host, about.Kind, about.Namespace, about.Name, string(about.UID), about.APIVersion,
		event.Type, event.Reason, stableText(event.Message),
	}, "\x00"), event.Message
}

// pidDistance is how many words may be between "process" and a process ID.
const pidDistance = 4

// stableText is a message without what differs each time that the same is observed:
// process IDs and durations. Other numbers stay, as they distinguish GPUs, devices
// and placements.
func stableText(message string) string {
	var stable []string
	sinceProcess := pidDistance + 1
	for word := range strings.FieldsSeq(message) {
		bare := strings.Trim(word, "[](),.;:")
		if _, err := strconv.ParseUint(bare, 10, 32); err == nil && sinceProcess <= pidDistance {
			continue
		}
		if _, err := time.ParseDuration(bare); err == nil {
			continue
		}
		sinceProcess++
		switch strings.ToLower(bare) {
		case "process", "processes", "pid", "pids":
			sinceProcess, bare = 0, "process"
		}
		stable = append(stable, bare)
	}
	return strings.Join(stable, " ")
}
