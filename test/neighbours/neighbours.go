// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package neighbours knows the programs of others that run beside Partage, or that its users come from: the versions that the tests pin,
// and what these tests saw.
package neighbours

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/partage-dev/partage/test/docs/page"
)

// seenFile has what the tests saw, by the name of the neighbour. They write it.
const seenFile = "test/neighbours/testdata/seen.json"

// Neighbour is a program of others.
type Neighbour struct {
	Name string
	// Version is that which was seen or read. With a Pin it is found there: the file, and an expression with one group.
	Version, PinFile, Pin string
	// Test of Target lets it run. None does where there are only documents.
	Test, Target string
	// Notes say where to read more, or what is from documents.
	Notes string
}

// Seen is what a test saw.
type Seen struct {
	Version string `json:"version"`
	Test    string `json:"test"`
	What    string `json:"what"`
}

const buildPeers, buildNeighbours = "test/peers/build", "test/neighbours/build"

// All are the neighbours, in the order of the page.
func All() []Neighbour {
	return []Neighbour{
		{Name: "NVIDIA device plugin", PinFile: buildPeers, Pin: `release (v[0-9.]+), and`,
			Test: "TestMigrationFromDevicePlugin", Target: "test-migration",
			Notes: "[the way to Partage](../how-to/migrate/device-plugin.md)"},
		{Name: "NVIDIA DRA driver, GPUs", PinFile: buildPeers, Pin: `and release (v[0-9]+\.[0-9]+\.[0-9]+)`,
			Test: "TestMigrationFromDRADriver", Target: "test-migration",
			Notes: "[the way to Partage](../how-to/migrate/nvidia-dra-driver.md)"},
		{Name: "NVIDIA DRA driver, manifests of its suites", PinFile: buildNeighbours, Pin: `dra_driver=([0-9a-f]{8})`,
			Test: "TestNeighboursSuites", Target: "test-neighbours",
			Notes: "the suites themselves install that driver. Those of health are newer, and this project did not have their sources"},
		{Name: "NVIDIA DRA driver, ComputeDomains", PinFile: buildNeighbours, Pin: `dra_driver=([0-9a-f]{8})`,
			Test: "TestNeighboursComputeDomains", Target: "test-neighbours"},
		{Name: "NVIDIA driver manager", PinFile: buildNeighbours, Pin: `k8s-driver-manager ([0-9.]+)`,
			Test: "TestNeighboursDriverManager", Target: "test-neighbours",
			Notes: "[driver upgrades](../how-to/real-nodes.md#when-the-driver-is-replaced)"},
		{Name: "NVIDIA GPU Operator", Version: "26.7.0",
			Notes: "[with the GPU Operator](../how-to/migrate/gpu-operator.md): it needs hardware"},
		{Name: "NVIDIA GPU feature discovery", PinFile: buildPeers, Pin: `release (v[0-9.]+), and`,
			Test: "TestFeatureDiscovery", Target: "test-neighbours",
			Notes: "[labels of nodes](../how-to/node-labels.md)"},
		{Name: "NVIDIA mig-manager", Version: "mig-parted bd7160f",
			Notes: "you keep it [off the node](../how-to/troubleshoot.md#another-gpu-driver-runs-on-the-node), Partage only reports it; its configurations are " +
				"[converted](../how-to/migrate/configurations.md)"},
		{Name: "dcgm-exporter", PinFile: buildNeighbours, Pin: `dcgm-exporter ([0-9.-]+[0-9])`,
			Test: "TestNeighboursUpstream/dcgm-exporter", Target: "test-neighbours",
			Notes: "[dcgm-exporter](../how-to/dcgm-exporter.md). DCGM itself needs hardware"},
		{Name: "Kueue", PinFile: "test/kueue/go.mod", Pin: `sigs.k8s.io/kueue (v[0-9.]+)`,
			Test: "TestKueueQuota", Target: "test-kueue",
			Notes: "[Kueue](../how-to/kueue.md)"},
		{Name: "Kubernetes AI Conformance", PinFile: "test/aiconformance/build", Pin: `commit=([0-9a-f]{12})`,
			Test: "TestAIConformanceDriverVersions", Target: "test-ai-conformance",
			Notes: "[its log](ai-conformance.md)"},
		{Name: "NVIDIA fake NVML", PinFile: buildNeighbours, Pin: `test_infra=([0-9a-f]{8})`,
			Test: "TestNeighboursUpstream/second-opinion", Target: "test-neighbours",
			Notes: "[a second opinion on the simulator](../design/second-opinion.md), also on GPUs that fail"},
		{Name: "KubeRay", Notes: "[KubeRay](../how-to/kuberay.md): its manifests are read by `TestDocs`, the operator did not run"},
		{Name: "vLLM", Notes: "[vLLM](../how-to/vllm.md): it needs hardware"},
		{Name: "Cluster Autoscaler", Notes: "[autoscaling](../how-to/autoscaling.md)"},
		{Name: "HAMi-core",
			Notes: "[software limits](../concepts/time-slicing.md#software-limits): a library of our own ran in its place " +
				"(`TestNeighboursSoftwareLimits`)"},
	}
}

// version returns the version that a neighbour has in the checkout at root.
func (n Neighbour) version(root string) (string, error) {
	if n.Pin == "" {
		return n.Version, nil
	}
	content, err := os.ReadFile(filepath.Join(root, n.PinFile))
	if err != nil {
		return "", fmt.Errorf("version of %s: %w", n.Name, err)
	}
	found := regexp.MustCompile(n.Pin).FindSubmatch(content)
	if found == nil {
		return "", fmt.Errorf("version of %s: %s has nothing like %q", n.Name, n.PinFile, n.Pin)
	}
	return string(found[1]), nil
}

// Record writes what a test saw of a neighbour into the checkout at root.
func Record(root, name, test, what string) error {
	for _, n := range All() {
		if n.Name != name {
			continue
		}
		version, err := n.version(root)
		if err != nil {
			return err
		}
		seen, err := load(root)
		if err != nil {
			return err
		}
		seen[name] = Seen{Version: version, Test: test, What: what}
		text, err := json.MarshalIndent(seen, "", "  ")
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(root, seenFile), append(text, '\n'), 0o644) //nolint:gosec // for reading
	}
	return fmt.Errorf("there is no neighbour %q", name)
}

func load(root string) (map[string]Seen, error) {
	seen := map[string]Seen{}
	text, err := os.ReadFile(filepath.Join(root, seenFile))
	if errors.Is(err, fs.ErrNotExist) {
		return seen, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &seen)
	}
	if err != nil {
		return nil, fmt.Errorf("read what was seen: %w", err)
	}
	return seen, nil
}

// Markdown returns the table. What was seen of another version than that which is pinned counts as not seen.
func Markdown(root string) (string, error) {
	seen, err := load(root)
	if err != nil {
		return "", err
	}
	table := page.NewTable("component", "version", "seen")
	for _, n := range All() {
		version, err := n.version(root)
		if err != nil {
			return "", err
		}
		what := "from documents"
		if s := seen[n.Name]; s.Version == version && s.Test == n.Test && n.Test != "" {
			what = fmt.Sprintf("%s (`%s`, `make %s`)", s.What, n.Test, n.Target)
		} else if n.Test != "" {
			what = fmt.Sprintf("`%s`, `make %s`", n.Test, n.Target)
		}
		if n.Notes != "" {
			what += ": " + n.Notes
		}
		if version == "" {
			version = "–"
		}
		table.Row(n.Name, version, strings.TrimSpace(what))
	}
	return table.String(), nil
}
