// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/pkg/mps/supervisor"
	"github.com/partage-dev/partage/test/hardware/redact"
	"github.com/partage-dev/partage/test/hardware/settings"
	"github.com/partage-dev/partage/test/hardware/trial"
)

// refusedError says that somebody works on the machine.
type refusedError struct{ why string }

func (e refusedError) Error() string {
	return "refused, nothing was started: " + e.why + ". With --read-only it only looks"
}

// gVisor is the kernel release that sandboxes of gVisor show. No daemon of the driver works
// in one as it does on a node.
const gVisor = "4.4.0"

// plan is one run.
type plan struct {
	*options

	stdout io.Writer
	smi    *settings.SMI
	before *settings.Settings
	gpu    settings.GPU // for MPS
	mps    bool
	why    string // there is no MPS
	redact *redact.Redactor
	began  time.Time
	shm    []string // the files in /dev/shm before
	// work is a private folder, results what goes into the archive, still unredacted.
	work, results string
	steps         []outcome
}

// newPlan looks at the machine, and refuses where somebody works there.
func newPlan(ctx context.Context, o *options, stdout io.Writer) (*plan, error) {
	p := &plan{options: o, stdout: stdout, mps: !o.readOnly, began: time.Now(), shm: shared()}
	if o.readOnly {
		p.why = "--read-only"
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("uname: %w", err)
	}
	p.redact = redact.New([]string{unix.ByteSliceToString(name.Nodename[:]), hostName()}, users())
	if unix.ByteSliceToString(name.Release[:]) == gVisor {
		p.mps, p.why = false, "the kernel is that of gVisor, so this run only looks"
	}
	var err error
	if p.smi, err = settings.NewSMI(o.roots); err != nil {
		return nil, fmt.Errorf("there is no NVIDIA driver here: %w", err)
	}
	if p.before, err = p.smi.Read(ctx); err != nil {
		return nil, fmt.Errorf("the GPUs cannot be looked at: %w", err)
	}
	if len(p.before.GPUs) == 0 {
		return nil, errors.New("nvidia-smi lists no GPU")
	}
	if p.mps {
		if err := p.choose(); err != nil {
			return nil, err
		}
	}
	return p, p.folders()
}

func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	return name
}

// users are those who may have started this.
func users() []string {
	names := []string{os.Getenv("USER"), os.Getenv("LOGNAME"), os.Getenv("SUDO_USER"), filepath.Base(os.Getenv("HOME"))}
	if u, err := user.Current(); err == nil {
		names = append(names, u.Username)
	}
	return names
}

// choose takes a GPU that nobody uses, or refuses.
func (p *plan) choose() error {
	driver := filepath.Join(p.kubeletDir, "gpu.nvidia.com")
	if _, err := os.Stat(driver); !errors.Is(err, fs.ErrNotExist) {
		return refusedError{"a driver of a cluster keeps the GPUs of this node (" + driver + ")"}
	}
	var reasons []string
	for _, g := range p.before.GPUs {
		if p.options.gpu != "" && p.options.gpu != g.Index && p.options.gpu != g.UUID {
			continue
		}
		busy := g.Busy()
		if len(busy) == 0 {
			p.gpu = g
			return nil
		}
		reasons = append(reasons, fmt.Sprintf("GPU %s: %s", g.Index, strings.Join(busy, ", ")))
	}
	if len(reasons) == 0 {
		return fmt.Errorf("there is no GPU %s", p.options.gpu)
	}
	return refusedError{"somebody works here: " + strings.Join(reasons, "; ")}
}

func (p *plan) folders() error {
	if err := os.MkdirAll(p.out, 0o755); err != nil {
		return fmt.Errorf("make a folder for the archive: %w", err)
	}
	temporary := os.TempDir()
	const longest = 25 // sockets are made in it, whose paths are short
	if len(temporary) > longest {
		temporary = "/tmp"
	}
	work, err := os.MkdirTemp(temporary, "partage-")
	if err != nil {
		return fmt.Errorf("make a private folder: %w", err)
	}
	p.work, p.results = work, filepath.Join(work, "results")
	// Programs of other users go through it.
	return errors.Join(os.Chmod(work, 0o755), os.Mkdir(p.results, 0o700), os.Mkdir(filepath.Join(work, "bin"), 0o755))
}

