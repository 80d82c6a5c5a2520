// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package cdi writes Container Device Interface specs, from which a container runtime
// learns how to add the devices of a claim to a container: one file per claim, named
// after the claim's UID.
//
// What every container needs of the driver (libraries, control nodes, hooks) comes
// from NVIDIA's nvcdi library and is in each file once. What a device needs is given by
// the caller; package edit makes it.
package cdi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	cdiapi "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/gpu/call"
	"github.com/partage-dev/partage/pkg/node/host"
)

const (
	// Vendor is the first part of the kind of all devices here.
	Vendor = "k8s.gpu.nvidia.com"
	// Class is the second part.
	Class = "claim"

	// Conformance is in the place of a claim's UID in the spec of the conformance checks, which runs beside the driver.
	Conformance types.UID = "partage-conformance"

	// DefaultHookPath is where NVIDIA's packages install nvidia-cdi-hook.
	DefaultHookPath = "/usr/bin/nvidia-cdi-hook"

	// specMode allows runtimes that do not run as root to read the specs, which
	// contain no secrets.
	specMode = 0o644
)

// Options are the paths that Specs needs.
type Options struct {
	// Root is the folder that the container runtime reads specs from.
	Root string
	// Roots are where the driver is.
	Roots host.Roots
	// HookPath is the path of nvidia-cdi-hook on the host. Default DefaultHookPath.
	HookPath string
	// Calls are the queues of the process, or nil for some of the caller's own.
	Calls *call.Queues
}

// Specs writes and removes the spec files of claims. Calls for different claims
// may be concurrent; calls for one claim must exclude each other.
type Specs struct {
	root   string
	common *commonEdits
}

// New creates the folder for specs if it does not exist. It needs no driver yet.
func New(o Options) (*Specs, error) {
	switch {
	case !filepath.IsAbs(o.Root):
		return nil, fmt.Errorf("CDI root %q must be an absolute path", o.Root)
	case o.HookPath == "":
		o.HookPath = DefaultHookPath
	case !filepath.IsAbs(o.HookPath):
		return nil, fmt.Errorf("nvidia-cdi-hook %q must be an absolute path on the host", o.HookPath)
	}
	roots := o.Roots.Complete()
	for name, path := range map[string]string{"driver root": roots.HostDriver, "dev root": roots.DevRoot().OnHost} {
		// A relative one would become a relative mount, which runtimes refuse only when
		// the first container starts.
		if !filepath.IsAbs(path) {
			return nil, fmt.Errorf("the host's %s %q must be an absolute path", name, path)
		}
	}
	if err := os.MkdirAll(o.Root, 0o755); err != nil {
		return nil, fmt.Errorf("CDI root: %w", err)
	}
	return &Specs{root: o.Root, common: newCommonEdits(roots, o.HookPath, o.Calls)}, nil
}

// SetDriverVersion sets the version of the kernel driver. Until it is called the
// version comes from the library's file name; afterwards libraries of another version
// are an error.
func (s *Specs) SetDriverVersion(version string) { s.common.setVersion(version) }

// Write creates or replaces the spec of a claim and returns the fully qualified name
// of each device. It does not touch a file with the same content.
func (s *Specs) Write(ctx context.Context, claimUID types.UID, devices []Device) (map[string]string, error) {
	data, ids, err := s.render(ctx, claimUID, devices)
	if err != nil {
		return nil, err
	}
	if s.has(claimUID, data) {
		return ids, nil
	}
	// /var/run may have been emptied since New.
	if err = os.MkdirAll(s.root, 0o755); err == nil {
		err = host.ReplaceUnsynced(s.path(claimUID), data, specMode)
	}
	if err != nil {
		return nil, fmt.Errorf("CDI spec of claim %s: %w", claimUID, err)
	}
	return ids, nil
}

// Matches reports whether the spec of a claim is what Write would write.
func (s *Specs) Matches(ctx context.Context, claimUID types.UID, devices []Device) (bool, error) {
	data, _, err := s.render(ctx, claimUID, devices)
	return err == nil && s.has(claimUID, data), err
}

func (s *Specs) has(claimUID types.UID, data []byte) bool {
	present, err := os.ReadFile(s.path(claimUID))
	return err == nil && bytes.Equal(present, data)
}

// render returns the content of a claim's spec file and the fully qualified name of
// each device.
func (s *Specs) render(ctx context.Context, claimUID types.UID, devices []Device) (data []byte, ids map[string]string, err error) {
	if err := validUID(claimUID); err != nil {
		return nil, nil, err
	}
	var spec *specs.Spec
	common, err := s.common.get(ctx)
	if err == nil {
		spec, ids, err = build(claimUID, common, devices)
	}
	if err == nil {
		data, err = json.MarshalIndent(spec, "", "  ")
	}
	if err != nil {
		return nil, nil, fmt.Errorf("CDI spec of claim %s: %w", claimUID, err)
	}
	return append(data, '\n'), ids, nil
}

