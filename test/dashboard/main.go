// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command dashboard draws the chart's dashboards over a made-up fleet, into pictures.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/partage-dev/partage/test/monitoring/fleet"
	"github.com/partage-dev/partage/test/monitoring/grafana"
	"github.com/partage-dev/partage/test/monitoring/prometheus"
)

const (
	// shown is the time range of the pictures.
	shown = 6 * time.Hour
	// width is that of the pictures; cell and header are those of src/page.jsx.
	width, cell, header, gap = 1600, 38, 56, 8
	// drawLimit is for one picture, on a machine that does much else.
	drawLimit = 5 * time.Minute
)

// pictures are the dashboards to draw, with the choices of their variables.
var pictures = []struct {
	dashboard string
	chosen    map[string]string
}{
	{"fleet", nil},
	{"node", map[string]string{"node": "dgx-1"}},
	{"claim", map[string]string{"namespace": "serving", "claim": "api-1"}},
}

func main() {
	root := flag.String("root", ".", "root of the repository")
	bundle := flag.String("bundle", "", "folder with page.js and page.css")
	out := flag.String("out", "docs/images", "folder for the pictures")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := run(ctx, *root, *bundle, *out); err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, root, bundle, out string) error {
	scratch, err := os.MkdirTemp("", "dashboard")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	server, err := prometheus.Start(ctx, root, scratch, func(w io.Writer) error { return fleet.Write(w, shown+time.Hour, time.Minute) })
	if err != nil {
		return err
	}
	defer server.Stop()
	for _, picture := range pictures {
		d, err := grafana.Load(filepath.Join(root, "deployments/helm/partage/dashboards", picture.dashboard+".json"))
		if err != nil {
			return err
		}
		page, err := load(ctx, server, d, picture.chosen)
		if err != nil {
			return fmt.Errorf("dashboard %s: %w", picture.dashboard, err)
		}
		file := filepath.Join(out, "dashboard-"+picture.dashboard+".png")
		if err := draw(ctx, page, bundle, scratch, file); err != nil {
			return fmt.Errorf("dashboard %s: %w", picture.dashboard, err)
		}
		fmt.Println(file)
	}
	return nil
}

// draw lets a browser show a page and takes a picture of it.
func draw(ctx context.Context, page page, bundle, scratch, file string) error {
	data, err := json.Marshal(page)
	if err != nil {
		return err
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	serve := func(pattern, contentType string, content []byte) {
		mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			_, _ = w.Write(content)
		})
	}
	serve("/{$}", "text/html", []byte(`<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="/page.css"><body><div id="root"></div><script type="module" src="/page.js"></script></body>`))
	serve("/page.json", "application/json", data)
	mux.Handle("GET /", http.FileServer(http.Dir(bundle)))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()

	ctx, cancel := context.WithTimeout(ctx, drawLimit)
	defer cancel()
	log, err := exec.CommandContext(ctx, "chromium-headless-shell", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
		"--user-data-dir="+filepath.Join(scratch, "browser"), fmt.Sprintf("--window-size=%d,%d", width, page.height()),
		"--virtual-time-budget=20000", "--screenshot="+file, "http://"+listener.Addr().String()+"/").CombinedOutput()
	if err != nil {
		return fmt.Errorf("chromium-headless-shell: %w\n%s", err, log)
	}
	// What the page itself complains about. Warnings of the libraries are theirs.
	for line := range strings.SplitSeq(string(log), "\n") {
		if strings.Contains(line, "Uncaught") {
			return fmt.Errorf("the page does not work: %s", line)
		}
	}
	return nil
}
