// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"context"
	"fmt"
	"html/template"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

var redirect = template.Must(template.New("redirect").Parse(
	`<!doctype html><meta charset="utf-8"><title>kubectl gpu ui</title><meta http-equiv="refresh" content="0;url={{.}}"><a href="{{.}}">GPUs</a>
`))

// openBrowser opens an address. The browser gets a file that leads there: arguments of programs,
// and so the token, can be read by all users of a machine. The function that it returns removes
// the file.
func openBrowser(ctx context.Context, address string) (forget func(), err error) {
	forget = func() {}
	cache, err := os.UserCacheDir()
	if err != nil {
		return forget, fmt.Errorf("find a folder for the browser's file: %w", err)
	}
	folder := filepath.Join(cache, "kubectl-gpu")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return forget, fmt.Errorf("make a folder for the browser's file: %w", err)
	}
	file, err := os.CreateTemp(folder, "open-*.html") // for the user only
	if err != nil {
		return forget, fmt.Errorf("make a file for the browser: %w", err)
	}
	forget = func() { _ = os.Remove(file.Name()) }
	err = redirect.Execute(file, template.URL(address)) //nolint:gosec // our own address
	if closing := file.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return forget, fmt.Errorf("write %s: %w", file.Name(), err)
	}
	name, args := opener(runtime.GOOS)
	if err := exec.CommandContext(ctx, name, append(args, file.Name())...).Start(); err != nil {
		return forget, fmt.Errorf("run %s: %w", name, err)
	}
	return forget, nil
}

// opener is the program that opens a file as its owner wants it opened.
func opener(system string) (name string, args []string) {
	switch system {
	case "darwin":
		return "open", nil
	case "windows":
		return "rundll32", []string{"url.dll,FileProtocolHandler"}
	default:
		return "xdg-open", nil
	}
}
