// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/partage-dev/partage/test/gpusim/machine"
)

// DeviceNode is a character device as a container gets it.
type DeviceNode struct {
	Path         string
	Major, Minor int64
}

// WantNodes are the device nodes of a GPU and of a partition of it, according to the
// files of the machine, without the common ones.
func (n *Node) WantNodes(g *machine.GPU, in *machine.GPUInstance) ([]DeviceNode, error) {
	const nvidiaMajor = 195
	nodes := []DeviceNode{{"/dev/nvidia" + strconv.Itoa(g.Minor), nvidiaMajor, int64(g.Minor)}}
	if in == nil {
		return nodes, nil
	}
	if len(in.Compute) != 1 {
		return nil, fmt.Errorf("GPU instance %d has %d compute instances, want 1", in.ID, len(in.Compute))
	}
	major, err := n.number("proc/devices", `(?m)^ *([0-9]+) nvidia-caps$`)
	if err != nil {
		return nil, err
	}
	dir := fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", g.Minor, in.ID)
	for _, file := range []string{"access", fmt.Sprintf("ci%d/access", in.Compute[0].ID)} {
		minor, err := n.number(filepath.Join(dir, file), `DeviceFileMinor: ([0-9]+)`)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, DeviceNode{fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), major, minor})
	}
	slices.SortFunc(nodes, func(a, b DeviceNode) int { return strings.Compare(a.Path, b.Path) })
	return nodes, nil
}

// number reads one number from a file of the machine.
func (n *GPUs) number(path, pattern string) (int64, error) {
	data, err := os.ReadFile(filepath.Join(n.Root, path))
	if err != nil {
		return 0, err
	}
	found := regexp.MustCompile(pattern).FindSubmatch(data)
	if found == nil {
		return 0, fmt.Errorf("%s has no line like %s", path, pattern)
	}
	return strconv.ParseInt(string(found[1]), 10, 64)
}

// SpecNodes are the device nodes that a claim's CDI spec gives to a container
// that gets the device with this CDI id.
func (n *Files) SpecNodes(uid, id string) ([]DeviceNode, error) {
	entries, err := os.ReadDir(n.CDIDir)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(entries, func(e os.DirEntry) bool {
		return strings.Contains(e.Name(), uid) && !strings.Contains(e.Name(), "_metadata_")
	})
	if at < 0 {
		return nil, fmt.Errorf("claim %s has no CDI file", uid)
	}
	spec, err := cdi.ReadSpec(filepath.Join(n.CDIDir, entries[at].Name()), 0)
	if err != nil {
		return nil, err
	}
	_, name, _ := strings.Cut(id, "=")
	device := spec.GetDevice(name)
	if device == nil {
		return nil, fmt.Errorf("CDI file %s has no device %s", entries[at].Name(), name)
	}
	var nodes []DeviceNode
	for _, d := range device.ContainerEdits.DeviceNodes {
		nodes = append(nodes, DeviceNode{d.Path, d.Major, d.Minor})
	}
	slices.SortFunc(nodes, func(a, b DeviceNode) int { return strings.Compare(a.Path, b.Path) })
	return nodes, nil
}

// CheckPrepared fails unless a claim with one device is prepared: the partition
// is there (or the GPU is undivided, for an empty place), the CDI spec names its
// device nodes and the journal what is live.
func (n *Node) CheckPrepared(uid string, ids []string, gpu int, at Place) error {
	if len(ids) != 1 {
		return fmt.Errorf("the claim has the CDI ids %v, want one", ids)
	}
	m, err := n.State.Snapshot()
	if err != nil {
		return err
	}
	g := &m.GPUs[gpu]
	var in *machine.GPUInstance
	uuid := ""
	if at.Profile != "" {
		if in = at.Find(g); in == nil {
			return fmt.Errorf("GPU %d has no partition %v but %v", gpu, at, Places(g))
		}
		if len(in.Compute) == 1 {
			uuid = in.Compute[0].UUID
		}
	} else if g.MIG != nil && g.MIG.Current {
		return fmt.Errorf("GPU %d is prepared undivided and in MIG mode", gpu)
	}
	want, err := n.WantNodes(g, in)
	if err != nil {
		return err
	}
	got, err := n.SpecNodes(uid, ids[0])
	if err != nil {
		return err
	}
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("device nodes of the claim (-want +got):\n%s", diff)
	}
	return n.checkRecord(uid, uuid)
}
