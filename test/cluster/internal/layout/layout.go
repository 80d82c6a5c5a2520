// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package layout says where everything of the local cluster lies: what is built, and what a running cluster keeps.
package layout

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// DefaultName is the cluster that a command means when no name is given.
const DefaultName = "partage"

var nameRE = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?$`)

// Repo is a checkout of the repository.
type Repo struct{ Root string }

// Find returns the checkout that holds one of the given files or folders, the first that is inside one.
func Find(from ...string) (Repo, error) {
	for _, start := range from {
		dir, err := filepath.Abs(start)
		if err != nil {
			return Repo{}, fmt.Errorf("find the repository from %s: %w", start, err)
		}
		if resolved, err := filepath.EvalSymlinks(dir); err == nil {
			dir = resolved
		}
		for ; ; dir = filepath.Dir(dir) {
			if _, err := os.Stat(filepath.Join(dir, "test", "cluster", "go.mod")); err == nil {
				return Repo{Root: dir}, nil
			}
			if dir == filepath.Dir(dir) {
				break
			}
		}
	}
	return Repo{}, errors.New("not inside a checkout of partage: no test/cluster/go.mod above; run from the checkout or set --repo")
}

// Module is the Go module that pins every part of the cluster.
func (r Repo) Module() string { return filepath.Join(r.Root, "test", "cluster") }

// Versions holds a module file for every other version of Kubernetes that a cluster can have.
func (r Repo) Versions() string { return filepath.Join(r.Module(), "versions") }

// Products is where the project's own programs are built to.
func (r Repo) Products() string { return filepath.Join(r.Root, "bin") }

func (r Repo) output() string { return filepath.Join(r.Root, "_output", "cluster") }

// Bin holds the programs of the cluster.
func (r Repo) Bin() string { return filepath.Join(r.output(), "bin") }

// Kubernetes holds the programs of another version of Kubernetes.
func (r Repo) Kubernetes(version string) string {
	return filepath.Join(r.output(), "kubernetes", version)
}

// CNI holds the network plugins, apart from Bin because containerd looks them up by plain names.
func (r Repo) CNI() string { return filepath.Join(r.Bin(), "cni") }

// Images holds the image archives that every new cluster imports.
func (r Repo) Images() string { return filepath.Join(r.output(), "images") }

// CheckPlace refuses a checkout in a folder that the node covers with its own, or whose path cannot be part of mount options,
// PATH and configuration files.
func (r Repo) CheckPlace() error {
	if strings.ContainsAny(r.Root, ",:'\"\\\n") {
		return fmt.Errorf("the path of the checkout, %q, has a comma, colon, quote, backslash or line break; move it", r.Root)
	}
	for _, covered := range []string{"/etc", "/run", "/var/run", "/var/lib", "/var/log", "/proc", "/sys"} {
		if r.Root == covered || strings.HasPrefix(r.Root, covered+"/") {
			return fmt.Errorf("the checkout %s lies under %s, which the node covers with a private one; move it, to /srv or a home folder say", r.Root, covered)
		}
	}
	return nil
}

// Cluster is what belongs to one cluster of a checkout.
type Cluster struct {
	Repo
	Name string
}

// Cluster returns the paths of the named cluster; the name is a short DNS label.
func (r Repo) Cluster(name string) (Cluster, error) {
	if !nameRE.MatchString(name) {
		return Cluster{}, fmt.Errorf("cluster name %q: want up to 22 of a-z, 0-9 and -, as in %q", name, DefaultName)
	}
	return Cluster{Repo: r, Name: name}, nil
}

// ID is unique on the machine: two checkouts may each run a cluster of the same name.
func (c Cluster) ID() string {
	return fmt.Sprintf("partage-%s-%x", c.Name, sha256.Sum256([]byte(c.Root)))[:len("partage-")+len(c.Name)+9]
}

// Run holds what lives as long as the cluster does.
func (c Cluster) Run() string { return filepath.Join(c.output(), "run", c.Name) }

// Logs stay after the cluster is down, until it is next brought up.
func (c Cluster) Logs() string { return filepath.Join(c.output(), "log", c.Name) }

// Log is the log of a component of the control plane.
func (c Cluster) Log(component string) string { return filepath.Join(c.Logs(), component+".log") }

// Lock is held while the cluster is being brought up or down.
func (c Cluster) Lock() string { return filepath.Join(c.output(), "lock-"+c.Name) }

// State is the record of the running cluster.
func (c Cluster) State() string { return filepath.Join(c.Run(), "state.json") }

// Plan is what the nodes' first processes are told.
func (c Cluster) Plan() string { return filepath.Join(c.Run(), "plan.json") }

// PKI holds keys and certificates.
func (c Cluster) PKI() string { return filepath.Join(c.Run(), "pki") }

// ControlPlane holds the control plane's data.
func (c Cluster) ControlPlane() string { return filepath.Join(c.Run(), "control-plane") }

// Kubeconfig is the administrator's; it works inside the cluster's namespaces.
func (c Cluster) Kubeconfig() string {
	if c.Name == DefaultName {
		return filepath.Join(c.output(), "kubeconfig")
	}
	return filepath.Join(c.output(), "kubeconfig-"+c.Name)
}

// Node is what belongs to one node of a cluster.
type Node struct {
	Cluster
	Name string
}

// Node returns the paths of a node.
func (c Cluster) Node(name string) Node { return Node{Cluster: c, Name: name} }

// Run holds what lives as long as the node does.
func (n Node) Run() string { return filepath.Join(n.Cluster.Run(), "nodes", n.Name) }

// Disk holds what the node writes to its disks.
func (n Node) Disk() string { return filepath.Join(n.Run(), "disk") }

// Services is where the node's first process says what runs.
func (n Node) Services() string { return filepath.Join(n.Run(), "services.json") }

// Logs stay as long as the cluster's.
func (n Node) Logs() string { return filepath.Join(n.Cluster.Logs(), n.Name) }

// Log is the log of a component of the node.
func (n Node) Log(component string) string { return filepath.Join(n.Logs(), component+".log") }
