//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// exitEither stands for exitFine or exitFound: what is found depends on how long the cluster has run.
const exitEither = -1

// viewer is the user that the tests give the rights that deployments/kubectl-gpu/viewer.yaml has.
const viewer = "kubectl-gpu-viewer"

// TestKubectlCommands runs the other commands, with the rights that the documentation tells to give, on a cluster with a partition and a
// share in use.
func TestKubectlCommands(t *testing.T) {
	if suite != kubectlSuite {
		t.Skip("needs the nodes of suite " + kubectlSuite)
	}
	ns := makeNamespace(t)
	t.Cleanup(func() { removeNamespace(t, ns) })
	for _, node := range fleetNodes {
		waitPool(t, node)
	}
	grant(t)
	mixed := gpusOf(t, mixedNode)
	apply(t, ns, claim("training", oneSlice.of(h100), "")+podUsing("trainer", "training")+
		claim("serving", mpsShare("4Gi", 25).on(mixed[a30GPU]), "")+podUsing("server", "serving"))
	waitRunning(t, ns, "trainer")
	waitRunning(t, ns, "server")

	for name, test := range map[string]struct {
		args []string
		code int
		want []string
	}{
		"tree": {
			[]string{"tree", "-n", ns}, exitFine,
			[]string{"pod " + ns + "/trainer", "pod " + ns + "/server", "4Gi", "fits: whole GPU"},
		},
		"tree of a node":      {[]string{"tree", mixedNode, "-n", ns, "-o", "json"}, exitFine, []string{`"kubectl.partage.dev/v1alpha1"`, "serving"}},
		"top":                 {[]string{"top", "-n", ns}, exitFine, []string{"training", "serving"}},
		"top nodes":           {[]string{"top", "nodes"}, exitFine, fleetNodes},
		"top gpus":            {[]string{"top", "gpus", "-o", "wide", "--sort-by", "memory"}, exitFine, []string{mixed[a30GPU].PCIAddress}},
		"idle":                {[]string{"idle", "-n", ns, "--for", "1s"}, exitFound, []string{"training"}},
		"explain a claim":     {[]string{"explain", "claim/training", "-n", ns}, exitFine, []string{"1g.10gb"}},
		"explain a file":      {[]string{"explain", "-f", tooLarge(t), "-n", ns}, exitFound, []string{"1g.10gb"}},
		"doctor":              {[]string{"doctor", "-o", "json"}, exitEither, []string{`"driver-daemonset"`, `"mps-supervisor"`}},
		"slices of a model":   {[]string{"slices", "--model", "h100-80-sxm", "--count", "8"}, exitFine, []string{"kind: ResourceSlice", "1g.10gb"}},
		"slices of a node":    {[]string{"slices", "--from-node", mixedNode}, exitFine, []string{"kind: ResourceSlice", teslaT}},
		"advise":              {[]string{"advise", "--workload", "inference", "--model-size", "7B"}, exitFine, []string{"kind: ResourceClaimTemplate"}},
		"rightsize":           {[]string{"rightsize", "-n", ns}, exitEither, []string{"training"}},
		"cost":                {[]string{"cost", "-n", ns}, exitFine, []string{ns, h100, "NVIDIA A30", "2 claims on 2 GPUs"}},
		"migrate":             {[]string{"migrate", "pods", oldPod(t)}, exitFine, []string{"kind: ResourceClaimTemplate"}},
		"completion of nodes": {[]string{"__complete", "tree", ""}, exitFine, fleetNodes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// What the driver measures of a claim is known after a while.
			eventually(t, fmt.Sprintf("kubectl gpu %s to print %q", strings.Join(test.args, " "), test.want), func(context.Context) (bool, string) {
				// In front of the arguments, because the last one is what completion completes.
				code, out, errors := kubectlGPU(t, slices.Insert(slices.Clone(test.args), 1, "--as="+viewer)...)
				done := code == test.code || test.code == exitEither && (code == exitFine || code == exitFound)
				for _, part := range test.want {
					done = done && strings.Contains(out, part)
				}
				if done {
					t.Logf("exit code %d\n%s%s", code, out, errors)
				}
				return done && !strings.Contains(errors, "cannot "), fmt.Sprintf("exit code %d, want %d:\n%s%s", code, test.code, out, errors)
			})
		})
	}
	t.Run("ui", func(t *testing.T) { t.Parallel(); wantPage(t) })
}

