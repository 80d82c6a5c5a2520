// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command nvidia-cuda-mps-control stands in for NVIDIA's program of that name on a
// simulated machine: the control daemon with -d or -f, else the tool that sends
// commands to it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/partage-dev/partage/test/gpusim/mps"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

const usage = `usage: nvidia-cuda-mps-control [-d | -f] [-multiuser-server]

  -d                 start the control daemon in the background
  -f                 start it in the foreground
  -multiuser-server  one server for clients of all users

Without -d and -f: send commands from the standard input to the daemon.
`

// readyVariable names the file descriptor on which a daemon in the background says
// that it is there, or why not.
const readyVariable = "GPUSIM_MPS_READY_FD"

// options are the command line.
type options struct{ foreground, background, multiUser, help bool }

func parse(args []string) (o options, err error) {
	for _, arg := range args {
		switch arg {
		case "-d":
			o.background = true
		case "-f":
			o.foreground = true
		case "-multiuser-server":
			o.multiUser = true
		case "-h", "--help":
			o.help = true
		default:
			return o, fmt.Errorf("Unrecognized option: %s\n%s", arg, usage) //nolint:staticcheck // text for the user
		}
	}
	if o.foreground && o.background || o.multiUser && !o.foreground && !o.background {
		return o, errors.New(strings.TrimSpace(usage))
	}
	return o, nil
}

func run(args []string) int {
	o, err := parse(args)
	switch {
	case err != nil:
	case o.help:
		fmt.Print(usage)
	case o.foreground:
		err = serve(mps.DaemonOptions{MultiUser: o.multiUser, Log: os.Stderr}, func(error) error { return nil })
	case o.background && os.Getenv(readyVariable) != "":
		err = serve(mps.DaemonOptions{MultiUser: o.multiUser}, ready)
	case o.background:
		err = detach(args)
	default:
		err = mps.Control(context.Background(), mps.PipeDirectory(), os.Stdin, os.Stdout)
	}
	if err == nil {
		return 0
	}
	if !errors.Is(err, mps.ErrCommand) {
		fmt.Println(err)
	}
	return 1
}

// serve runs the daemon until it ends. It reports to started how its start went.
func serve(o mps.DaemonOptions, started func(error) error) error {
	d, err := mps.StartDaemon(o)
	if tellErr := started(err); err != nil || tellErr != nil || d == nil {
		return errors.Join(err, tellErr)
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		<-signals
		d.Stop()
	}()
	d.Serve()
	return nil
}

// readyFD is the first file that exec.Cmd passes on.
const readyFD = 3

// ready reports to the process that waits in detach.
func ready(err error) error {
	f := os.NewFile(readyFD, "ready")
	_ = os.Unsetenv(readyVariable) // servers need not know
	text := ""
	if err != nil {
		text = err.Error()
	}
	_, writeErr := io.WriteString(f, text+"\n")
	return errors.Join(writeErr, f.Close())
}

// detach starts the daemon in a session of its own and waits until it serves.
func detach(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, args...) //nolint:noctx // it outlives this
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", readyVariable, readyFD))
	cmd.ExtraFiles = []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	_ = w.Close()
	text, err := io.ReadAll(r)
	switch {
	case err != nil:
		return err
	case len(text) == 0:
		return errors.New("MPS control daemon ended during its start")
	case len(text) > 1:
		return errors.New(string(text[:len(text)-1]))
	}
	return nil
}
