// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package prometheus runs promtool, and a Prometheus that has been given samples.
package prometheus

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/api"
	v1 "github.com/prometheus/client_golang/api/prometheus/v1"
)

// Programs is the folder that `make prometheus` fills, below the root of the repository.
const Programs = "_output/prometheus/bin"

// startLimit is for a machine that does much else.
const startLimit = 2 * time.Minute

// Promtool runs promtool in a folder and returns what it printed.
func Promtool(ctx context.Context, root, dir string, args ...string) (string, error) {
	program, err := filepath.Abs(filepath.Join(root, Programs, "promtool"))
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("promtool %v (make prometheus gets it): %w", args, err)
	}
	return string(out), nil
}

// Server is a Prometheus that runs.
type Server struct {
	v1.API
	// URL is that of the server.
	URL string

	cmd *exec.Cmd
	// ended is closed when it has ended, and its log is complete.
	ended chan struct{}
	log   bytes.Buffer
}

// Start starts a server in a folder that has what samples writes, in the OpenMetrics
// format, and scrapes nothing. Stop it in the end.
func Start(ctx context.Context, root, dir string, samples func(io.Writer) error) (*Server, error) {
	text, err := os.Create(filepath.Join(dir, "samples"))
	if err != nil {
		return nil, err
	}
	if err := samples(text); err != nil {
		return nil, fmt.Errorf("make the samples: %w", err)
	}
	if err := text.Close(); err != nil {
		return nil, err
	}
	if out, err := Promtool(ctx, root, dir, "tsdb", "create-blocks-from", "--quiet", "openmetrics", "samples", "data"); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, out)
	}
	// The samples are of a fixed time, which the retention must reach. A series that ends does not say so, as it would
	// when it was scraped: it must not last for longer than the minute until the next sample.
	return Run(ctx, root, dir, nil, "--storage.tsdb.retention.time=100y", "--query.lookback-delta=59s")
}

// Run starts a server in a folder with a configuration, whose paths are relative to the
// folder, and further options. Stop it in the end.
func Run(ctx context.Context, root, dir string, config []byte, options ...string) (*Server, error) {
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), config, 0o600); err != nil {
		return nil, err
	}
	program, err := filepath.Abs(filepath.Join(root, Programs, "prometheus"))
	if err != nil {
		return nil, err
	}
	for {
		s, err := run(ctx, program, dir, options)
		// Another program has taken the address since it was found to be free.
		if err != nil && strings.Contains(err.Error(), "address already in use") && ctx.Err() == nil {
			continue
		}
		return s, err
	}
}

func run(ctx context.Context, program, dir string, options []string) (*Server, error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	s := &Server{URL: "http://" + address, ended: make(chan struct{})}
	options = append([]string{"--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=" + address}, options...)
	s.cmd = exec.Command(program, options...) //nolint:noctx // Stop ends it
	s.cmd.Dir, s.cmd.Stdout, s.cmd.Stderr = dir, &s.log, &s.log
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start Prometheus (make prometheus gets it): %w", err)
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.ended)
	}()
	if err := s.ready(ctx); err != nil {
		s.Stop()
		return nil, fmt.Errorf("%w\n%s", err, s.log.String())
	}
	client, err := api.NewClient(api.Config{Address: s.URL})
	if err != nil {
		s.Stop()
		return nil, err
	}
	s.API = v1.NewAPI(client)
	return s, nil
}

// Stop ends the server.
func (s *Server) Stop() {
	_ = s.cmd.Process.Kill()
	<-s.ended
}

// ready waits until the server answers. It fails when the server ends.
func (s *Server) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		err := s.answers(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-s.ended:
			return fmt.Errorf("the Prometheus at %s has ended: %w", s.URL, err)
		case <-ctx.Done():
			return fmt.Errorf("the Prometheus at %s is not ready: %w", s.URL, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// answers fails unless the server reports that it is ready within five seconds. Another program that
// has taken its address may accept connections and never answer.
func (s *Server) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/-/ready", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	_ = response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("it answers %s", response.Status)
	}
	return nil
}

// freeAddress returns an address of this machine at which nobody listens.
func freeAddress(ctx context.Context) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String(), nil
}
