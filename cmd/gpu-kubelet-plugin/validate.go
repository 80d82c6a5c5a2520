// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/host"
)

// validate checks the flags of the driver. The error names every wrong flag, its
// value and what would be right.
func (c *config) validate() error {
	return errors.Join(
		c.validateRoots(),
		c.validateLogging(),
		c.validateNodeName(),
		c.validateClient(),
		c.validateProcess(),
		c.validateTimes(),
		directory("cdi-root", c.cdiRoot, false),
		directory("kubelet-plugins-dir", c.pluginsDir, true),
		directory("kubelet-registrar-dir", c.registrarDir, true),
		program("nvidia-cdi-hook", c.cdiHook),
		program("mps-supervisor-program", c.supervisor),
		directory("mps-dir", c.mpsDir, false),
		c.validateSharing(),
	)
}

// validateSlices checks the flags that the slices sub-command uses.
func (c *config) validateSlices() error {
	return errors.Join(c.validateRoots(), c.validateLogging(), c.validateNodeName(), c.validateSharing())
}

func (c *config) validateSharing() error {
	var errs []error
	for flag, path := range map[string]string{"policy-file": c.policyFile, "interposer-library": c.interposer} {
		if path != "" && !filepath.IsAbs(path) {
			errs = append(errs, wrong(flag, path, "an absolute path, or nothing"))
		}
	}
	return errors.Join(errs...)
}

func wrong(flag string, value any, want string) error {
	variable := envName(flag)
	if flag == "v" {
		variable = "LOG_LEVEL"
	}
	return fmt.Errorf("--%s (%s) is %q: want %s", flag, variable, fmt.Sprint(value), want)
}

func (c *config) validateRoots() error {
	errs := []error{
		// The driver may come later, in a container of its own.
		directory("driver-root", c.driverRoot, false),
		directory("proc-root", c.procRoot, true),
		directory("sys-root", c.sysRoot, true),
	}
	for flag, path := range map[string]string{
		"dev-root": c.devRoot, "host-driver-root": c.hostDriverRoot, "host-dev-root": c.hostDevRoot,
	} {
		if path != "" {
			errs = append(errs, directory(flag, path, false))
		}
	}
	return errors.Join(errs...)
}

func (c *config) validateLogging() error {
	var errs []error
	if c.verbosity < 0 {
		errs = append(errs, wrong("v", c.verbosity, "0 or more"))
	}
	if c.loggingFormat != "text" && c.loggingFormat != "json" {
		errs = append(errs, wrong("logging-format", c.loggingFormat, "text or json"))
	}
	return errors.Join(errs...)
}

func (c *config) validateNodeName() error {
	if c.nodeName == "" {
		return wrong("node-name", "", "the name of the Node object that this machine is")
	}
	if problems := validation.IsDNS1123Subdomain(c.nodeName); len(problems) > 0 {
		return wrong("node-name", c.nodeName, "the name of a Node, which has lower-case letters, digits, dashes and dots only")
	}
	return nil
}

func (c *config) validateClient() error {
	var errs []error
	if c.kubeconfig != "" {
		if info, err := os.Stat(c.kubeconfig); err != nil || info.IsDir() {
			errs = append(errs, wrong("kubeconfig", c.kubeconfig, "a file that exists, or nothing for the pod's service account"))
		}
	}
	if c.qps <= 0 {
		errs = append(errs, wrong("kube-api-qps", c.qps, "more than 0"))
	}
	if c.burst < 1 {
		errs = append(errs, wrong("kube-api-burst", c.burst, "1 or more"))
	}
	return errors.Join(errs...)
}

// The UID becomes part of socket names, which have little room.
var podUID = regexp.MustCompile("^[0-9A-Za-z-]{1,36}$")

func (c *config) validateProcess() error {
	var errs []error
	if c.podUID != "" && !podUID.MatchString(c.podUID) {
		errs = append(errs, wrong("pod-uid", c.podUID, "a UID such as 6ba7b810-9dad-11d1-80b4-00c04fd430c8, or nothing"))
	}
	if c.healthPort < 0 || c.healthPort > 65535 {
		errs = append(errs, wrong("health-port", c.healthPort, "a port between 1 and 65535, or 0 for none"))
	}
	return errors.Join(errs...)
}

const (
	// kubeletLimit is how long the kubelet waits for a call.
	kubeletLimit = 45 * time.Second
	// shortest keeps a typing error from making the driver do nothing else.
	shortest = 50 * time.Millisecond
	longest  = time.Hour
)

func (c *config) validateTimes() error {
	var errs []error
	for _, flag := range []struct {
		name     string
		value    time.Duration
		from, to time.Duration
	}{
		{"nvml-call-limit", c.callLimit, shortest, kubeletLimit},
		{"poll-interval", c.pollInterval, shortest, longest},
		{"reconcile-interval", c.reconcileInterval, shortest, longest},
		{"orphan-grace", c.orphanGrace, shortest, 24 * longest},
	} {
		if flag.value < flag.from || flag.value > flag.to {
			errs = append(errs, wrong(flag.name, flag.value, fmt.Sprintf("a time from %s to %s", flag.from, flag.to)))
		}
	}
	return errors.Join(errs...)
}

func directory(flag, path string, mustExist bool) error {
	if !filepath.IsAbs(path) {
		return wrong(flag, path, "an absolute path")
	}
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) && !mustExist {
		return nil
	}
	if err != nil || !info.IsDir() {
		return wrong(flag, path, "a directory that exists")
	}
	return nil
}

func program(flag, path string) error {
	if !filepath.IsAbs(path) {
		return wrong(flag, path, "an absolute path")
	}
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return wrong(flag, path, "a program that exists and may be executed")
	}
	return nil
}

// roots fills in the defaults that depend on what is on the machine now.
func (c *config) roots() host.Roots {
	r := host.Roots{
		Driver: c.driverRoot, Dev: c.devRoot, Proc: c.procRoot, Sys: c.sysRoot,
		HostDriver: c.hostDriverRoot, HostDev: c.hostDevRoot,
	}
	if r.Dev == "" {
		r.Dev = defaultDevRoot(r.Driver)
	}
	if r.HostDriver == "" {
		r.HostDriver = r.Driver
	}
	if r.HostDev == "" {
		r.HostDev = r.Dev
		if r.Dev == r.Driver {
			r.HostDev = r.HostDriver
		}
	}
	return r
}

func defaultDevRoot(driverRoot string) string {
	if _, err := os.Stat(filepath.Join(driverRoot, "dev/nvidiactl")); err == nil {
		return driverRoot
	}
	return "/"
}
