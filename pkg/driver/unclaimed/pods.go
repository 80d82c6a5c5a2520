// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/partage-dev/partage/pkg/node/podcgroup"
)

// Pods finds pods that may still have the devices of a claim which is not in the cluster any more. Processes do not tell: a container
// that uses nothing now can open its nodes at any time.
type Pods struct {
	// Socket is that of the kubelet's PodResources API, and PodName the name of this process's pod.
	Socket, PodName string
	// Proc is the proc file system of the host's PID namespace.
	Proc string
	// Named returns "namespace/name" of a pod on this node by its UID, or "" where it is not known.
	Named func(uid string) string
}

// With describes them, "" where there are none: a pod that the kubelet lists with the claim, and pods of the claim's namespace that run
// although the kubelet does not list them. These were deleted by force: their containers get as long to end as their author has written,
// while their claims are free for others. An error means that it is not known.
func (p Pods) With(ctx context.Context, namespace, claim string) (string, error) {
	listed, err := (&Finder{Socket: p.Socket, PodName: p.PodName}).pods(ctx)
	if errors.Is(err, errNoSocket) {
		return "", nil // there is nobody to ask on this node
	}
	if err != nil {
		return "", err
	}
	var found []string
	known := map[string]bool{}
	for _, pod := range listed {
		name := pod.GetNamespace() + "/" + pod.GetName()
		known[name] = true
		for _, container := range pod.GetContainers() {
			for _, d := range container.GetDynamicResources() {
				if d.GetClaimNamespace() == namespace && d.GetClaimName() == claim {
					found = append(found, "pod "+name)
				}
			}
		}
	}
	running, err := p.running()
	for name, ids := range running {
		of, _, _ := strings.Cut(name, "/")
		switch {
		case name == "":
			for id := range ids {
				found = append(found, "pod with UID "+id+", whose name is not known")
			}
		case of == namespace && (!known[name] || len(ids) > 1): // a pod that the kubelet lists may have the name of one that was deleted
			found = append(found, "pod "+name+", which was deleted and runs")
		}
	}
	if found = unique(found); len(found) > shownPods {
		found = append(found[:shownPods], fmt.Sprintf("and %d more", len(found)-shownPods))
	}
	return strings.Join(found, ", "), err
}

// shownPods is how many pods are described.
const shownPods = 5

// running are the UIDs of the pods that have processes, by their names.
func (p Pods) running() (map[string]map[string]bool, error) {
	processes, err := filepath.Glob(filepath.Join(p.Proc, "[0-9]*"))
	if err != nil {
		return nil, err
	}
	uids := map[string]bool{}
	procfs := os.DirFS(p.Proc)
	for _, folder := range processes {
		pid, _ := strconv.Atoi(filepath.Base(folder))
		if pod, is := podcgroup.OfProcess(procfs, pid); is {
			uids[pod.UID] = true
		}
	}
	pods := map[string]map[string]bool{}
	for _, uid := range slices.Sorted(maps.Keys(uids)) {
		name := p.Named(uid)
		if pods[name] == nil {
			pods[name] = map[string]bool{}
		}
		pods[name][uid] = true
	}
	return pods, nil
}

// errNoSocket says that the kubelet of this node has no PodResources API in the folder that is mounted.
var errNoSocket = fmt.Errorf("the kubelet cannot be asked which devices pods have: %w", fs.ErrNotExist)
