// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/driver/claim/converge"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/node/holder"
)

// machine has one process on its GPU, an MPS server or not.
type machine struct {
	pid    int
	server bool
}

func (m machine) Processes(context.Context, string) ([]gpu.Process, error) {
	return []gpu.Process{{PID: m.pid, InstanceID: -1}}, nil
}

func (m machine) List(context.Context) ([]mps.Status, error) {
	if m.server {
		return []mps.Status{{}, {Servers: []int{m.pid}}}, nil
	}
	return nil, errors.New("no supervisor")
}

// TestUsersOfGPUs shows that pods of the namespaces that flags name, of the driver's own, and MPS servers are no users.
func TestUsersOfGPUs(t *testing.T) {
	t.Parallel()
	const pci, uid, pid = "0000:1b:00.0", "3f2a1b4c-0000-4000-8000-0123456789ab", 5000001
	for name, test := range map[string]struct {
		namespace, ignored string
		server, want       bool
	}{
		"of a tenant":            {"team", ignoredNamespaces, false, true},
		"of the driver":          {"partage", "", false, false},
		"of the GPU operator":    {"gpu-operator", ignoredNamespaces, false, false},
		"of nodes":               {"kube-system", ignoredNamespaces, false, false},
		"of one that is not set": {"kube-system", "a,b", false, true},
		"of one that is set":     {"b", "a,b", false, false},
		"without a list":         {"kube-system", "", false, true},
		"an MPS server":          {"team", "", true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			process := filepath.Join(dir, "processes", "5000001")
			err := errors.Join(os.MkdirAll(process, 0o755), os.MkdirAll(filepath.Join(dir, "logs", test.namespace+"_pod_"+uid), 0o755),
				os.WriteFile(filepath.Join(process, "cgroup"), []byte("0::/kubepods/pod"+uid+"/"+strings.Repeat("0", 64)), 0o600))
			if err != nil {
				t.Fatal(err)
			}
			c := &config{podNamespace: "partage", ignoredNamespaces: test.ignored, procRoot: dir, podLogs: filepath.Join(dir, "logs")}
			names := &holder.PodNames{Roots: c.roots()}
			holders := &holder.Finder{Roots: c.roots(), Proc: filepath.Join(dir, "processes"), PodName: names.Name}
			m := machine{pid, test.server}
			var finder converge.Users = c.users(t.Context(), holders, m.Processes, m.List)
			if got, _, _ := finder.Users(t.Context(), pci, nil, nil); (got != "") != test.want {
				t.Errorf("got %q, want users: %t", got, test.want)
			}
		})
	}
}
