// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// eventKey identifies what an event reports. Events with the same key are one Event
// object, which counts them and has the last message.
func eventKey(event *corev1.Event) string {
	about := event.InvolvedObject
	return strings.Join([]string{
		event.Source.Component, event.Source.Host, about.Kind, about.Namespace, about.Name, string(about.UID), about.APIVersion,
		event.Type, event.Reason, stableText(event.Message),
	}, "\x00")
}

// seriesKey identifies what an event is about and its reason, whatever its message. Which
// GPU of a node it is about can be added.
func seriesKey(event *corev1.Event) string {
	about := event.InvolvedObject
	return strings.Join([]string{about.Kind, about.Namespace, about.Name, string(about.UID), event.Reason, ""}, "\x00")
}

const (
	// maxEventPrefix is how much of an object's name is part of the names of its events.
	maxEventPrefix = 200
	// eventHash is how many bytes of the hash of its key are.
	eventHash = 10
)

// eventName follows from the event's key.
func eventName(event *corev1.Event) string {
	prefix := event.InvolvedObject.Name
	if len(prefix) > maxEventPrefix {
		prefix = strings.TrimRight(prefix[:maxEventPrefix], ".-")
	}
	hash := sha256.Sum256([]byte(eventKey(event)))
	return prefix + "." + hex.EncodeToString(hash[:eventHash])
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
