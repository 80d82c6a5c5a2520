// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// logger writes control.log or server.log in the form that NVIDIA's have.
type logger struct {
	mu   sync.Mutex
	who  string // "Control", "Server"
	file *os.File
	also io.Writer // nil: nowhere
}

// openLog makes the log folder if it is absent; its parent must be there.
func openLog(who, name string, also io.Writer) (*logger, error) {
	dir := directory(LogVariable, defaultLog)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("log folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("log file: %w", err)
	}
	return &logger{who: who, file: f, also: also}, nil
}

func (l *logger) printf(format string, args ...any) {
	l.raw(fmt.Sprintf("[%s %s %5d] %s", time.Now().Format("2006-01-02 15:04:05.000"), l.who, os.Getpid(), fmt.Sprintf(format, args...)))
}

// raw logs a line that somebody else has formatted.
func (l *logger) raw(line string) {
	line += "\n"
	l.mu.Lock()
	defer l.mu.Unlock()
	_, _ = io.WriteString(l.file, line)
	if l.also != nil {
		_, _ = io.WriteString(l.also, line)
	}
}
