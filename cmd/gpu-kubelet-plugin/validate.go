// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/driver/plugin/nodelabels"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/host"
)

// validate checks the flags of the driver. The error names every wrong flag, its
// value and what is expected.
func (c *config) validate() error {
	return errors.Join(
		c.validateRoots(),
		c.process.Validate(),
		c.validateNodeName(),
		c.validateClient(),
		c.validatePodUID(),
		c.validateTimes(),
		c.validateMetrics(),
		command.CheckDirectory("cdi-root", c.cdiRoot, false),
		command.CheckDirectory("kubelet-plugins-dir", c.pluginsDir, true),
		command.CheckDirectory("kubelet-registrar-dir", c.registrarDir, true),
		command.CheckProgram("nvidia-cdi-hook", c.cdiHook),
		command.CheckProgram("partage-hook", c.hook),
		command.CheckDirectory("mps-dir", c.mpsDir, false),
		command.CheckDirectory("pod-logs-dir", c.podLogs, false),
		c.validateNamespaces(),
		c.validateSharing(),
		c.validateNodeLabels(),
	)
}

func (c *config) validateNodeLabels() error {
	if slices.Contains(nodelabels.Modes, nodelabels.Mode(c.nodeLabels)) {
		return nil
	}
	return command.Wrong(nodeLabelsFlag, c.nodeLabels, fmt.Sprintf("%s, %s or %s", nodelabels.Never, nodelabels.Write, nodelabels.Remove))
}

func (c *config) validateNamespaces() error {
	var errs []error
	for flag, namespaces := range map[string]string{ignoredNamespacesFlag: c.ignoredNamespaces, annotationNamespacesFlag: c.annotationNamespaces} {
		isWrong := func(name string) bool { return len(validation.IsDNS1123Label(name)) > 0 }
		if namespaces != "" && slices.ContainsFunc(strings.Split(namespaces, ","), isWrong) {
			errs = append(errs, command.Wrong(flag, namespaces, "names of namespaces with commas between them, or nothing"))
		}
	}
	if c.podNamespace != "" && len(validation.IsDNS1123Label(c.podNamespace)) > 0 {
		errs = append(errs, command.Wrong("pod-namespace", c.podNamespace, "the name of a namespace, or nothing"))
	}
	return errors.Join(errs...)
}

// validateSlices checks the flags that the slices sub-command uses.
func (c *config) validateSlices() error {
	return errors.Join(c.validateRoots(), c.process.ValidateLogging(), c.validateNodeName(), c.validateSharing())
}

func (c *config) validateSharing() error {
	errs := []error{command.CheckSELinux(c.seLinux)}
	for flag, path := range map[string]string{"policy-file": c.policyFile, "interposer-library": c.interposer} {
		if path != "" && !filepath.IsAbs(path) {
			errs = append(errs, command.Wrong(flag, path, "an absolute path, or nothing"))
		}
	}
	return errors.Join(errs...)
}

func (c *config) validateRoots() error {
	errs := []error{
		// A driver container may install it later.
		command.CheckDirectory("driver-root", c.driverRoot, false),
		command.CheckDirectory("proc-root", c.procRoot, true),
		command.CheckDirectory("sys-root", c.sysRoot, true),
	}
	for flag, path := range map[string]string{"host-driver-root": c.hostDriverRoot, "host-dev-root": c.hostDevRoot} {
		if path != "" {
			errs = append(errs, command.CheckDirectory(flag, path, false))
		}
	}
	errs = append(errs, command.CheckDevRoot(c.devRoot))
	if c.devRoot == host.AutoDev && c.hostDevRoot != "" {
		errs = append(errs, command.Wrong("host-dev-root", c.hostDevRoot, "nothing, since --dev-root is "+host.AutoDev))
	}
	return errors.Join(errs...)
}

func (c *config) validateNodeName() error {
	if c.nodeName == "" {
		return command.Wrong("node-name", "", "the name of the Node object that this machine is")
	}
	if problems := validation.IsDNS1123Subdomain(c.nodeName); len(problems) > 0 {
		return command.Wrong("node-name", c.nodeName, "the name of a Node, which has lower-case letters, digits, dashes and dots only")
	}
	return nil
}

func (c *config) validateClient() error {
	var errs []error
	if c.kubeconfig != "" {
		if info, err := os.Stat(c.kubeconfig); err != nil || info.IsDir() {
			errs = append(errs, command.Wrong("kubeconfig", c.kubeconfig, "a file that exists, or nothing for the pod's service account"))
		}
	}
	if c.qps <= 0 {
		errs = append(errs, command.Wrong("kube-api-qps", c.qps, "more than 0"))
	}
	if c.burst < 1 {
		errs = append(errs, command.Wrong("kube-api-burst", c.burst, "1 or more"))
	}
	return errors.Join(errs...)
}

// podUID limits the length because socket names contain the UID.
var podUID = regexp.MustCompile("^[0-9A-Za-z-]{1,36}$")

func (c *config) validatePodUID() error {
	if c.podUID != "" && !podUID.MatchString(c.podUID) {
		return command.Wrong("pod-uid", c.podUID, "a UID such as 6ba7b810-9dad-11d1-80b4-00c04fd430c8, or nothing")
	}
	return nil
}

const (
	// longestCall is longer than any call of a driver that will answer.
	longestCall = 10 * time.Minute
	// shortest guards against a typing error that would keep the driver busy with it.
	shortest = 50 * time.Millisecond
	longest  = time.Hour
)

func (c *config) validateTimes() error {
	return errors.Join(
		command.CheckDuration("nvml-call-limit", c.callLimit, call.SlowAfter, longestCall),
		command.CheckDuration("poll-interval", c.pollInterval, shortest, longest),
		command.CheckDuration(sampleIntervalFlag, c.sampleInterval, shortest, longest),
		command.CheckDuration("orphan-grace", c.orphanGrace, shortest, 24*longest),
		command.CheckDuration("policy-spread", c.policySpread, 0, longest),
		command.CheckDuration("claim-check-interval", c.claimCheckInterval, shortest, 24*longest),
	)
}

func (c *config) roots() host.Roots {
	return host.Roots{
		Driver: c.driverRoot, Dev: c.devRoot, Proc: c.procRoot, Sys: c.sysRoot,
		HostDriver: c.hostDriverRoot, HostDev: c.hostDevRoot, PodLogs: c.podLogs,
	}.Complete()
}
