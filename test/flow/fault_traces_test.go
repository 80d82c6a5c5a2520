// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package flow

import (
	"encoding/json"
	"errors"
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

// place is a partition of a GPU by profile name and start.
type place struct {
	profile string
	start   int
}

// at finds the live instance of a partition, or nil.
func (at place) find(g *machine.GPU) *machine.GPUInstance {
	for i := range g.MIG.Instances {
		in := &g.MIG.Instances[i]
		if profileName(g, in.ProfileID) == at.profile && in.Placement.Start == at.start {
			return in
		}
	}
	return nil
}

func profileName(g *machine.GPU, id uint32) string {
	for _, p := range g.MIG.Profiles {
		if p.ID == id {
			return p.Name
		}
	}
	return ""
}

// places are all live instances of a GPU, in the order of their starts.
func places(g *machine.GPU) []place {
	var all []place
	if g.MIG == nil {
		return nil
	}
	for _, in := range g.MIG.Instances {
		all = append(all, place{profileName(g, in.ProfileID), in.Placement.Start})
	}
	slices.SortFunc(all, func(a, b place) int { return a.start - b.start })
	return all
}

// deviceNode is a character device as a container gets it.
type deviceNode struct {
	Path         string
	Major, Minor int64
}

// wantNodes are the device nodes of a GPU, and of a partition of it, that the
// files of the machine tell, apart from the common ones.
func (n *node) wantNodes(g *machine.GPU, in *machine.GPUInstance) ([]deviceNode, error) {
	const nvidiaMajor = 195
	nodes := []deviceNode{{"/dev/nvidia" + itoa(g.Minor), nvidiaMajor, int64(g.Minor)}}
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
		nodes = append(nodes, deviceNode{fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), major, minor})
	}
	slices.SortFunc(nodes, func(a, b deviceNode) int { return strings.Compare(a.Path, b.Path) })
	return nodes, nil
}

// number reads one number from a file of the machine.
func (n *node) number(path, pattern string) (int64, error) {
	data, err := os.ReadFile(filepath.Join(n.root, path))
	if err != nil {
		return 0, err
	}
	found := regexp.MustCompile(pattern).FindSubmatch(data)
	if found == nil {
		return 0, fmt.Errorf("%s has no line like %s", path, pattern)
	}
	return strconv.ParseInt(string(found[1]), 10, 64)
}

// specNodes are the device nodes that a claim's CDI spec gives to a container
// that gets the device with this CDI id.
func (n *node) specNodes(uid, id string) ([]deviceNode, error) {
	entries, err := os.ReadDir(n.cdi)
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(entries, func(e os.DirEntry) bool { return strings.Contains(e.Name(), uid) })
	if at < 0 {
		return nil, fmt.Errorf("claim %s has no CDI file", uid)
	}
	spec, err := cdi.ReadSpec(filepath.Join(n.cdi, entries[at].Name()), 0)
	if err != nil {
		return nil, err
	}
	_, name, _ := strings.Cut(id, "=")
	device := spec.GetDevice(name)
	if device == nil {
		return nil, fmt.Errorf("CDI file %s has no device %s", entries[at].Name(), name)
	}
	var nodes []deviceNode
	for _, d := range device.ContainerEdits.DeviceNodes {
		nodes = append(nodes, deviceNode{d.Path, d.Major, d.Minor})
	}
	slices.SortFunc(nodes, func(a, b deviceNode) int { return strings.Compare(a.Path, b.Path) })
	return nodes, nil
}

// written is what the tests read of a journal file.
type written struct {
	State   string `json:"state"`
	Devices []struct {
		Device    string `json:"device"`
		Partition *struct {
			Live *struct {
				UUID string `json:"uuid"`
			} `json:"live"`
		} `json:"partition"`
	} `json:"devices"`
}

// record reads the journal of a claim; nil says that there is none.
func (n *node) record(uid string) (*written, error) {
	data, err := os.ReadFile(filepath.Join(n.plugins, driverName, "claims", uid+".json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var w written
	return &w, json.Unmarshal(data, &w)
}

// checkPrepared fails unless a claim with one device is prepared: the partition
// is there (or the GPU is undivided, for an empty place), the CDI spec names its
// device nodes and the journal what is live.
func (n *node) checkPrepared(uid string, ids []string, gpu int, at place) error {
	if len(ids) != 1 {
		return fmt.Errorf("the claim has the CDI ids %v, want one", ids)
	}
	m, err := n.state.Snapshot()
	if err != nil {
		return err
	}
	g := &m.GPUs[gpu]
	var in *machine.GPUInstance
	uuid := ""
	if at.profile != "" {
		if in = at.find(g); in == nil {
			return fmt.Errorf("GPU %d has no partition %v but %v", gpu, at, places(g))
		}
		if len(in.Compute) == 1 {
			uuid = in.Compute[0].UUID
		}
	} else if g.MIG != nil && g.MIG.Current {
		return fmt.Errorf("GPU %d is prepared undivided and in MIG mode", gpu)
	}
	want, err := n.wantNodes(g, in)
	if err != nil {
		return err
	}
	got, err := n.specNodes(uid, ids[0])
	if err != nil {
		return err
	}
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("device nodes of the claim (-want +got):\n%s", diff)
	}
	return n.checkRecord(uid, uuid)
}

// checkRecord fails unless the journal says that a claim with one device is
// prepared, with the MIG device of this UUID if it is not empty.
func (n *node) checkRecord(uid, uuid string) error {
	r, err := n.record(uid)
	switch {
	case err != nil:
		return err
	case r == nil || r.State != "prepared" || len(r.Devices) != 1:
		return fmt.Errorf("the journal says %+v of claim %s", r, uid)
	case uuid == "":
		return nil
	}
	p := r.Devices[0].Partition
	if p == nil || p.Live == nil || p.Live.UUID != uuid {
		return fmt.Errorf("the journal of claim %s does not name MIG device %s: %+v", uid, uuid, r)
	}
	return nil
}

// checkNoFiles fails unless the claim has neither a CDI file nor a record.
func (n *node) checkNoFiles(uid string) error {
	for _, dir := range []string{n.cdi, filepath.Join(n.plugins, driverName, "claims")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), uid) {
				return fmt.Errorf("%s is left in %s", e.Name(), filepath.Base(dir))
			}
		}
	}
	return nil
}
