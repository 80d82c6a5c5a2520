// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"time"

	"github.com/urfave/cli/v3"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/partage-dev/partage/pkg/driver/claim"
	"github.com/partage-dev/partage/pkg/driver/metrics"
	"github.com/partage-dev/partage/pkg/driver/plugin/nodelabels"
	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/command"
	"github.com/partage-dev/partage/pkg/node/host"
)

// config holds the value of every flag.
type config struct {
	nodeName   string
	kubeconfig string
	qps        float64
	burst      int

	driverRoot, devRoot         string
	procRoot, sysRoot           string
	hostDriverRoot, hostDevRoot string

	cdiRoot      string
	cdiHook      string
	pluginsDir   string
	registrarDir string
	podResources string
	podName      string
	podNamespace string
	podLogs      string
	mpsDir       string
	hook         string
	policyFile   string
	interposer   string
	seLinux      string
	podUID       string

	callLimit    time.Duration
	pollInterval time.Duration
	orphanGrace  time.Duration
	policySpread time.Duration

	claimCheckInterval time.Duration

	ignoredNamespaces    string
	annotationNamespaces string

	claimStatus, deviceMetadata bool
	memoryLimits                bool
	nodeLabels                  string
	metricsAddress              string
	nvidiaMetricsAddress        string
	nvidiaMetricsPath           string
	sampleInterval              time.Duration

	process command.Process

	partitionable, consumable bool
}

const (
	metricsAddressFlag       = "metrics-address"
	nvidiaMetricsAddressFlag = "nvidia-metrics-address"
	nvidiaMetricsPathFlag    = "nvidia-metrics-path"
	sampleIntervalFlag       = "sample-interval"
	nodeLabelsFlag           = "node-labels"

	ignoredNamespacesFlag = "ignored-namespaces"
	// ignoredNamespaces are those of the GPU operator, on OpenShift too, of monitoring stacks, and of what nodes need.
	ignoredNamespaces = "gpu-operator,nvidia-gpu-operator,monitoring,kube-system"

	annotationNamespacesFlag = "annotation-namespaces"
)

const (
	categoryCluster = "Cluster"
	categoryPaths   = "Paths on the node"
	categorySharing = "Sharing"
	categoryPods    = "Claims and pods"
	categoryTimes   = "Times"
	categoryProcess = "Process"
)

