// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/partage-dev/partage/test/hardware/bounded"
	"github.com/partage-dev/partage/test/hardware/trial"
)

// table makes lines for people of the trials' results.
func table(lines string) (string, error) {
	var b strings.Builder
	for line := range strings.Lines(lines) {
		var r trial.Result
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			return b.String(), fmt.Errorf("read the results of the trials: %w", err)
		}
		fmt.Fprintln(&b, r)
	}
	return b.String(), nil
}

// replayLimit is for one report. There are two of each of two transcripts, and each takes a second.
const replayLimit = 5 * time.Second

// summary is the first file that somebody opens.
func (p *plan) summary(compared, left string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s\n", p.began.UTC().Format(time.DateOnly), p.before.GPUs[0].Name)
	if !p.mps {
		fmt.Fprintf(&b, "no MPS: %s\n", p.why)
	}
	for _, s := range p.steps {
		fmt.Fprintf(&b, "%-16s %8s  %s\n", s.Step, s.Took, s.Text)
	}
	if left != "" {
		fmt.Fprintln(&b, left)
	}
	fmt.Fprintln(&b, compared)
	return b.String()
}

// archive redacts all results and writes them into one file. What is not redacted is removed
// with the private folder.
func (p *plan) archive(ctx context.Context, compared, left string) (string, error) {
	if err := p.write("summary.txt", p.summary(compared, left)); err != nil {
		return "", err
	}
	files, err := p.readResults()
	if err != nil {
		return "", err
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		p.redact.Learn(files[name])
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".jsonl") {
			files[name] = p.redact.Text(files[name])
			continue
		}
		if files[name], err = p.redact.Lines(files[name]); err != nil {
			return "", fmt.Errorf("redact %s: %w", name, err)
		}
		if folder, ok := strings.CutSuffix(name, "transcript.jsonl"); ok && files[name] != "" {
			files[folder+"report.txt"] = p.replay(ctx, files[name])
			files[folder+"patch.yaml"] = p.replay(ctx, files[name], "--catalogue-patch=-")
		}
	}
	path := filepath.Join(p.out, "partage-hardware-"+p.began.UTC().Format("20060102T150405Z")+".tar.gz")
	packed, err := pack(files, p.began)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(path, packed, 0o644); err != nil { //nolint:gosec // it is for others to read
		return "", fmt.Errorf("write the archive: %w", err)
	}
	return path, nil
}

func (p *plan) readResults() (map[string]string, error) {
	files, results := map[string]string{}, os.DirFS(p.results)
	err := fs.WalkDir(results, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(results, name)
		files[name] = string(text)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the results: %w", err)
	}
	return files, nil
}

// replay returns what the conformance command prints for a redacted transcript, which so is known
// to be complete.
func (p *plan) replay(ctx context.Context, transcript string, flags ...string) string {
	ctx, cancel := context.WithTimeout(ctx, replayLimit)
	defer cancel()
	args := append([]string{"conformance", "--replay=/dev/stdin"}, flags...)
	cmd := exec.CommandContext(ctx, filepath.Join(p.bundle, "gpu-kubelet-plugin"), args...)
	var out bounded.Output
	cmd.Stdin, cmd.Stdout = strings.NewReader(transcript), &out
	err := bounded.Run(ctx, cmd)
	if exit := (*exec.ExitError)(nil); err != nil && (!errors.As(err, &exit) || out.String() == "") {
		return fmt.Sprintf("the transcript cannot be replayed: %v\n", err)
	}
	return out.String()
}

func pack(files map[string]string, at time.Time) ([]byte, error) {
	var packed bytes.Buffer
	compressed := gzip.NewWriter(&packed)
	archive := tar.NewWriter(compressed)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		header := &tar.Header{Name: "partage-hardware/" + name, Mode: 0o644, Size: int64(len(files[name])), ModTime: at, Format: tar.FormatPAX}
		if err := archive.WriteHeader(header); err != nil {
			return nil, fmt.Errorf("pack %s: %w", name, err)
		}
		if _, err := archive.Write([]byte(files[name])); err != nil {
			return nil, fmt.Errorf("pack %s: %w", name, err)
		}
	}
	if err := errors.Join(archive.Close(), compressed.Close()); err != nil {
		return nil, fmt.Errorf("pack the archive: %w", err)
	}
	return packed.Bytes(), nil
}
