// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/urfave/cli/v3"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/partage-dev/partage/pkg/command"
)

// config is the value of every flag. Empty paths are filled in by resolve.
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
	mpsDir       string
	supervisor   string
	policyFile   string
	interposer   string
	podUID       string

	callLimit         time.Duration
	pollInterval      time.Duration
	reconcileInterval time.Duration
	orphanGrace       time.Duration

	process command.Process

	partitionable, consumable bool
}

const (
	categoryCluster = "Cluster"
	categoryPaths   = "Paths on the node"
	categorySharing = "Sharing"
	categoryTimes   = "Times"
	categoryProcess = "Process"
)

// flags returns the flags of the driver itself; the ones about paths and logging
// also hold for its sub-commands.
func (c *config) flags() []cli.Flag {
	flags := []cli.Flag{
		command.String(categoryCluster, "node-name", "", &c.nodeName,
			"name of the Node object that this machine is; mandatory, except for slices, which takes the host name"),
		command.String(categoryCluster, "kubeconfig", "", &c.kubeconfig,
			"file that says how to reach the API server; empty: the pod's service account"),
		&cli.FloatFlag{
			Name: "kube-api-qps", Category: categoryCluster, Value: 50, Destination: &c.qps, Sources: command.Env("kube-api-qps"),
			Usage: "requests per second to the API server that are allowed for long; one is needed for every claim that is prepared",
		},
		command.Int(categoryCluster, "kube-api-burst", 100, &c.burst,
			"requests to the API server that may be sent at once"),

		command.String(categoryPaths, "driver-root", "/", &c.driverRoot,
			"root of the tree that holds the NVIDIA driver's libraries and programs, as this process sees it"),
		command.String(categoryPaths, "dev-root", "", &c.devRoot,
			"root of the tree that holds dev/nvidia0, as this process sees it; empty: the driver root if it has dev/nvidiactl, else /"),
		command.String(categoryPaths, "proc-root", "/proc", &c.procRoot,
			"directory that holds driver/nvidia/capabilities and devices"),
		command.String(categoryPaths, "sys-root", "/sys", &c.sysRoot,
			"directory that holds bus/pci/devices"),
		command.String(categoryPaths, "host-driver-root", "", &c.hostDriverRoot,
			"the driver root as the container runtime sees it; empty: the same path"),
		command.String(categoryPaths, "host-dev-root", "", &c.hostDevRoot,
			"the device root as the container runtime sees it; empty: the host driver root where the driver root holds the devices, else the same path"),
		command.String(categoryPaths, "cdi-root", "/var/run/cdi", &c.cdiRoot,
			"directory for CDI spec files, which the container runtime must be watching"),
		command.String(categoryPaths, "nvidia-cdi-hook", "/usr/bin/nvidia-cdi-hook", &c.cdiHook,
			"the nvidia-cdi-hook program; it is copied to where the container runtime can run it"),
		command.String(categoryPaths, "kubelet-plugins-dir", kubeletplugin.KubeletPluginsDir, &c.pluginsDir,
			"the kubelet's directory for plugin data; must be the same path inside and outside of the container"),
		command.String(categoryPaths, "kubelet-registrar-dir", kubeletplugin.KubeletRegistryDir, &c.registrarDir,
			"the kubelet's directory for registration sockets; must be the same path inside and outside of the container"),
		command.String(categoryPaths, "mps-dir", "/run/partage/mps", &c.mpsDir,
			"the MPS supervisor's directory; must be the same path inside and outside of the container"),
		command.String(categoryPaths, "mps-supervisor-program", "/usr/bin/mps-supervisor", &c.supervisor,
			"the mps-supervisor program; it is copied to where the container runtime can run it as a hook"),

		command.String(categorySharing, "policy-file", "", &c.policyFile,
			"the SharingPolicy, which may change at any time; empty: every kind of device on every GPU"),
		command.String(categorySharing, "interposer-library", "", &c.interposer,
			"library on the host that limits memory and multiprocessors from inside of containers with time-slice shares; empty: they have no limits"),

		command.Duration(categoryTimes, "nvml-call-limit", 25*time.Second, &c.callLimit,
			"how long one call of the NVIDIA driver may take before it is left behind and its GPU counts as not responding"),
		command.Duration(categoryTimes, "poll-interval", 10*time.Second, &c.pollInterval,
			"time between two looks at the GPUs"),
		command.Duration(categoryTimes, "reconcile-interval", 30*time.Second, &c.reconcileInterval,
			"time between two attempts to clean up what failed and what belongs to no claim of the cluster"),
		command.Duration(categoryTimes, "orphan-grace", 2*time.Minute, &c.orphanGrace,
			"how long a claim must be gone from the cluster before its devices are released although the kubelet has not asked for it"),

		command.String(categoryProcess, "pod-uid", "", &c.podUID,
			"UID of the driver's pod; lets an old and a new pod overlap during a rolling update"),
	}
	return append(flags, c.process.Flags(categoryProcess, 51515)...)
}

func (c *config) slicesFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{
			Name: "partitionable-devices", Value: true, Destination: &c.partitionable,
			Usage: "the cluster has the feature gate DRAPartitionableDevices on, as it is by default from Kubernetes 1.36",
		},
		&cli.BoolFlag{
			Name: "consumable-capacity", Value: true, Destination: &c.consumable,
			Usage: "the cluster has the feature gate DRAConsumableCapacity on, as it is by default from Kubernetes 1.36",
		},
	}
}
