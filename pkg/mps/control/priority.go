// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/partage-dev/partage/pkg/mps"
)

// ErrNoPriorities means that a daemon does not answer as one does that has client priorities.
var ErrNoPriorities = errors.New("the MPS of this node's driver has no client priorities (its nvidia-cuda-mps-control does not " +
	"know get_default_client_priority and set_default_client_priority); use a newer driver, or ask for no clientPriority in the " +
	"sharing policy and for no defaultClientPriority in configurations")

const priorityQuery = "get_default_client_priority"

// priorityOf is the priority of new clients of all servers.
func priorityOf(want mps.ClientPriority) limit {
	number := 0
	if want == mps.PriorityBelowNormal {
		number = 1
	}
	return limit{what: "default client priority", set: fmt.Sprintf("set_default_client_priority %d", number), get: priorityQuery,
		differs: func(answer string) (string, error) {
			got, err := ParsePriority(answer)
			if err != nil || got == want {
				return "", err
			}
			return fmt.Sprintf("%s, want %s", got, want), nil
		}}
}

// checkPriorities returns an error that wraps ErrNoPriorities if the daemon has none. It is
// asked by itself, since nobody knows how many lines a daemon says about a command that it
// does not know.
func (c Client) checkPriorities(ctx context.Context) error {
	lines, err := c.run(ctx, priorityQuery)
	if err != nil {
		return err
	}
	if _, err := ParsePriority(strings.Join(lines, "\n")); err != nil {
		return fmt.Errorf("%w: %w", ErrNoPriorities, err)
	}
	return nil
}

// priorityName matches the name of a priority as a word: an older daemon may say anything about
// a command that it does not know, also that others are listed "below".
var priorityName = regexp.MustCompile(`(?i)\b(below[ _-]?)?normal\b`)

// ParsePriority reads a client priority. The values are documented as 0 [NORMAL] and
// 1 [BELOW NORMAL]; driver 580 answers 0 or 1.
func ParsePriority(answer string) (mps.ClientPriority, error) {
	name := priorityName.FindStringSubmatch(answer)
	switch {
	case answer == "1", name != nil && name[1] != "":
		return mps.PriorityBelowNormal, nil
	case answer == "0", name != nil:
		return mps.PriorityNormal, nil
	}
	return "", fmt.Errorf("want NORMAL or BELOW NORMAL%s", printed(answer))
}
