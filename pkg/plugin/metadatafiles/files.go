// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package metadatafiles keeps the files by which containers read about their devices (KEP-5304).
// The kubelet plugin helper decides what is in them and when they come and go; this package
// makes it harmless that they are there:
//
//   - They are written atomically, and not synced to disk. They have to survive the driver, and
//     not the machine: after a reboot the kubelet has every claim prepared again, which writes
//     them anew.
//   - A container cannot start again when the CDI spec that it was given is missing. Of each
//     spec there is a copy, from which it is made again as long as its claim is prepared.
//   - A pod can end although a file cannot be removed. It is removed later.
//   - The helper names folders by the name of a claim, so that the release of a claim would
//     remove what a new claim of the same name has. Here a file goes with the last spec that
//     mounts it.
package metadatafiles

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/partage-dev/partage/pkg/host"
)

// Files are those of one driver on this node. All methods may be called concurrently, in
// several processes at once.
type Files struct {
	// DriverName is a part of the names of CDI specs.
	DriverName string
	// DataDir is the plugin's folder, in which the helper keeps the files, and CDIDir the
	// folder of CDI specs. Both have the same path on the host.
	DataDir, CDIDir string
	// Context is the SELinux context of files that containers read, empty for none.
	Context string

	// specs orders making specs again and removing them.
	specs sync.Mutex
}

const (
	// metadataDir is the helper's name for its folder.
	metadataDir = "dra-device-metadata"
	// copiesDir has a copy of each CDI spec.
	copiesDir = "dra-device-metadata-cdi"
)

// Operations are what the helper writes and removes files with.
func (f *Files) Operations() kubeletplugin.MetadataFileOperations {
	return kubeletplugin.MetadataFileOperations{
		WriteFile: f.write,
		Remove: func(path string) error {
			if err := f.removeSpec(filepath.Base(path)); err != nil {
				klog.Background().Error(err, "Metadata of a claim that was released could not be removed, will try again")
			}
			return nil
		},
		// A file goes with its spec.
		RemoveAll: func(string) error { return nil },
		// A spec may be missing where its copy is not.
		Glob: func(pattern string) ([]string, error) { return filepath.Glob(f.copyOf(pattern)) },
	}
}

// Remove removes what the containers of a claim had. What it cannot remove is tried again by the
// helper, and by Sweep.
func (f *Files) Remove(claim types.UID) error {
	names, err := f.copies()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		if strings.HasPrefix(name, fmt.Sprintf("%s_metadata_%s_", f.DriverName, claim)) {
			errs = append(errs, f.removeSpec(name))
		}
	}
	return errors.Join(errs...)
}

func (f *Files) copyOf(spec string) string {
	return filepath.Join(f.DataDir, copiesDir, filepath.Base(spec))
}

// write writes a spec and its copy, or a file that containers read.
func (f *Files) write(path string, data []byte, mode fs.FileMode) error {
	if filepath.Dir(path) != filepath.Clean(f.CDIDir) {
		return f.replace(path, data, mode, f.Context)
	}
	// The copy first: what it does not name is not removed.
	if err := os.MkdirAll(filepath.Join(f.DataDir, copiesDir), 0o750); err != nil {
		return err
	}
	if err := f.replace(f.copyOf(path), data, 0o600, ""); err != nil {
		return err
	}
	return f.replace(path, data, mode, "")
}

// temporaryName is the pattern of the names under which a file is written.
func temporaryName(file string) string { return "." + file + ".*.tmp" }

