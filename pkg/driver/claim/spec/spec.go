// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package spec writes what containers get of a claim: its CDI spec, and the folder in which an interposer library keeps
// their software limits.
package spec

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/driver/cdi"
	"github.com/partage-dev/partage/pkg/driver/cdi/edit"
	"github.com/partage-dev/partage/pkg/driver/cdi/hook"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/pkg/policy"
	"github.com/partage-dev/partage/pkg/util/steptime"
)

// CDI writes and removes the specs of claims. Both are idempotent.
type CDI interface {
	// Write returns the qualified name of each device.
	Write(ctx context.Context, claimUID types.UID, devices []cdi.Device) (map[string]string, error)
	// Matches reports whether the spec that is there is what Write would write.
	Matches(ctx context.Context, claimUID types.UID, devices []cdi.Device) (bool, error)
	Remove(claimUID types.UID) error
	// List returns the claims that have a spec.
	List() ([]types.UID, error)
}

// Specs are what containers get of claims: CDI specs, and the folders of software limits that they mount.
type Specs struct {
	CDI CDI
	// Roots are where device numbers are looked up.
	Roots host.Roots
	// Hook is a program on the host that checks before a container starts whether its limits hold (cmd/partage-hook).
	Hook string
	// Interposer is a library on the host that holds the containers of claims to their limits, empty where there is none. What it
	// needs is in LimitsDir: a folder for each claim, which is in no other claim's containers.
	Interposer, LimitsDir string
	// Sockets is the folder on the host in which the hook finds the plugin, which has the driver limit memory.
	Sockets string
	// Mount makes a folder that containers cannot fill beyond a number of bytes; one that is mounted already stays. Unmount
	// succeeds when there is no such folder. They are those of package host, except in tests.
	Mount   func(path string, bytes int64) error
	Unmount func(path string) error
}

// Write makes the folder of software limits, if the claim has any, and writes the CDI spec. All partitions of the record must
// be made. Nothing of a claim that is not prepared can be in use. It returns the qualified name of each device by its key.
func (k *Specs) Write(ctx context.Context, r *record.Record) (map[string]string, error) {
	defer steptime.Of(ctx).Begin(steptime.CDI)()
	devices, err := k.devices(ctx, r)
	if err != nil {
		return nil, err
	}
	if r.State != record.Prepared {
		if err := checkRequests(r, devices); err != nil {
			return nil, err
		}
	}
	if slices.ContainsFunc(r.Devices, func(d record.Device) bool { return d.Shared().Limited }) {
		if err := k.makeLimits(r); err != nil {
			return nil, fmt.Errorf("folder for software limits: %w", err)
		}
	}
	return k.CDI.Write(ctx, r.Claim.UID, devices)
}

// Matches reports whether the CDI spec of a claim is there and up to date.
func (k *Specs) Matches(ctx context.Context, r *record.Record) (bool, error) {
	devices, err := k.devices(ctx, r)
	if err != nil {
		return false, err
	}
	return k.CDI.Matches(ctx, r.Claim.UID, devices)
}

// Remove removes all that containers get of a claim: its CDI spec, and its folder. None is a success.
func (k *Specs) Remove(ctx context.Context, uid types.UID) error {
	defer steptime.Of(ctx).Begin(steptime.CDI)()
	err := k.CDI.Remove(uid)
	if folderErr := k.Unmount(k.folder(uid)); folderErr != nil {
		err = errors.Join(err, fmt.Errorf("folder for software limits: %w", folderErr))
	}
	return err
}

// List returns the claims that have a CDI spec, and those that have nothing but a folder: a process was killed, or the folder
// could not be removed.
func (k *Specs) List() (specs, folders []types.UID, err error) {
	if specs, err = k.CDI.List(); err != nil {
		return nil, nil, err
	}
	found, err := os.ReadDir(k.LimitsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("folders for software limits: %w", err)
	}
	for _, folder := range found {
		uid := types.UID(folder.Name())
		if record.CheckUID(uid) == nil && !slices.Contains(specs, uid) {
			folders = append(folders, uid)
		}
	}
	return specs, folders, nil
}

// checkRequests refuses a request whose devices no container can have together. A
// container gets all devices of a request, and the hook would refuse it when it starts.
func checkRequests(r *record.Record, devices []cdi.Device) error {
	env := map[string][]string{}
	for i := range r.Devices {
		for _, request := range r.Devices[i].Requests {
			env[request] = append(env[request], devices[i].Env...)
		}
	}
	for _, request := range slices.Sorted(maps.Keys(env)) {
		if err := hook.CheckMarkers(env[request]); err != nil {
			return fmt.Errorf("request %s: %w", request, err)
		}
	}
	return nil
}

