//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// release is the name of the helm release.
const release = "partage"

// helm runs helm in the driver's namespace and returns all that it printed.
func helm(args ...string) (string, error) {
	out, err := exec.Command("helm", append([]string{"--namespace", driverNamespace}, args...)...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("helm %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// mustHelm is helm for what has to work.
func mustHelm(t *testing.T, args ...string) {
	t.Helper()
	if _, err := helm(args...); err != nil {
		t.Fatal(err)
	}
}

var rollbackAdvice = regexp.MustCompile(`helm (rollback partage [0-9]+) --namespace partage`)

// TestNodeUninstall checks that the driver is not uninstalled while a pod uses a claim, that the release can be kept then, and that
// it can be uninstalled once the pod is gone. In between, helm --wait ends on a node without GPUs.
func TestNodeUninstall(t *testing.T) {
	ns := reserveNode(t)
	chart := filepath.Join(repoRoot, "deployments", "helm", "partage")
	values, err := exec.Command("helm", "--namespace", driverNamespace, "get", "values", release, "--output", "yaml").Output()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, values, 0o600); err != nil {
		t.Fatal(err)
	}
	uuid := runningPartition(t, ns, "user")
	plugin := driverPod(t, pluginComponent).Name

	out, err := helm("uninstall", release)
	if err == nil {
		t.Fatalf("the driver was uninstalled although a pod uses a claim:\n%s", out)
	}
	wantAll(t, "the refusal", out, "claim "+ns+"/user", "used by pod user", "helm uninstall partage --namespace partage --no-hooks")
	advice := rollbackAdvice.FindStringSubmatch(out)
	if advice == nil {
		t.Fatalf("the refusal does not say how to keep the release:\n%s", out)
	}
	mustHelm(t, strings.Fields(advice[1])...)
	if now := driverPod(t, pluginComponent).Name; now != plugin {
		t.Errorf("the plugin's pod was %s and is %s", plugin, now)
	}
	wantDevice(t, ns, "user", uuid)

	removePods(t, ns)
	checkNothingLeft(t)
	mustHelm(t, "uninstall", release, "--wait")
	t.Cleanup(func() {
		mustHelm(t, "upgrade", release, chart, "--install", "--values", file, "--wait=legacy", "--timeout", waitLimit.String())
		waitNoOldPlugin(t)
	})
	// A PCI bus without devices, and no driver.
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "bus/pci/devices"), 0o755); err != nil {
		t.Fatal(err)
	}
	mustHelm(t, "install", release, chart, "--wait", "--timeout", waitLimit.String(), "--set",
		"image.repository=partage.invalid/gpu-kubelet-plugin,image.tag=dev,image.pullPolicy=Never,mpsSupervisor.enabled=false,sharingPolicy.default.kinds={gpu},host.driverRoot="+root+",host.sysRoot="+root)
}

// waitNoOldPlugin waits until the plugin's pod of before an upgrade has ended.
func waitNoOldPlugin(t *testing.T) {
	t.Helper()
	eventually(t, "the plugin's last pod to be gone", func(context.Context) (bool, string) {
		out, err := exec.Command("kubectl", "get", "pods", "--namespace", driverNamespace, "--output", "name",
			"--selector", "app.kubernetes.io/component="+pluginComponent).CombinedOutput()
		return err == nil && strings.Count(string(out), "pod/") == 1, string(out)
	})
}