// replace writes a file that has either the old or the new content at any time.
func (f *Files) replace(path string, data []byte, mode fs.FileMode, context string) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), temporaryName(filepath.Base(path)))
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(file.Name()))
		}
	}()
	_, err = file.Write(data)
	if err == nil {
		err = file.Chmod(mode)
	}
	if err == nil && context != "" {
		err = unix.Fsetxattr(int(file.Fd()), "security.selinux", append([]byte(context), 0), 0)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

// removeSpec removes a spec, what it mounts unless another spec does so, and its copy. While the
// copy is there, the rest is tried again.
func (f *Files) removeSpec(name string) error {
	f.specs.Lock()
	defer f.specs.Unlock()
	mounted, err := mountedBy(f.copyOf(name))
	if err != nil {
		return err
	}
	if err := ignoreAbsent(os.Remove(filepath.Join(f.CDIDir, name))); err != nil {
		return err
	}
	others, err := f.mountedByOthers(name)
	if err != nil {
		return err
	}
	for _, path := range mounted {
		if others[path] || !f.isMetadata(path) {
			continue
		}
		if err := f.removeFile(path); err != nil {
			return err
		}
	}
	if err := ignoreAbsent(os.Remove(f.copyOf(name))); err != nil {
		return err
	}
	// Another process may just have made it again.
	return ignoreAbsent(os.Remove(filepath.Join(f.CDIDir, name)))
}

// removeFile removes a file and the folders of its request and claim, once they are empty.
func (f *Files) removeFile(path string) error {
	if err := ignoreAbsent(os.Remove(path)); err != nil {
		return err
	}
	return f.removeFolders(filepath.Dir(path))
}

// removeFolders removes a folder if it is empty, then the one that it is in, and so on.
func (f *Files) removeFolders(dir string) error {
	for ; f.isMetadata(dir); dir = filepath.Dir(dir) {
		if err := ignoreAbsent(os.Remove(dir)); err != nil {
			if errors.Is(err, unix.ENOTEMPTY) {
				return nil
			}
			return err
		}
	}
	return nil
}

// isMetadata reports whether a path is in the helper's folder.
func (f *Files) isMetadata(path string) bool {
	relative, err := filepath.Rel(filepath.Join(f.DataDir, metadataDir), path)
	return err == nil && relative != "." && filepath.IsLocal(relative)
}

// mountedByOthers are the files that the specs but one mount.
func (f *Files) mountedByOthers(name string) (map[string]bool, error) {
	names, err := f.copies()
	if err != nil {
		return nil, err
	}
	mounted := map[string]bool{}
	for _, other := range names {
		if other == name {
			continue
		}
		paths, err := mountedBy(f.copyOf(other))
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			mounted[path] = true
		}
	}
	return mounted, nil
}

// copies lists the copies of specs by name.
func (f *Files) copies() ([]string, error) {
	paths, err := filepath.Glob(f.copyOf(f.DriverName + "_metadata_*.json"))
	if err != nil {
		return nil, err
	}
	for i, path := range paths {
		paths[i] = filepath.Base(path)
	}
	return paths, nil
}

// mountedBy lists the files of the host that a spec mounts. One that makes no sense mounts
// nothing: a power loss cut it off, and the kubelet has its claim prepared again.
func mountedBy(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, ignoreAbsent(err)
	}
	var spec specs.Spec
	if json.Unmarshal(data, &spec) != nil {
		return nil, nil //nolint:nilerr // see above
	}
	var mounted []string
	for _, d := range spec.Devices {
		for _, m := range d.ContainerEdits.Mounts {
			mounted = append(mounted, m.HostPath)
		}
	}
	return mounted, nil
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// specMode lets runtimes read specs that do not run as root.
const specMode = 0o644

// restore makes a spec again of its copy. It leaves none of a claim that is released meanwhile:
// who releases it removes the copy before he looks for the spec for the last time.
func (f *Files) restore(name string) error {
	f.specs.Lock()
	defer f.specs.Unlock()
	path := filepath.Join(f.CDIDir, name)
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	data, err := os.ReadFile(f.copyOf(name))
	if err != nil {
		return ignoreAbsent(err)
	}
	if err := os.MkdirAll(f.CDIDir, 0o755); err != nil {
		return err
	}
	// Its folder was emptied, so that this is as rare as it is important.
	if err := host.ReplaceFile(path, data, specMode); err != nil {
		return err
	}
	if _, err := os.Lstat(f.copyOf(name)); errors.Is(err, fs.ErrNotExist) {
		return ignoreAbsent(os.Remove(path))
	}
	return nil
}
