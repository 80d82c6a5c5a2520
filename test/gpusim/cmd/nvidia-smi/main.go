// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command nvidia-smi stands in for NVIDIA's tool on a simulated machine. It
// knows the part that GPU drivers for Kubernetes and their users call, prints
// what the real one prints there and ends with the same exit codes. Everything
// it shows comes through NVML, except the compute policy, for which NVML has no
// call.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// Exit codes, from the manual page of nvidia-smi.
const (
	exitOK           = 0
	exitUsage        = 2
	exitNotSupported = 3
	exitPermission   = 4
	exitNotFound     = 6
	exitNoDriver     = 9
	exitNoLibrary    = 12
	exitLost         = 15
	exitOther        = 255
)

// failure is an end that is not success: what to print and the exit code.
type failure struct {
	text string
	code int
}

func (f *failure) Error() string { return f.text }

func fail(code int, format string, args ...any) error {
	return &failure{fmt.Sprintf(format, args...), code}
}

const usage = `nvidia-smi of a simulated GPU machine. It knows:

  nvidia-smi [-i GPU]                        a summary, with processes
  nvidia-smi --query-gpu=FIELD,... --format=csv[,noheader][,nounits] [-i GPU]
  nvidia-smi --query-compute-apps=FIELD,... --format=csv[,noheader][,nounits] [-i GPU]
  nvidia-smi -L [-i GPU]                     list GPUs and MIG devices
  nvidia-smi -q [-i GPU]                     details
  nvidia-smi -c MODE [-i GPU]                set the compute mode
  nvidia-smi -mig 0|1 [-i GPU]               set the MIG mode
  nvidia-smi --gpu-reset [-i GPU]            reset GPUs that nobody uses
  nvidia-smi --version                       the versions of the driver and its parts
  nvidia-smi mig -lgip|-lgipp|-lgi|-lci [-i GPU]
  nvidia-smi mig -cgi PROFILE[:START],... [-C] [-i GPU]
                                             create GPU instances; -C: each with a compute instance
  nvidia-smi mig -dci [-gi ID] [-ci ID] [-i GPU]
  nvidia-smi mig -dgi [-gi ID] [-i GPU]      destroy compute or GPU instances
  nvidia-smi topo -m [-i GPU]                how GPUs reach one another
  nvidia-smi compute-policy -l [-i GPU]
  nvidia-smi compute-policy --set-timeslice 0|1|2|3 [-i GPU]

GPU is an index, a UUID or a PCI bus id, PROFILE a name or an ID of -lgip; several
are separated by commas.
`

// run is the whole program; it returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	c, err := parse(args)
	if err == nil && c.verb == "help" {
		fmt.Fprint(stdout, usage)
		return exitOK
	}
	if err == nil {
		err = struck(c, func() error { return execute(c, stdout) })
	}
	if err == nil {
		return exitOK
	}
	code := exitOther
	if f := new(failure); errors.As(err, &f) {
		code = f.code
	}
	// The real tool writes its complaints to the standard output.
	fmt.Fprintln(stdout, err)
	if code == exitUsage {
		fmt.Fprint(stderr, usage)
	}
	return code
}

func execute(c *command, out io.Writer) error {
	s, err := open()
	if err != nil {
		return err
	}
	defer s.close()
	if c.verb == "--version" {
		return s.versions(out)
	}
	gpus, err := s.gpus(c)
	if err != nil {
		return err
	}
	return verbs[c.verb](s, gpus, c, out)
}

// verbs are what can be asked for, by the option that asks.
var verbs = map[string]func(s *session, gpus []gpu, c *command, out io.Writer) error{
	"summary":         summary,
	"-L":              list,
	"-q":              query,
	"-c":              setComputeMode,
	"-mig":            setMIGMode,
	"-r":              resetGPUs,
	"-lgip":           listProfiles,
	"-lgipp":          listPlacements,
	"-lgi":            listInstances,
	"-lci":            listComputeInstances,
	"-cgi":            createInstances,
	"-dgi":            destroyInstances,
	"-dci":            destroyComputeInstances,
	"-m":              topology,
	"-l":              listPolicies,
	"--set-timeslice": setTimeSlice,

	"--query-gpu":          queryGPU,
	"--query-compute-apps": queryApplications,
}
