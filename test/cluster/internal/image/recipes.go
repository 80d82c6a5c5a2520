// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

// The images that every cluster has.
const (
	Pause  = "registry.local/pause:1"
	Plugin = "partage.invalid/gpu-kubelet-plugin:dev"
	Demo   = "partage.invalid/demo:dev"
)

// ErrMissing says that an image cannot be built because something it is made of is not there.
var ErrMissing = errors.New("missing")

// Recipe is how one image is built.
type Recipe struct {
	Ref     string
	Archive string // where it is written
	build   func() (Image, error)
}

// Build builds and writes the image.
func (r Recipe) Build() error {
	i, err := r.build()
	if err != nil {
		return fmt.Errorf("build image %s: %w", r.Ref, err)
	}
	i.Ref = r.Ref
	return i.Write(r.Archive)
}

// Recipes returns how the images are built from the checkout's programs.
func Recipes(repo layout.Repo) []Recipe {
	archive := func(name string) string { return filepath.Join(repo.Images(), name+".tar") }
	return []Recipe{
		{Pause, archive("pause"), func() (Image, error) { return pause(filepath.Join(repo.Bin(), "pause")) }},
		{Demo, archive("demo"), func() (Image, error) { return demo(filepath.Join(repo.Root, "_output", "gpusim", "bin")) }},
		{Plugin, archive("gpu-kubelet-plugin"), func() (Image, error) { return plugin(repo.Products()) }},
	}
}

func pause(bin string) (Image, error) {
	if !exists(bin) {
		return Image{}, fmt.Errorf("%w: %s (run cluster build)", ErrMissing, bin)
	}
	l := NewLayer()
	l.File(bin, "/pause", 0o755)
	return Image{Entrypoint: []string{"/pause"}, Layer: l}, nil
}

// plugin is the driver's image: its programs, the container hooks that it installs on the node, and the libraries of all.
func plugin(bin string) (Image, error) {
	l := NewLayer()
	l.Dir("/tmp", 0o1777)
	for _, name := range []string{"gpu-kubelet-plugin", "mps-supervisor", "partage-hook", "health-probe", "nvidia-cdi-hook", "cuda-probe"} {
		src := filepath.Join(bin, name)
		if !exists(src) {
			return Image{}, fmt.Errorf("%w: %s (run make build)", ErrMissing, src)
		}
		l.File(src, "/usr/bin/"+name, 0o755)
		l.Closure(Resolver{}, src)
	}
	// The driver opens libnvidia-ml at run time; the library's own needs are part of every C library.
	if err := addGlibc(l, filepath.Join(bin, "gpu-kubelet-plugin")); err != nil {
		return Image{}, err
	}
	loaderConfig(l)
	return Image{Entrypoint: []string{"/usr/bin/gpu-kubelet-plugin"}, Layer: l}, nil
}

// demo has a shell, its tools, a stand-in for a CUDA program and a driver for network cards from folder bin, and a C library for
// those and for the programs that Partage puts into containers.
func demo(bin string) (Image, error) {
	client, driver := filepath.Join(bin, "cuda-client"), filepath.Join(bin, "nic-driver")
	for _, program := range []string{client, driver} {
		if !exists(program) {
			return Image{}, fmt.Errorf("%w: %s (run make gpusim)", ErrMissing, program)
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return Image{}, fmt.Errorf("%w: busybox (Debian: busybox-static): %w", ErrMissing, err)
	}
	if libs, err := (Resolver{}).Closure(busybox); err != nil || len(libs) > 0 {
		return Image{}, errors.Join(fmt.Errorf("%w: a static busybox (Debian: busybox-static); %s is not", ErrMissing, busybox), err)
	}
	applets, err := exec.Command(busybox, "--list").Output() //nolint:noctx // prints a list and ends
	if err != nil {
		return Image{}, fmt.Errorf("list the tools of busybox: %w", err)
	}
	l := NewLayer()
	l.Dir("/tmp", 0o1777)
	l.Dir("/root", 0o700)
	l.File(busybox, "/bin/busybox", 0o755)
	for _, name := range strings.Fields(string(applets)) {
		if name != "busybox" {
			l.Link("/bin/"+name, "busybox")
		}
	}
	l.File(driver, "/usr/bin/nic-driver", 0o755)
	l.File(client, "/usr/bin/cuda-client", 0o755)
	l.Closure(Resolver{}, client)
	l.Bytes("/etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\n"))
	l.Bytes("/etc/group", 0o644, []byte("root:x:0:\n"))
	loaderConfig(l)
	if err := addGlibc(l, "/proc/self/exe"); err != nil {
		return Image{}, err
	}
	return Image{Entrypoint: nil, Layer: l}, nil
}

// loaderConfig makes the folders that the hook that updates the loader's cache writes to.
func loaderConfig(l *Layer) {
	l.Dir("/etc/ld.so.conf.d", 0o755)
	l.Bytes("/etc/ld.so.conf", 0o644, []byte("include /etc/ld.so.conf.d/*.conf\n"))
}

// glibc is what a driver's programs and libraries link to.
var glibc = []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}

// addGlibc adds the machine's C library and its loader, of the architecture of the program like.
func addGlibc(l *Layer, like string) error {
	r := Resolver{}
	for _, name := range glibc {
		lib, err := r.Library(name, like)
		if err != nil {
			return fmt.Errorf("%w: the C library: %w", ErrMissing, err)
		}
		l.File(lib, lib, 0o755)
		l.Closure(r, lib) // the loader is named by libc.so.6, which is a program as well
	}
	return nil
}
