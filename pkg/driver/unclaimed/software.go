// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"context"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/device"
)

// Kind is a kind of software that gives out or partitions GPUs.
type Kind string

// Software that is looked for on the node.
const (
	// DevicePlugin is NVIDIA's, or another one for its resources.
	DevicePlugin Kind = "device-plugin"
	// DRADriver is NVIDIA's, which has the name of this driver.
	DRADriver Kind = "dra-driver"
	// MIGManager is NVIDIA's mig-parted, which follows a label of the node.
	MIGManager Kind = "mig-manager"
	// ContainerRuntime is NVIDIA's, or its hook.
	ContainerRuntime Kind = "container-runtime"
)

// Finding is what was found out about a kind of software.
type Finding struct {
	Kind Kind
	// There means that it is on the node. Text says what it does and what can be done about it, or that it is not there.
	There bool
	Text  string
}

// MIGConfigLabel is what a MIG manager follows. migManagerLabel is false on nodes that the GPU Operator keeps its MIG manager off; as long
// as that is on at all, the operator writes the other label on every node.
const MIGConfigLabel, migManagerLabel = "nvidia.com/mig.config", "nvidia.com/gpu.deploy.mig-manager"

// OnNode finds what the Node object tells: a device plugin by the resources that it offers, and a
// MIG manager by its label. The extended resources of device classes are none of the node's:
// the scheduler takes them from ResourceSlices.
func OnNode(node *corev1.Node) []Finding {
	plugin := Finding{Kind: DevicePlugin, Text: "No device plugin offers the GPUs of this node"}
	if offered := deviceResources(node); len(offered) > 0 {
		plugin.There, plugin.Text = true, fmt.Sprintf("A device plugin offers %s on this node, and this driver offers the same GPUs: "+
			"neither knows what the other has given away, so that pods can get a GPU that is in use. Keep the device plugin off the node: "+
			"with the GPU Operator by the label nvidia.com/gpu.deploy.device-plugin=false", strings.Join(offered, ", "))
	}
	manager := Finding{Kind: MIGManager, Text: "No MIG manager is asked to partition the GPUs of this node"}
	if config, labelled := node.Labels[MIGConfigLabel]; labelled && node.Labels[migManagerLabel] != "false" {
		manager.There, manager.Text = true, fmt.Sprintf("The node has the label %s=%s, which a MIG manager follows: "+
			"it removes partitions that claims have. Keep the MIG manager off the node, with the GPU Operator by the label %s=false, "+
			"and elsewhere remove the label. This driver makes partitions as claims ask for them", MIGConfigLabel, config, migManagerLabel)
	}
	return []Finding{plugin, manager}
}

func deviceResources(node *corev1.Node) []string {
	var offered []string
	for _, name := range slices.Sorted(maps.Keys(node.Status.Allocatable)) {
		amount := node.Status.Allocatable[name]
		if device.IsPluginResource(string(name)) && amount.Sign() > 0 {
			offered = append(offered, fmt.Sprintf("%s (%s)", name, amount.String()))
		}
	}
	return offered
}

// dialTimeout bounds connecting to a socket.
const dialTimeout = time.Second

// OtherDriver finds NVIDIA's DRA driver by the socket on which it registers with the kubelet: it
// has the name without the UID of a pod, which this driver's have. A socket that a driver has left
// behind has no listener.
func OtherDriver(ctx context.Context, registrarDir, driverName string) Finding {
	path := filepath.Join(registrarDir, driverName+"-reg.sock")
	conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "unix", path)
	if err != nil {
		return Finding{Kind: DRADriver, Text: "NVIDIA's DRA driver does not run on this node"}
	}
	_ = conn.Close()
	return Finding{Kind: DRADriver, There: true, Text: fmt.Sprintf("NVIDIA's DRA driver runs on this node, too, with the same name, %s: each of the two "+
		"removes the other's ResourceSlices, and the kubelet calls whichever registered last. Keep one of them off the node "+
		"(docs/how-to/install.md#from-nvidias-dra-driver)", driverName)}
}
