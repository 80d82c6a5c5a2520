// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package trial tries with an MPS daemon of its own what no documentation says. It judges
// nothing: it writes down what it saw. No client that is at work is killed.
package trial

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Result is what came of a trial.
type Result struct {
	Trial    string `json:"trial"`
	Question string `json:"question"`
	Observed string `json:"observed,omitempty"`
	// NotTried says why it could not be tried.
	NotTried string `json:"notTried,omitempty"`
	Took     string `json:"took"`
}

// String returns a line for people.
func (r Result) String() string {
	if r.NotTried != "" {
		return fmt.Sprintf("%-24s could not be tried: %s", r.Trial, r.NotTried)
	}
	return fmt.Sprintf("%-24s %s", r.Trial, r.Observed)
}

// trial is a question with the way to an answer.
type trial struct {
	name, question string
	try            func(context.Context, *lab) (string, error)
}

// cannotError says why something could not be tried. Any other error is an observation.
type cannotError struct{ error }

// oneLimit is how long a trial may take.
const oneLimit = 25 * time.Second

// Run makes all trials and writes each result as a line of JSON as soon as it is known. The
// time of ctx bounds them; the end of MPS has a time of its own. isolated says why this
// process has no mount namespace of its own, if it has none.
func Run(ctx context.Context, o Options, isolated error, out io.Writer) error {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	l, err := newLab(o, isolated)
	if err != nil {
		return err
	}
	for _, t := range trials {
		if err := encoder.Encode(l.one(ctx, t)); err != nil {
			return errors.Join(err, l.end(ctx, encoder))
		}
	}
	return l.end(ctx, encoder)
}

func (l *lab) one(ctx context.Context, t trial) Result {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, oneLimit)
	defer cancel()
	r := Result{Trial: t.name, Question: t.question}
	err := ctx.Err()
	if err == nil {
		err = l.ensure(ctx)
	}
	if err != nil {
		err = cannotError{err}
	} else {
		r.Observed, err = t.try(ctx, l)
	}
	var cannot cannotError
	switch {
	case errors.As(err, &cannot):
		r.Observed, r.NotTried = "", cannot.Error()
	case ctx.Err() != nil:
		r.Observed, r.NotTried = "", fmt.Sprintf("there was no answer in time: %v", err)
	case err != nil:
		r.Observed = "error: " + err.Error()
	}
	r.Took = time.Since(began).Round(time.Millisecond).String()
	return r
}

// end is the last trial.
func (l *lab) end(ctx context.Context, encoder *json.Encoder) error {
	began := time.Now()
	how, err := l.stop(ctx)
	if err != nil {
		how += ": " + err.Error()
	}
	r := Result{Trial: "quit", Question: "do daemon and server end?", Observed: how, Took: time.Since(began).Round(time.Millisecond).String()}
	return errors.Join(err, encoder.Encode(r))
}