// Remove removes the spec of a claim. It succeeds if there is none.
func (s *Specs) Remove(claimUID types.UID) error {
	if err := validUID(claimUID); err != nil {
		return err
	}
	if err := host.RemoveUnsynced(s.path(claimUID)); err != nil {
		return fmt.Errorf("CDI spec of claim %s: %w", claimUID, err)
	}
	return nil
}

// List returns the claims that have a spec, or of which a process that was killed started to write one, without that of the
// conformance checks: the driver removes specs that have no record.
func (s *Specs) List() ([]types.UID, error) {
	entries, err := os.ReadDir(s.root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("CDI specs: %w", err)
	}
	var uids []types.UID
	prefix := cdiapi.GenerateTransientSpecName(Vendor, Class, "")
	for _, entry := range entries {
		name, ours := strings.CutPrefix(host.FinalName(entry.Name()), prefix)
		uid, isSpec := strings.CutSuffix(name, specSuffix)
		if ours && isSpec && uid != string(Conformance) {
			uids = append(uids, types.UID(uid))
		}
	}
	slices.Sort(uids)
	return slices.Compact(uids), nil
}

// HookPrograms returns the paths of all programs that specs of claims name as hooks,
// whichever instance of the driver wrote them.
func (s *Specs) HookPrograms() (map[string]bool, error) {
	claims, err := s.List()
	if err != nil {
		return nil, err
	}
	programs := map[string]bool{}
	for _, uid := range append(claims, Conformance) {
		var spec specs.Spec
		path := s.path(uid)
		data, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // its claim ended meanwhile
		}
		if err == nil {
			err = json.Unmarshal(data, &spec)
		}
		if err != nil {
			return nil, fmt.Errorf("CDI spec %s: %w", path, err)
		}
		hooks := spec.ContainerEdits.Hooks
		for i := range spec.Devices {
			hooks = append(hooks, spec.Devices[i].ContainerEdits.Hooks...)
		}
		for _, hook := range hooks {
			programs[hook.Path] = true
		}
	}
	return programs, nil
}

const specSuffix = ".json"

func (s *Specs) path(claimUID types.UID) string {
	return filepath.Join(s.root, cdiapi.GenerateTransientSpecName(Vendor, Class, string(claimUID))+specSuffix)
}

var uidText = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z-]{0,62}$`)

// validUID refuses a UID that would lead to another path.
func validUID(uid types.UID) error {
	if !uidText.MatchString(string(uid)) {
		return fmt.Errorf("claim UID %q: want letters, digits and dashes", uid)
	}
	return nil
}

// forwardCompatibility is the command of NVIDIA's hook that prefers the CUDA library of the image where it is newer than the driver's.
const forwardCompatibility = "enable-cuda-compat"

// build returns the spec for devices, and their names in it. The order of devices does
// not matter.
func build(claimUID types.UID, common specs.ContainerEdits, devices []Device) (*specs.Spec, map[string]string, error) {
	spec := &specs.Spec{Kind: Vendor + "/" + Class, ContainerEdits: common}
	ids := make(map[string]string, len(devices))
	for _, d := range slices.SortedFunc(slices.Values(devices), func(a, b Device) int { return cmp.Compare(a.Name, b.Name) }) {
		if _, twice := ids[d.Name]; twice {
			return nil, nil, fmt.Errorf("device %s is listed twice", d.Name)
		}
		entry, err := deviceEntry(claimUID, d)
		if err != nil {
			return nil, nil, err
		}
		spec.Devices = append(spec.Devices, entry)
		ids[d.Name] = parser.QualifiedName(Vendor, Class, entry.Name)
	}
	if slices.ContainsFunc(devices, func(d Device) bool { return d.NodesLibrary }) {
		// Also of the claim's other devices: which of them a container has is not known here.
		common := &spec.ContainerEdits
		common.Hooks = slices.DeleteFunc(slices.Clone(common.Hooks), func(h *specs.Hook) bool {
			return slices.Contains(h.Args, forwardCompatibility)
		})
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, nil, err
	}
	spec.Version = version
	return spec, ids, validate(spec)
}

// validate applies the rules of the CDI library, as runtimes do when they load a file. A runtime that refuses a spec only logs it.
func validate(spec *specs.Spec) error {
	if len(spec.Devices) == 0 {
		return errors.New("no devices")
	}
	if err := specs.ValidateVersion(spec); err != nil {
		return err
	}
	if err := (&cdiapi.ContainerEdits{ContainerEdits: &spec.ContainerEdits}).Validate(); err != nil {
		return err
	}
	for i := range spec.Devices {
		device := &spec.Devices[i]
		if err := parser.ValidateDeviceName(device.Name); err != nil {
			return fmt.Errorf("device %q: %w", device.Name, err)
		}
		if err := (&cdiapi.ContainerEdits{ContainerEdits: &device.ContainerEdits}).Validate(); err != nil {
			return fmt.Errorf("device %q: %w", device.Name, err)
		}
	}
	return nil
}