// flags returns the flags of the driver itself. Those for paths and logging apply
// to its sub-commands too.
func (c *config) flags() []cli.Flag {
	flags := []cli.Flag{
		command.String(categoryCluster, "node-name", "", &c.nodeName,
			"name of this machine's Node object; required, except for slices, which defaults to the host name"),
		command.String(categoryCluster, "kubeconfig", "", &c.kubeconfig, "kubeconfig file for the API server; empty: the pod's service account"),
		&cli.FloatFlag{
			Name: "kube-api-qps", Category: categoryCluster, Value: 50, Destination: &c.qps, Sources: command.Env("kube-api-qps"),
			Usage: "sustained rate of requests to the API server, per second; every claim that is prepared needs one. What can wait has a small rate of its own",
		},
		command.Int(categoryCluster, "kube-api-burst", 100, &c.burst,
			"burst of requests to the API server"),

		command.String(categoryPaths, "driver-root", "/", &c.driverRoot,
			"root of the tree that holds the NVIDIA driver's libraries and programs, as this process sees it"),
		command.String(categoryPaths, "dev-root", host.AutoDev, &c.devRoot,
			"root of the tree that holds dev/nvidia0, as this process sees it; "+host.AutoDev+": the driver root, or / if that has more of the driver's device nodes"),
		command.String(categoryPaths, "proc-root", "/proc", &c.procRoot,
			"directory that holds driver/nvidia/capabilities and devices"),
		command.String(categoryPaths, "sys-root", "/sys", &c.sysRoot,
			"directory that holds bus/pci/devices"),
		command.String(categoryPaths, "host-driver-root", "", &c.hostDriverRoot,
			"the driver root as the container runtime sees it; empty: the same path"),
		command.String(categoryPaths, "host-dev-root", "", &c.hostDevRoot,
			"the device root as the container runtime sees it; empty: the same path. Not with --dev-root="+host.AutoDev),
		command.String(categoryPaths, "cdi-root", "/var/run/cdi", &c.cdiRoot,
			"directory for CDI spec files, which the container runtime must be watching"),
		command.String(categoryPaths, "nvidia-cdi-hook", "/usr/bin/nvidia-cdi-hook", &c.cdiHook,
			"the nvidia-cdi-hook program; it is copied to where the container runtime can run it"),
		command.String(categoryPaths, "kubelet-plugins-dir", kubeletplugin.KubeletPluginsDir, &c.pluginsDir,
			"the kubelet's directory for plugin data; must be the same path inside and outside the container"),
		command.String(categoryPaths, "kubelet-registrar-dir", kubeletplugin.KubeletRegistryDir, &c.registrarDir,
			"the kubelet's directory for registration sockets; must be the same path inside and outside the container"),
		command.String(categoryPaths, "pod-resources-socket", "/var/lib/kubelet/pod-resources/kubelet.sock", &c.podResources,
			"the kubelet's socket that tells which devices pods have, as this process sees it; from it follows which GPUs another driver of the same name has given away"),
		command.String(categoryPaths, "pod-logs-dir", host.DefaultPodLogs, &c.podLogs,
			"the kubelet's directory for the logs of pods, as this process sees it; its folders tell the names of pods without a claim"),
		command.String(categoryPaths, "mps-dir", "/run/partage/mps", &c.mpsDir,
			"the MPS supervisor's directory; must be the same path inside and outside the container"),
		command.String(categoryPaths, "partage-hook", "/usr/bin/partage-hook", &c.hook,
			"the partage-hook program, which checks limits before a container starts; it is copied like nvidia-cdi-hook"),

		command.String(categorySharing, "policy-file", "", &c.policyFile,
			"the SharingPolicy, which may change at any time; empty: every kind of device on every GPU"),
		command.String(categorySharing, "interposer-library", "", &c.interposer,
			"library on the host that is loaded into containers with time-slice shares to limit their memory and multiprocessors; empty: no limits"),
		command.Bool(categorySharing, "memory-limits", true, &c.memoryLimits,
			"have the NVIDIA driver limit the memory of containers with shares of GPUs where it can: from driver 615 on, with cgroups of version 2"),
		command.SELinux(categorySharing, &c.seLinux),

		command.Bool(categoryPods, "claim-status", true, &c.claimStatus,
			"write into the status of claims which GPU or MIG device they have, with what limits, and whether it is ready"),
		command.Bool(categoryPods, "device-metadata", true, &c.deviceMetadata,
			"mount a file into containers from which programs can read about their devices, below /var/run/kubernetes.io/dra-device-attributes"),
		command.String(categoryPods, ignoredNamespacesFlag, ignoredNamespaces, &c.ignoredNamespaces,
			"namespaces, with commas between them, whose pods may have GPUs open without a claim, as monitoring agents do: they do not keep a GPU from being given out. That of the driver's pod is always one of them"),
		command.String(categoryPods, annotationNamespacesFlag, "", &c.annotationNamespaces,
			"namespaces, with commas between them, outside of which an admission policy refuses annotations by which NVIDIA's NRI plugin gives GPUs to pods; empty: there is none"),
		command.String(categoryPods, nodeLabelsFlag, string(nodelabels.Never), &c.nodeLabels,
			"labels of the node about its GPUs, as GPU feature discovery writes them: "+string(nodelabels.Write)+", "+string(nodelabels.Remove)+" those that were written, or "+string(nodelabels.Never)+", which leaves the node alone"),

		command.Duration(categoryTimes, "nvml-call-limit", call.DefaultLimit, &c.callLimit,
			"how long one call of the NVIDIA driver may take before its GPU counts as not responding"),
		command.Duration(categoryTimes, "poll-interval", 10*time.Second, &c.pollInterval,
			"time between two readings of the GPUs, and two attempts to clean up after failures"),
		command.Duration(categoryTimes, "claim-check-interval", claim.DefaultCheckInterval, &c.claimCheckInterval,
			"time in which the API server is asked once about each prepared claim, in case that it no longer exists; sooner about one that is in the way of another"),
		command.Duration(categoryTimes, "orphan-grace", 2*time.Minute, &c.orphanGrace,
			"how long a claim must be gone from the cluster before its devices are released without a request of the kubelet"),
		command.Duration(categoryTimes, "policy-spread", 2*time.Minute, &c.policySpread,
			"over how long the nodes of a cluster spread a change of the policy: each follows it after a random time up to this; 0s: none of them waits"),

		command.String(categoryProcess, "pod-name", "", &c.podName,
			"name of the driver's pod; a kubelet that does not list it has not read its pods yet. Empty: any list of pods counts"),
		command.String(categoryProcess, "pod-namespace", "", &c.podNamespace,
			"namespace of the driver's pod, whose pods are never taken for users of a GPU; empty: only --"+ignoredNamespacesFlag+" counts"),
		command.String(categoryProcess, "pod-uid", "", &c.podUID,
			"UID of the driver's pod; lets an old and a new pod overlap during a rolling update"),
	}
	return slices.Concat(flags, c.metricsFlags(), c.process.Flags(categoryProcess))
}

func (c *config) metricsFlags() []cli.Flag {
	return []cli.Flag{
		command.String(categoryProcess, metricsAddressFlag, "", &c.metricsAddress,
			"address, such as :9485, on which Prometheus finds metrics at "+metrics.Path+", without TLS; empty: off"),
		command.String(categoryProcess, nvidiaMetricsAddressFlag, "", &c.nvidiaMetricsAddress,
			"address, such as :8080, on which Prometheus finds those of the metrics that have the names of NVIDIA's DRA driver, too; empty, or without --"+metricsAddressFlag+": off"),
		command.String(categoryProcess, nvidiaMetricsPathFlag, metrics.Path, &c.nvidiaMetricsPath,
			"path of these metrics at that address"),
		command.Duration(categoryTimes, sampleIntervalFlag, 15*time.Second, &c.sampleInterval,
			"time between two readings of what is used of a GPU, for metrics"),
	}
}

func (c *config) slicesFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{
			Name: "partitionable-devices", Value: true, Destination: &c.partitionable,
			Usage: "the cluster has the feature gate DRAPartitionableDevices enabled, the default since Kubernetes 1.36",
		},
		&cli.BoolFlag{
			Name: "consumable-capacity", Value: true, Destination: &c.consumable,
			Usage: "the cluster has the feature gate DRAConsumableCapacity enabled, the default since Kubernetes 1.36",
		},
	}
}
