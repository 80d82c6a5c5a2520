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

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
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
		must.Do(x, err)
	}
	if folder, err = os.MkdirTemp(at, "container"); err != nil {
		x.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", append([]string{tenantCommand, folder}, does...)...)
	in := must.Get(cmd.StdinPipe())(x)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	must.Do(x, err)
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

// charged returns what a cgroup, with those below it, has of the memory.
func (x *tenants) charged(cgroup string) int64 {
	x.Helper()
	data, err := os.ReadFile(filepath.Join(cgroup, "memory.current"))
	if errors.Is(err, os.ErrNotExist) {
		data, err = os.ReadFile(filepath.Join(cgroup, "memory.usage_in_bytes"))
	}
	number, numberErr := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	must.Do(x, errors.Join(err, numberErr))
	return number
}

// docs/concepts/mps.md says to whom the kernel charges what is in a /dev/shm.
func TestWhoIsChargedForMemory(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=512m")
	path := filepath.Join(folder, "file")

	// Who writes it, and nobody who reads it.
	end := x.container(1, "fill="+path)
	endReader := x.container(2, "read="+path)
	if writer, reader := x.charged(x.pod(1)), x.charged(x.pod(2)); writer < filled || reader > filled/2 {
		t.Errorf("the writer is charged %d MiB, the reader %d, for %d", writer/mebibyte, reader/mebibyte, filled/mebibyte)
	}

	// After its end the cgroup above, for as long as the file is there.
	endReader()
	end()
	expect.Is(t, expect.Err(os.Stat(x.pod(1))), os.ErrNotExist, "the pod is still there")
	if after := x.charged(x.cgroup); after < filled {
		t.Errorf("after the end of the pod, what is above it is charged %d MiB", after/mebibyte)
	}
	must.Do(t, os.Remove(path))
	eventually(t, "the memory to be free", func() bool { return x.charged(x.cgroup) < filled/2 })
}

// A pod's memory limit holds for what it writes to a /dev/shm.
func TestMemoryLimitOfWriter(t *testing.T) {
	x := newTenants(t)
	folder := memoryFolder(t, "size=512m")
	limit := "memory.max"
	if _, err := os.Stat(filepath.Join(x.cgroup, limit)); err != nil {
		limit = "memory.limit_in_bytes"
	}
	path := filepath.Join(folder, "file")
	end, done := x.start(1, "limit="+limit, "fill="+path)
	end()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); done || err != nil || st.Blocks*512 > filled/2 {
		t.Errorf("done: %t, the file has %d MiB, limit %d, %v", done, st.Blocks*512/mebibyte, filled/2/mebibyte, err)
	}
	// Not for what it finds there.
	x.container(2, "fill="+filepath.Join(folder, "other"))
	x.container(3, "limit="+limit, "map="+filepath.Join(folder, "other"))
}
