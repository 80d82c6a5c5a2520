// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/partage-dev/partage/test/cluster/internal/image"
)

type configFiles struct{ containerd, kubelet string }

// writeConfig writes the configuration files, the network's to where containerd is told to look.
func (n Node) writeConfig() (configFiles, error) {
	files := configFiles{filepath.Join(n.Config, "containerd.toml"), filepath.Join(n.Config, "kubelet.yaml")}
	kubeletConfig, err := n.kubeletConfig()
	if err != nil {
		return files, err
	}
	network, err := n.networkConfig()
	if err != nil {
		return files, err
	}
	return files, errors.Join(
		write(files.containerd, n.containerdConfig()),
		write(files.kubelet, kubeletConfig),
		write(filepath.Join(cniConfig, "10-bridge.conflist"), network),
	)
}

func write(path string, b []byte) error {
	if err := os.WriteFile(path, b, 0o644); err != nil { //nolint:gosec // no secrets, for reading
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

const cniConfig = "/etc/cni/net.d"

// quote makes a TOML literal string. Paths with a quote are refused where the cluster's paths are checked.
func quote(s string) string { return "'" + s + "'" }

func (n Node) containerdConfig() []byte {
	return []byte(strings.NewReplacer("SOCKET", quote(Socket), "PAUSE", quote(image.Pause), "CNI_BIN", quote(n.CNI),
		"CNI_CONFIG", quote(cniConfig), "RUNC", quote(filepath.Join(n.Bin, "runc"))).Replace(containerdTemplate))
}

const containerdTemplate = `version = 4
root = '/var/lib/containerd'
state = '/run/containerd'
disabled_plugins = ['io.containerd.nri.v1.nri', 'io.containerd.tracing.processor.v1.otlp', 'io.containerd.internal.v1.tracing']
[grpc]
  address = SOCKET
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = PAUSE
[plugins.'io.containerd.cri.v1.runtime']
  enable_cdi = true
  cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']
  # without CAP_SYS_RESOURCE, as in many containers, a score cannot be lowered
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = [CNI_BIN]
    conf_dir = CNI_CONFIG
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      BinaryName = RUNC
      SystemdCgroup = false
`

type object = map[string]any

func (n Node) kubeletConfig() ([]byte, error) {
	key := func(file string) string { return filepath.Join(n.PKI, file) }
	config := object{ // JSON is YAML
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"cgroupDriver": "cgroupfs",
		"failCgroupV1": false,
		"authentication": object{
			"anonymous": object{"enabled": false}, "webhook": object{"enabled": true}, "x509": object{"clientCAFile": key("ca.crt")},
		},
		"authorization":            object{"mode": "Webhook"},
		"tlsCertFile":              key(n.serving() + ".crt"),
		"tlsPrivateKeyFile":        key(n.serving() + ".key"),
		"containerRuntimeEndpoint": "unix://" + Socket,
		// Nothing answers there, and the node says so at once. Without an address every pod gets a warning.
		"clusterDNS": []string{n.DNS.String()}, "clusterDomain": "cluster.local",
		"resolvConf":             "",
		"failSwapOn":             false, // the machine's swap is not our business
		"makeIPTablesUtilChains": false, // no iptables needed
		// The images cannot be pulled again, and a developer's disk may be nearly full.
		"imageGCHighThresholdPercent": 100,
		"evictionHard":                object{"imagefs.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%"},
		"nodeStatusUpdateFrequency":   "2s",
		"maxOpenFiles":                20000, // raising these two needs CAP_SYS_RESOURCE
		"oomScoreAdj":                 0,
	}
	if n.SyncFrequency != "" {
		config["syncFrequency"] = n.SyncFrequency
	}
	return encode("kubelet", config)
}

func (n Node) networkConfig() ([]byte, error) {
	return encode("pod network", object{
		"cniVersion": "1.0.0", "name": "bridge",
		"plugins": []object{
			{
				"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
				"ipam": object{
					"type": "host-local", "ranges": [][]object{{{"subnet": n.Pods.String()}}}, "routes": []object{{"dst": "0.0.0.0/0"}},
				},
			},
			{"type": "loopback"},
		},
	})
}

func encode(what string, v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode %s configuration: %w", what, err)
	}
	return append(b, '\n'), nil
}
