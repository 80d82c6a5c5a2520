//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/pkg/conformance/probe"
)

const (
	// neighboursSuite is the suite on a cluster where test/neighbours/build has put what it builds beside the driver.
	neighboursSuite = "neighbours"
	neighboursDir   = "_output/neighbours"

	// interposer is the library that the suite names in the chart's value softwareLimits.interposerLibrary.
	interposer = neighboursDir + "/libvgpu.so"

	probeImage = "partage.invalid/gpu-kubelet-plugin:dev"
)

// limitedShare requests a time-slice share with limits in software.
func limitedShare(memory string) request {
	return request{class: "timeslice.partage.dev", capacity: fmt.Sprintf("{memory: %s, smPercent: 25}", memory)}
}

// TestNeighboursSoftwareLimits checks what docs/concepts/time-slicing.md promises to a library that limits programs, with one that uses it.
func TestNeighboursSoftwareLimits(t *testing.T) {
	if suite != neighboursSuite {
		t.Skip("needs a library of suite " + neighboursSuite)
	}
	ns, gpus := reserve(t, 1)
	apply(t, ns, claim("one", limitedShare("4Gi").on(gpus...), "")+claim("two", limitedShare("2Gi").on(gpus...), ""))

	// All programs of a claim have its limit together, under any user, and each claim has its own.
	probePod(t, ns, "holder", "one", 1000, probe.Options{Allocate: 3 << 30, Hold: true})
	waitLog(t, ns, "holder", "main", string(probe.Holding))
	wantProbe(t, ns, "holder", func(e probe.Event) bool {
		return e.Kind == probe.Memory && e.TotalBytes == 4<<30 && e.FreeBytes == 1<<30
	})
	probePod(t, ns, "too-much", "one", 2000, probe.Options{Allocate: 2 << 30})
	wantProbe(t, ns, "too-much", func(e probe.Event) bool { return e.Kind == probe.Refused && e.Result == "CUDA_ERROR_OUT_OF_MEMORY" })
	probePod(t, ns, "little", "one", 0, probe.Options{Allocate: 1 << 30})
	wantProbe(t, ns, "little", func(e probe.Event) bool { return e.Kind == probe.Done && e.AllocatedBytes == 1<<30 })
	probePod(t, ns, "other", "two", 1000, probe.Options{Allocate: 2 << 30})
	wantProbe(t, ns, "other", func(e probe.Event) bool { return e.Kind == probe.Done && e.AllocatedBytes == 2<<30 })
	for _, uid := range claimUIDs(t, ns) {
		if caches, err := filepath.Glob(filepath.Join(limitsDir, uid, "caches", "*", "usage.cache")); err != nil || len(caches) != 1 {
			t.Errorf("claim %s has the caches %v, %v; want one", uid, caches, err)
		}
	}

	// What is linked statically, as the shell here, loads no library.
	apply(t, ns, podRunning("shell", `env | grep CUDA_DEVICE; cat /etc/ld.so.preload;
		echo x >/usr/local/vgpu/libvgpu.so; echo x >/etc/ld.so.preload;
		echo loaded: $(grep -c libvgpu /proc/self/maps); sleep 86400`, "two"))
	wantAll(t, "the shell", waitLog(t, ns, "shell", "main", "loaded: "), "CUDA_DEVICE_MEMORY_LIMIT=2048m", "CUDA_DEVICE_SM_LIMIT=25",
		"CUDA_DEVICE_MEMORY_SHARED_CACHE=/usr/local/vgpu/caches/", "/usr/local/vgpu/libvgpu.so: Read-only file system",
		"/etc/ld.so.preload: Read-only file system", "loaded: 0")
	removePods(t, ns)

	// A node on which the library is not what it should be.
	library := filepath.Join(repoRoot, interposer)
	good, err := os.ReadFile(library)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { replaceFile(t, library, good) })
	if err := os.Remove(library); err != nil {
		t.Fatal(err)
	}
	probePod(t, ns, "without", "one", 0, probe.Options{})
	waitEvent(t, ns, "without", "Failed", "no such file or directory")
	replaceFile(t, library, []byte("not a library\n"))
	probePod(t, ns, "text", "one", 0, probe.Options{})
	waitEvent(t, ns, "text", "Failed", "it would run without its limits")
	incompatible, err := os.ReadFile(filepath.Join(repoRoot, neighboursDir, "incompatible.so"))
	if err != nil {
		t.Fatal(err)
	}
	replaceFile(t, library, incompatible)
	probePod(t, ns, "newer", "one", 0, probe.Options{})
	waitPhase(t, ns, "newer", corev1.PodFailed)
	wantAll(t, "the program", logs(t, ns, "newer", "main"), "symbol lookup error", "partage_symbol_of_a_newer_library")
	replaceFile(t, library, good)
	probePod(t, ns, "again", "one", 0, probe.Options{})
	wantProbe(t, ns, "again", func(e probe.Event) bool { return e.Kind == probe.Done })
}

// replaceFile puts another file in the place of one, which containers may have mounted.
func replaceFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path+".new", content, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// probePod starts a pod with a CUDA program, which is linked dynamically. It runs once, and holds what it has until the pod is deleted.
func probePod(t *testing.T, ns, name, claimName string, user int, o probe.Options) {
	t.Helper()
	o.Library = "libcuda.so.1"
	apply(t, ns, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  restartPolicy: Never
  securityContext: {runAsUser: %d}
  containers:
  - {name: main, image: %s, imagePullPolicy: Never, stdin: true, command: [cuda-probe, '%s'], resources: {claims: [{name: gpu}]}}
  resourceClaims: [{name: gpu, resourceClaimName: %s}]
`, name, user, probeImage, o.Arguments()[0], claimName))
}

// wantProbe waits until such a program has said something.
func wantProbe(t *testing.T, ns, pod string, is func(probe.Event) bool) {
	t.Helper()
	eventually(t, "what pod "+pod+" says", func(ctx context.Context) (bool, string) {
		out, err := tryLogs(ctx, ns, pod, "main")
		for _, e := range probe.Read(strings.NewReader(out)) {
			if is(e) {
				return true, ""
			}
		}
		return false, fmt.Sprintf("%v\n%s\n%s", err, out, strings.Join(events(ctx, ns, pod), " | "))
	})
}

func waitPhase(t *testing.T, ns, pod string, phase corev1.PodPhase) {
	t.Helper()
	eventually(t, fmt.Sprintf("pod %s to be %s", pod, phase), func(ctx context.Context) (bool, string) {
		p, err := client.CoreV1().Pods(ns).Get(ctx, pod, metav1.GetOptions{})
		return err == nil && p.Status.Phase == phase, strings.Join(events(ctx, ns, pod), " | ")
	})
}
