// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

//go:build cluster

package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/cluster/internal/cluster"
	"github.com/partage-dev/partage/test/cluster/internal/poll"
)

// TestNodes checks what only a cluster of several nodes has.
func TestNodes(t *testing.T) {
	p := setup(t)
	before := find(t, p.c)
	t.Log(p.must(t, "up", "--nodes", "n1,n2"))
	if out := p.must(t, "up", "--nodes", "n1,n2"); !strings.Contains(out, "is up already") {
		t.Errorf("up again: %s", out)
	}
	chooses(t, p)

	chart, err := filepath.Abs("testdata/chart")
	if err != nil {
		t.Fatal(err)
	}
	p.must(t, "run", "--", "helm", "install", "trial", chart, "--wait", "--timeout", waitLimit.String())
	reach(t, p)
	power(t, p)
	reach(t, p)

	// A node of which nothing is left, so that its namespaces cannot be entered.
	state, err := cluster.Load(p.c)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(state.First[1].PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node's end", func() error {
		if out, err := p.run("run", "--node", "n2", "true"); err == nil || !strings.Contains(out, "has ended") {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if out := p.kubectl(t, "get", "node", "n2", "-o", "name"); out != "node/n2\n" {
		t.Errorf("the API server says %s", out)
	}
	p.must(t, "down")
	wantSame(t, before, find(t, p.c))
}

// chooses checks that commands reach the node that is named.
func chooses(t *testing.T, p program) {
	t.Helper()
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"n1\n":      {"run", "hostname"},
		"n2\n":      {"run", "--node", "n2", "hostname"},
		own + "\n":  {"run", "--node", "n2", "--network-only", "hostname"},
		"node/n2\n": {"run", "--network-only", "--", "kubectl", "get", "node", "n2", "-o", "name"},
	} {
		if out := p.must(t, args...); out != want {
			t.Errorf("%v prints %q, want %q", args, out, want)
		}
	}
	if out := p.must(t, "logs"); !strings.Contains(out, "n2/kubelet\n") || strings.Contains(out, "n2/etcd") {
		t.Errorf("logs:\n%s", out)
	}
	if out := p.must(t, "logs", "--node", "n2", "--tail", "1", "kubelet"); out == "" {
		t.Error("the log of a node's kubelet is empty")
	}
	if out, err := p.run("run", "--node", "n3", "true"); err == nil || !strings.Contains(out, "n1, n2") {
		t.Errorf("run on a node that is not there: %v\n%s", err, out)
	}
	for _, node := range []string{"n1", "n2"} {
		if _, err := os.Stat(filepath.Join(p.c.Node(node).Run(), "kubelet.yaml")); err != nil {
			t.Error(err)
		}
	}
}

// reach checks that the pods of each node, with networks of their own and with their node's, reach all others and the API server.
func reach(t *testing.T, p program) {
	t.Helper()
	var pods struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ NodeName string }
			Status   struct{ PodIP string }
		}
	}
	if err := json.Unmarshal([]byte(p.kubectl(t, "get", "pods", "-o", "json")), &pods); err != nil {
		t.Fatal(err)
	}
	nodes := map[string]int{}
	for _, from := range pods.Items {
		nodes[from.Spec.NodeName]++
		script := "busybox nc -w 10 10.96.0.1 443 </dev/null"
		for _, to := range pods.Items {
			script += " && busybox ping -c 1 -W 10 " + to.Status.PodIP
		}
		if out, err := p.run("run", "--", "kubectl", "exec", from.Metadata.Name, "--", "sh", "-c", script); err != nil {
			t.Errorf("pod %s on node %s: %v\n%s", from.Metadata.Name, from.Spec.NodeName, err, out)
		}
	}
	if nodes["n1"] != 2 || nodes["n2"] != 2 {
		t.Errorf("pods of the nodes: %v, want 2 each", nodes)
	}
}

// power checks that a node's power is its own.
func power(t *testing.T, p program) {
	t.Helper()
	p.must(t, "power-off", "--node", "n2")
	p.must(t, "power-off", "--node", "n2")
	if out, err := p.run("run", "--node", "n2", "pidof", "kubelet", "containerd"); err == nil {
		t.Errorf("without power run processes %s", out)
	}
	p.must(t, "run", "pidof", "kubelet", "containerd")
	p.must(t, "power-on", "--node", "n2")
	kubelet := p.must(t, "run", "--node", "n2", "pidof", "kubelet")
	p.must(t, "power-on", "--node", "n2")
	if now := p.must(t, "run", "--node", "n2", "pidof", "kubelet"); now != kubelet {
		t.Errorf("a node that has power was started again: its kubelet was %s and is %s", kubelet, now)
	}
	p.must(t, "reboot", "--node", "n2")
	if now := p.must(t, "run", "--node", "n2", "pidof", "kubelet"); now == kubelet {
		t.Errorf("after a reboot the kubelet still is process %s", now)
	}
	eventually(t, "the pods of n2 to be restarted", func() error {
		out := p.kubectl(t, "get", "pods", "--field-selector", "spec.nodeName=n2", "-o",
			"jsonpath={range .items[*].status.containerStatuses[*]}{.ready} {.restartCount},{end}")
		for pod := range strings.SplitSeq(strings.TrimSuffix(out, ","), ",") {
			if !strings.HasPrefix(pod, "true ") || pod == "true 0" {
				return errors.New(out)
			}
		}
		return nil
	})
}

func eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	if err := poll.Until(t.Context(), waitLimit, what, func(context.Context) error { return check() }); err != nil {
		t.Fatal(err)
	}
}