// TestKubectlCordon: an administrator keeps pods away from one GPU, is told who has it, and gives it back; who may only read is refused.
func TestKubectlCordon(t *testing.T) {
	if suite != kubectlSuite {
		t.Skip("needs the nodes of suite " + kubectlSuite)
	}
	ns := makeNamespace(t)
	t.Cleanup(func() { removeNamespace(t, ns) })
	waitPool(t, hopperNode)
	g := gpusOf(t, hopperNode)[7]
	name := hopperNode + "/" + g.PCIAddress
	t.Cleanup(func() { kubectlGPU(t, "uncordon", name) })
	apply(t, ns, claim("held", oneSlice.on(g), "")+podUsing("holder", "held"))
	waitRunning(t, ns, "holder")

	if code, out, errors := kubectlGPU(t, "cordon", "--as="+tenant, name); code == exitFine || strings.Contains(out, "cordoned") {
		t.Errorf("exit code %d of somebody without rights:\n%s%s", code, out, errors)
	}
	shows := func(what string, want bool) {
		t.Helper()
		eventually(t, fmt.Sprintf("tree to show %s: %v", what, want), func(context.Context) (bool, string) {
			_, out, errors := kubectlGPU(t, "tree", hopperNode)
			return strings.Contains(out, what) == want, out + errors
		})
	}
	const taint = "gpu.nvidia.com/cordoned"
	if code, out, errors := kubectlGPU(t, "cordon", "--dry-run=server", name); code != exitFine || !strings.Contains(out, "(server dry run)") {
		t.Errorf("exit code %d:\n%s%s", code, out, errors)
	}
	code, out, errors := kubectlGPU(t, "cordon", name)
	if code != exitFine || !strings.Contains(out, "kubectl delete pod -n "+ns+" holder") {
		t.Errorf("exit code %d:\n%s%s", code, out, errors)
	}
	shows(taint, true)
	if _, out, errors := kubectlGPU(t, "doctor"); !strings.Contains(out, "kubectl gpu uncordon "+hopperNode+"/") {
		t.Errorf("doctor does not say how to end it:\n%s%s", out, errors)
	}
	if code, out, errors := kubectlGPU(t, "uncordon", name); code != exitFine {
		t.Errorf("exit code %d:\n%s%s", code, out, errors)
	}
	shows(taint, false)
}

// tenant is a user with the rights that viewer.yaml gives to those who may see their own namespace only, and nobody one with none.
const (
	tenant = "kubectl-gpu-tenant"
	nobody = "kubectl-gpu-nobody"
)

