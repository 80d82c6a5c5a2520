// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const tenantCommand = "tenant"

// filled is what a tenant fills a file with: much more than it needs itself.
const filled = 256 * mebibyte

// runTenant is a container's program: it enters a cgroup, does what it is told, says so,
// and goes on until its input ends.
func runTenant(cgroup string, does []string) error {
	if err := os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte("0"), 0); err != nil {
		return err
	}
	for _, do := range does {
		what, path, _ := strings.Cut(do, "=")
		var err error
		switch what {
		case "fill":
			var file *os.File
			if file, err = os.Create(path); err == nil {
				for data := make([]byte, mebibyte); err == nil && grows(file); {
					_, err = file.Write(data)
				}
				err = errors.Join(err, file.Close())
			}
		case "read":
			var file *os.File
			if file, err = os.Open(path); err == nil {
				_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{file}, make([]byte, mebibyte))
				err = errors.Join(err, file.Close())
			}
		case "limit":
			// Where there is swap, it is not for this.
			_ = os.WriteFile(filepath.Join(cgroup, "memory.swap.max"), []byte("0"), 0)
			_ = os.WriteFile(filepath.Join(cgroup, "memory.swappiness"), []byte("0"), 0)
			err = os.WriteFile(filepath.Join(cgroup, path), []byte(strconv.Itoa(filled/2)), 0)
		case "map":
			var file *os.File
			if file, err = os.Open(path); err == nil {
				_, err = unix.Mmap(int(file.Fd()), 0, 1, unix.PROT_READ, unix.MAP_SHARED)
				err = errors.Join(err, file.Close())
			}
		default:
			err = fmt.Errorf("what is %q?", do)
		}
		if err != nil {
			return err
		}
	}
	goOn()
	return nil
}

// goOn says that all is done, and waits for the end.
func goOn() {
	fmt.Println("done")
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
}

// grows reports whether a file has room for more.
func grows(file *os.File) bool {
	info, err := file.Stat()
	return err == nil && info.Size() < filled
}

// tenants are pods and containers, as far as the kernel is concerned.
type tenants struct {
	*testing.T

	cgroup string
}

func newTenants(t *testing.T) *tenants {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("cgroups need root")
	}
	root := "/sys/fs/cgroup/memory"
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
		root = "/sys/fs/cgroup"
	}
	x := &tenants{T: t}
	for _, name := range []string{"partage-test-" + strconv.Itoa(os.Getpid()), t.Name()} {
		// Where there is only one hierarchy, each cgroup hands the controller down.
		control := filepath.Join(root, "cgroup.subtree_control")
		if _, err := os.Stat(control); err == nil && os.WriteFile(control, []byte("+memory"), 0) != nil {
			t.Skip("no memory controller for new cgroups")
		}
		root = filepath.Join(root, strings.ReplaceAll(name, "/", "-"))
		if err := os.Mkdir(root, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			t.Skipf("cannot make cgroups: %v", err)
		}
	}
	x.cgroup = root
	t.Cleanup(func() { _, _ = os.Remove(root), os.Remove(filepath.Dir(root)) })
	return x
}

// pod returns the cgroup of a pod.
func (x *tenants) pod(number int) string {
	return filepath.Join(x.cgroup, fmt.Sprintf("pod%08d-0000-4000-8000-000000000000", number))
}

// container starts a container in a pod. The function that it returns ends it, removes
// its cgroup, and that of the pod if that has no others.
func (x *tenants) container(pod int, does ...string) (end func()) {
	x.Helper()
	end, done := x.start(pod, does...)
	if !done {
		x.Fatalf("pod %d could not do %q", pod, does)
	}
	return end
}

// start starts a container, and reports whether it could do all that it was told.
func (x *tenants) start(pod int, does ...string) (end func(), done bool) {
	x.Helper()
	at := x.pod(pod)
	folder, err := at, error(nil)
	for _, path := range []string{x.cgroup, at} {
		control := filepath.Join(path, "cgroup.subtree_control")
		if path == at {
			err = os.MkdirAll(at, 0o755)
		}
		if _, statErr := os.Stat(control); statErr == nil && err == nil {
			err = os.WriteFile(control, []byte("+memory"), 0)
		}
		if err != nil {
			x.Fatal(err)
		}
	}
	if folder, err = os.MkdirTemp(at, "container"); err != nil {
		x.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", append([]string{tenantCommand, folder}, does...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		x.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		x.Fatal(err)
	}
	end = func() {
		_ = in.Close()
		_ = cmd.Wait()
		eventually(x, "the cgroup to be empty", func() bool {
			err := os.Remove(folder)
			return err == nil || errors.Is(err, os.ErrNotExist)
		})
		_ = os.Remove(at)
	}
	x.Cleanup(end)
	line, _ := bufio.NewReader(out).ReadString('\n')
	if line != "done\n" && line != "" {
		x.Log(line)
	}
	return end, line == "done\n"
}