// endTime is kept for what comes after the steps: the end of what is left of MPS, the
// comparison, and the archive, which takes what is left of it.
const (
	endTime     = 50 * time.Second
	sweepLimit  = 10 * time.Second
	compareTime = 30 * time.Second
)

// run takes all steps, and compares the settings however they end. It returns the exit code.
func (p *plan) run(ctx context.Context) (int, error) {
	defer func() { _ = os.RemoveAll(p.work) }()
	p.say("%d GPU(s); the archive goes to %s", len(p.before.GPUs), p.out)
	if !p.mps {
		p.say("no MPS: %s", p.why)
	}
	err := p.write("settings/before.txt", p.before.String())
	limited, cancel := context.WithDeadline(ctx, p.began.Add(p.budget-endTime))
	for _, s := range p.all() {
		p.take(limited, s)
	}
	cancel()
	ending := context.WithoutCancel(ctx) // it comes however the steps have ended
	p.sweep(ending)
	compared, compareErr := p.compare(ending)
	left := p.left()
	path, archiveErr := p.archive(ending, compared.String(), left)
	if left != "" {
		p.say("%s", left)
	}
	if archiveErr == nil {
		p.say("archive: %s", path)
	}
	p.say("%s", compared)
	if err := errors.Join(err, compareErr, archiveErr); err != nil {
		return exitUnusable, err
	}
	if len(compared.Changes) > 0 {
		return exitChanged, nil
	}
	if len(compared.Unknown) > 0 {
		return exitCannot, errors.New("not all settings could be compared")
	}
	for _, s := range p.steps {
		if !s.Finished {
			return exitUnusable, fmt.Errorf("%s: %s", s.Step, s.Text)
		}
	}
	return exitDone, nil
}

// sweep ends what a step that was killed has left of MPS.
func (p *plan) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, sweepLimit)
	defer cancel()
	err := errors.Join(trial.End(ctx, p.mpsFolder()), supervisor.EndUnsupervised(ctx, filepath.Join(p.workDir(), "partage-mps")))
	if err != nil {
		p.say("MPS GOES ON: %v", err)
	}
}

// workDir is where the conformance command has its daemon.
func (p *plan) workDir() string { return filepath.Join(p.work, "c") }

// mpsFolder is where the trials have their daemon.
func (p *plan) mpsFolder() string { return filepath.Join(p.work, "mps") }

func (p *plan) compare(ctx context.Context) (settings.Comparison, error) {
	ctx, cancel := context.WithTimeout(ctx, compareTime)
	defer cancel()
	after, err := p.smi.Read(ctx)
	if err != nil {
		return settings.Comparison{Unknown: []string{"all of them"}}, fmt.Errorf("read the settings after the run: %w", err)
	}
	compared := after.Compare(p.before)
	details, err := p.smi.Run(ctx, "-q") // for people to compare with that of the facts
	if err != nil {
		details += err.Error() + "\n"
	}
	return compared, errors.Join(p.write("settings/after.txt", after.String()), p.write("settings/nvidia-smi-q-after.txt", details))
}

// shared lists the files in the node's /dev/shm.
func shared() []string {
	entries, err := os.ReadDir("/dev/shm")
	if err != nil {
		return nil
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// left are files that came into the node's /dev/shm during the run. MPS makes some where this
// process may not have a /dev/shm of its own.
func (p *plan) left() string {
	added := slices.DeleteFunc(shared(), func(name string) bool { return slices.Contains(p.shm, name) })
	if len(added) == 0 {
		return ""
	}
	return "new in /dev/shm, perhaps of this run: " + strings.Join(added, ", ")
}

func (p *plan) say(format string, args ...any) {
	_, _ = fmt.Fprintf(p.stdout, format+"\n", args...)
}

// write writes a file of the results.
func (p *plan) write(name, text string) error {
	path := filepath.Join(p.results, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	return nil
}