// TestKubectlRights: what the rights of a user hide is unknown to the user, while another team has devices.
func TestKubectlRights(t *testing.T) {
	if suite != kubectlSuite {
		t.Skip("needs the nodes of suite " + kubectlSuite)
	}
	other, own := makeNamespace(t), makeNamespace(t)
	t.Cleanup(func() {
		kubectl(t, "delete", "clusterrolebinding", tenant)
		removeNamespace(t, own)
		removeNamespace(t, other)
	})
	for _, node := range fleetNodes {
		waitPool(t, node)
	}
	kubectl(t, "apply", "-f", filepath.Join(repoRoot, "deployments", "kubectl-gpu", "viewer.yaml"))
	kubectl(t, "create", "clusterrolebinding", tenant, "--clusterrole=kubectl-gpu-fleet", "--user="+tenant)
	kubectl(t, "create", "rolebinding", tenant, "--clusterrole=kubectl-gpu-viewer", "--user="+tenant, "-n", own)
	apply(t, other, claim("held", oneSlice.of(h100), "")+podUsing("holder", "held"))
	waitRunning(t, other, "holder")
	apply(t, own, claim("wanted", oneSlice.of(h100), ""))
	for name, test := range map[string]struct {
		user   string
		args   []string
		code   int
		want   string
		silent string
	}{
		"explain": {tenant, []string{"explain", "claim/wanted", "-n", own}, exitFound, "claims of other namespaces cannot be read", "can be allocated now"},
		"waiting": {tenant, []string{"explain", "-A"}, exitFound, "may have pods that wait: that is unknown", "No pod"},
		"tree":    {tenant, []string{"tree", hopperNode, "-n", own}, exitFine, "fits: unknown", "fits: whole"},
		"cost":    {tenant, []string{"cost", "-n", own}, exitFine, "is unknown", "IN USE"},
		"nothing": {nobody, []string{"explain", "claim/wanted", "-n", own}, 1, "", "can be allocated now"},
		"no tree": {nobody, []string{"tree", "-n", own}, 1, "", "fits"},
		"no cost": {nobody, []string{"cost", "-n", own}, 1, "", "IN USE"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, out, errors := kubectlGPU(t, slices.Insert(slices.Clone(test.args), 1, "--as="+test.user)...)
			if code != test.code || !strings.Contains(out, test.want) || strings.Contains(out, test.silent) {
				t.Errorf("exit code %d, want %d; want %q and not %q in:\n%s%s", code, test.code, test.want, test.silent, out, errors)
			}
		})
	}
}

// grant gives the viewer its rights.
func grant(t *testing.T) {
	t.Helper()
	kubectl(t, "apply", "-f", filepath.Join(repoRoot, "deployments", "kubectl-gpu", "viewer.yaml"))
	kubectl(t, "create", "clusterrolebinding", viewer, "--clusterrole=kubectl-gpu-viewer", "--user="+viewer)
	kubectl(t, "create", "rolebinding", viewer, "--role=kubectl-gpu-metrics", "--user="+viewer, "-n", driverNamespace)
}

// file writes a file for a test and returns its path.
func file(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// tooLarge is a file with a pod that would wait.
func tooLarge(t *testing.T) string {
	t.Helper()
	return file(t, "pod.yaml", podFor(exactly(request{class: "mig.nvidia.com"}.where(profile+"'1g.10g'"))))
}

// oldPod is a file with a pod for NVIDIA's device plugin.
func oldPod(t *testing.T) string {
	t.Helper()
	return file(t, "pod.yaml", `{apiVersion: v1, kind: Pod, metadata: {name: old}, spec: {containers: [{name: main, image: example.com/main, resources: {limits: {nvidia.com/mig-1g.10gb: 1}}}]}}`)
}

var pageAddress = regexp.MustCompile(`http://127\.0\.0\.1:\d+/\S*`)

// wantPage starts kubectl gpu ui and wants its page at the address with the token, and at no other.
func wantPage(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "kubectl", "gpu", "ui", "--as", viewer)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); _ = cmd.Wait() }()
	address := ""
	for lines := bufio.NewScanner(out); address == "" && lines.Scan(); {
		address = pageAddress.FindString(lines.Text())
	}
	if address == "" {
		t.Fatal("no address is printed")
	}
	if status, page := get(ctx, t, address); status != http.StatusOK || !strings.Contains(page, "<html") {
		t.Errorf("GET %s: %d\n%s", address, status, page)
	}
	parsed, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	parsed.Path, parsed.RawQuery = "/", ""
	if status, page := get(ctx, t, parsed.String()); status == http.StatusOK {
		t.Errorf("GET %s, without the token: %d\n%s", parsed, status, page)
	}
}

// get returns what is at an address, for somebody without cookies.
func get(ctx context.Context, t *testing.T, address string) (status int, body string) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := new(http.Client).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	raw, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(raw)
}
