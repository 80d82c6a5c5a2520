// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package progress prints what is being done and how long it took.
package progress

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Printer writes lines of the form "  3.2s  message". It is safe for concurrent use.
type Printer struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

// New returns a printer whose clock starts now.
func New(out io.Writer) *Printer { return &Printer{out: out, start: time.Now()} }

// Printf writes one line with the seconds since the start.
func (p *Printer) Printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.out, "%6.1fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// Plain writes text as it is.
func (p *Printer) Plain(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = io.WriteString(p.out, text)
}
