// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
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
	const namespaces = "names of namespaces with commas between them, or nothing"
	knowsMode := slices.Contains(nodelabels.Modes, nodelabels.Mode(c.nodeLabels))
	return errors.Join(
		c.validateRoots(),
		c.process.Validate(),
		c.validateNodeName(),
		c.validateClient(),
		command.Check("pod-uid", c.podUID, podUID.MatchString(c.podUID), "a UID such as 6ba7b810-9dad-11d1-80b4-00c04fd430c8, or nothing"),
		c.validateTimes(),
		c.validateMetrics(),
		command.CheckDirectory("cdi-root", c.cdiRoot, false),
		command.CheckDirectory("kubelet-plugins-dir", c.pluginsDir, true),
		command.CheckDirectory("kubelet-registrar-dir", c.registrarDir, true),
		command.CheckProgram("nvidia-cdi-hook", c.cdiHook),
		command.CheckProgram("partage-hook", c.hook),
		command.CheckDirectory("mps-dir", c.mpsDir, false),
		command.CheckDirectory("pod-logs-dir", c.podLogs, false),
		command.Check(ignoredNamespacesFlag, c.ignoredNamespaces, areNamespaces(strings.Split(c.ignoredNamespaces, ",")...), namespaces),
		command.Check(annotationNamespacesFlag, c.annotationNamespaces, areNamespaces(strings.Split(c.annotationNamespaces, ",")...), namespaces),
		command.Check("pod-namespace", c.podNamespace, areNamespaces(c.podNamespace), "the name of a namespace, or nothing"),
		c.validateSharing(),
		command.Check(nodeLabelsFlag, c.nodeLabels, knowsMode, fmt.Sprintf("%s, %s or %s", nodelabels.Never, nodelabels.Write, nodelabels.Remove)),
	)
}

// podUID limits the length because socket names contain the UID.
var podUID = regexp.MustCompile("^[0-9A-Za-z-]{0,36}$")

// areNamespaces reports whether all texts are names of namespaces, or the only one is empty.
func areNamespaces(texts ...string) bool {
	isWrong := func(text string) bool { return len(validation.IsDNS1123Label(text)) > 0 }
	return len(texts) == 1 && texts[0] == "" || !slices.ContainsFunc(texts, isWrong)
}

// validateSlices checks the flags that the slices sub-command uses.
func (c *config) validateSlices() error {
	return errors.Join(c.validateRoots(), c.process.ValidateLogging(), c.validateNodeName(), c.validateSharing())
}

func (c *config) validateSharing() error {
	return errors.Join(
		command.CheckSELinux(c.seLinux), command.CheckPath("policy-file", c.policyFile), command.CheckPath("interposer-library", c.interposer))
}

func (c *config) validateRoots() error {
	return errors.Join(
		// A driver container may install it later.
		command.CheckDirectory("driver-root", c.driverRoot, false),
		command.CheckDirectory("proc-root", c.procRoot, true),
		command.CheckDirectory("sys-root", c.sysRoot, true),
		command.CheckDirectory("host-driver-root", cmp.Or(c.hostDriverRoot, "/"), false),
		command.CheckDirectory("host-dev-root", cmp.Or(c.hostDevRoot, "/"), false),
		command.CheckDevRoot(c.devRoot),
		command.Check("host-dev-root", c.hostDevRoot, c.devRoot != host.AutoDev || c.hostDevRoot == "", "nothing, since --dev-root is "+host.AutoDev),
	)
}

func (c *config) validateNodeName() error {
	if c.nodeName == "" {
		return command.Wrong("node-name", "", "the name of the Node object that this machine is")
	}
	return command.Check("node-name", c.nodeName, len(validation.IsDNS1123Subdomain(c.nodeName)) == 0,
		"the name of a Node, which has lower-case letters, digits, dashes and dots only")
}

func (c *config) validateClient() error {
	info, err := os.Stat(c.kubeconfig)
	return errors.Join(
		command.Check("kubeconfig", c.kubeconfig, c.kubeconfig == "" || err == nil && !info.IsDir(),
			"a file that exists, or nothing for the pod's service account"),
		command.Check("kube-api-qps", c.qps, c.qps > 0, "more than 0"),
		command.Check("kube-api-burst", c.burst, c.burst >= 1, "1 or more"),
	)
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