// devices finds what every device of a record adds to containers, as it is now. All partitions must be made.
func (k *Specs) devices(ctx context.Context, r *record.Record) ([]cdi.Device, error) {
	var devices []cdi.Device
	for i := range r.Devices {
		d := &r.Devices[i]
		edits, err := k.edits(ctx, r, d)
		if err != nil {
			return nil, fmt.Errorf("device %s: %w", d.Device, err)
		}
		device, err := edit.Device(d.Key(), edits...)
		if err != nil {
			return nil, err
		}
		devices = append(devices, device)
	}
	return devices, nil
}

// edits chooses what a device adds to containers: a new mechanism adds its own here.
func (k *Specs) edits(ctx context.Context, r *record.Record, d *record.Device) ([]edit.Edit, error) {
	var edits []edit.Edit
	roots := k.Roots.Within(ctx)
	switch {
	case d.Partition == nil:
		edits = append(edits, edit.GPU{Roots: roots, PCIAddress: d.PCIAddress})
		if d.Admin && d.Divisible {
			edits = append(edits, edit.Monitor{Roots: roots})
		}
	case d.Partition.Made == nil:
		return nil, fmt.Errorf("the partition with %s is not made", d.Address())
	default:
		edits = append(edits, edit.Partition{
			Roots: roots, PCIAddress: d.PCIAddress, InstanceID: d.Partition.Made.InstanceID, ComputeID: d.Partition.Made.ComputeID,
		})
	}
	switch {
	case d.Sharing != nil && d.Sharing.Session != "":
		edits = append(edits, k.mpsClient(r, d))
	case d.Shared().Limited:
		edits = append(edits, k.interposer(r, d))
	case !d.Admin:
		edits = append(edits, edit.Direct{Device: d.Key(), Owner: string(r.Claim.UID) + "/" + d.Key()})
	}
	if soft := d.Shared().GuaranteedBytes; soft > 0 {
		edits = append(edits, edit.MemoryLimit{
			PCIAddress: d.PCIAddress, UUID: d.Sharing.UUID, Hook: k.Hook, Sockets: k.Sockets, Owner: string(r.Claim.UID) + "/" + d.Key(),
			SoftBytes: soft, HardBytes: d.Sharing.Limits.MemoryBytes,
		})
	}
	return edits, nil
}

func (k *Specs) mpsClient(r *record.Record, d *record.Device) edit.MPSClient {
	s := r.Session(d.Sharing.Session)
	client := edit.MPSClient{
		Session: s.ID, PipeDir: s.PipeDir, ShmDir: s.ShmDir, Hook: k.Hook, Owner: string(r.Claim.UID) + "/" + s.ID,
	}
	if s.Shared {
		// The server's limits are those of the largest share.
		client.Owner = string(r.Claim.UID) + "/" + d.Key()
		client.ActiveThreadPercentage, client.PinnedMemoryBytes = d.Sharing.Limits.Percent, d.Sharing.Limits.MemoryBytes
		client.BelowNormal = d.Sharing.ClientPriority == policy.PriorityBelowNormal
	}
	return client
}

// interposer has the same owner for the devices of a request, which containers get together, unless they are shares of one.
func (k *Specs) interposer(r *record.Record, d *record.Device) edit.Interposer {
	owner := strings.Join(d.Requests, ",")
	if slices.ContainsFunc(r.Devices, func(other record.Device) bool { return other.Device == d.Device && other.Key() != d.Key() }) {
		owner = d.Key()
	}
	return edit.Interposer{
		Library: k.Interposer, Folder: k.folder(r.Claim.UID), Device: d.Key(), Hook: k.Hook, Owner: string(r.Claim.UID) + "/" + owner,
		MemoryBytes: d.Sharing.Limits.MemoryBytes, SMPercent: d.Sharing.Limits.Percent,
	}
}

// limitsBytes is room for the counters of many devices; the library's take about a megabyte each.
const limitsBytes = 16 << 20

// makeLimits makes the folder of a claim with devices that an interposer library limits. Containers write to it, so that it
// is a file system of its own, in memory: a tenant must not be able to fill the disk that the records are on.
func (k *Specs) makeLimits(r *record.Record) error {
	if err := k.Mount(k.folder(r.Claim.UID), limitsBytes); err != nil {
		return err
	}
	for i := range r.Devices {
		d := &r.Devices[i]
		if !d.Shared().Limited {
			continue
		}
		layout := k.interposer(r, d)
		for _, dir := range []string{layout.CacheDir(), layout.LocksDir()} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			// The library writes as whatever user the container has. The mode is set past the umask.
			if err := os.Chmod(dir, os.ModeSticky|0o777); err != nil {
				return err
			}
		}
		// The file is there already where a tenant may have filled the folder.
		if present, err := os.ReadFile(layout.PreloadPath()); err == nil && string(present) == edit.PreloadText {
			continue
		}
		if err := host.ReplaceUnsynced(layout.PreloadPath(), []byte(edit.PreloadText), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (k *Specs) folder(uid types.UID) string { return filepath.Join(k.LimitsDir, string(uid)) }
