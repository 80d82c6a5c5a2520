//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestNodeEtcdRestored puts etcd back to a state of some minutes ago, as from a backup, while a GPU is lost. A watch from a
// version of the future brings nothing, so that nobody tells the driver that its taint is gone; it is there again soon.
func TestNodeEtcdRestored(t *testing.T) {
	_, gpus := reserve(t, pool.total)
	gpu := gpus[0]
	want := countSlices(t)
	plugin := driverPod(t, pluginComponent).Name
	pid := pidOf(t, "etcd")
	folder := dataDir(t, pid)
	// What a snapshot has: all that etcd has written, and nothing half done.
	kill(t, pid, syscall.SIGSTOP)
	out, err := exec.Command("cp", "--archive", folder, folder+".backup").CombinedOutput()
	kill(t, pid, syscall.SIGCONT)
	if err != nil {
		t.Fatalf("backing up etcd: %v\n%s", err, out)
	}
	t.Cleanup(func() {
		onGPU(t, gpu, "gpu", "--failure", "none")
		// Their watches are from the future, too. An administrator starts them anew.
		for _, name := range []string{"kube-controller-manager", "kube-scheduler", "kubelet"} {
			kill(t, pidOf(t, name), syscall.SIGKILL)
		}
		eventually(t, "the node and its slices after the restore", func(ctx context.Context) (bool, string) {
			published, err := publishedSlices(ctx)
			keys, taintErr := taintsOf(ctx, gpu.UUID, "gpu")
			return err == nil && taintErr == nil && len(published) == want && !slices.Contains(keys, driverName+"/gpu-lost"),
				fmt.Sprint(len(published), keys, err, taintErr)
		})
		eventually(t, "a kubelet that knows its pods", func(context.Context) (bool, string) {
			out, err := inPod(driverNamespace, plugin, "/usr/bin/gpu-kubelet-plugin", "version")
			return err == nil, out
		})
	})
	onGPU(t, gpu, "gpu", "--failure", "lost")
	waitTaint(t, gpu.UUID, "gpu", driverName+"/gpu-lost", true)
	before := version(t)

	// The running etcd keeps what it has opened, and is started again with what is there under the name.
	for _, rename := range [][2]string{{folder, folder + ".lost"}, {folder + ".backup", folder}} {
		if err := os.Rename(rename[0], rename[1]); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"etcd", "kube-apiserver"} {
		kill(t, pidOf(t, name), syscall.SIGKILL)
	}
	eventually(t, "the API server with the earlier state", func(ctx context.Context) (bool, string) {
		list, err := client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err.Error()
		}
		now, err := strconv.Atoi(list.ResourceVersion)
		return err == nil && now < before, list.ResourceVersion
	})
	waitTaint(t, gpu.UUID, "gpu", driverName+"/gpu-lost", true)
}

// version is that of the whole state of the cluster.
func version(t *testing.T) int {
	t.Helper()
	list, err := client.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	v, err := strconv.Atoi(list.ResourceVersion)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func pidOf(t *testing.T, program string) int {
	t.Helper()
	out, err := exec.Command("pidof", program).Output()
	pid, numberErr := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil || numberErr != nil {
		t.Fatalf("pidof %s: %q, %v", program, out, err)
	}
	return pid
}

func kill(t *testing.T, pid int, signal syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, signal); err != nil {
		t.Fatalf("sending %s to process %d: %v", signal, pid, err)
	}
}

// dataDir is the folder that etcd was told to use.
func dataDir(t *testing.T, etcd int) string {
	t.Helper()
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", etcd))
	if err != nil {
		t.Fatal(err)
	}
	for arg := range bytes.SplitSeq(args, []byte{0}) {
		if dir, is := bytes.CutPrefix(arg, []byte("--data-dir=")); is {
			return string(dir)
		}
	}
	t.Fatalf("etcd has no --data-dir: %q", args)
	return ""
}
