// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

func TestOnNode(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		allocatable map[corev1.ResourceName]string
		labels      map[string]string
		// want are parts of the texts, by kind.
		want map[Kind]string
	}{
		"nothing": {allocatable: map[corev1.ResourceName]string{"cpu": "8"}},
		"GPUs": {
			allocatable: map[corev1.ResourceName]string{"nvidia.com/gpu": "8"},
			want:        map[Kind]string{DevicePlugin: "offers nvidia.com/gpu (8) on"},
		},
		"a device plugin that has ended": {allocatable: map[corev1.ResourceName]string{"nvidia.com/gpu": "0"}},
		"parts of GPUs": {
			allocatable: map[corev1.ResourceName]string{"nvidia.com/mig-1g.10gb": "7", "nvidia.com/gpu.shared": "4", "nvidia.com/gpu": "0"},
			want:        map[Kind]string{DevicePlugin: "offers nvidia.com/gpu.shared (4), nvidia.com/mig-1g.10gb (7) on"},
		},
		"network cards": {allocatable: map[corev1.ResourceName]string{"nvidia.com/hostdev": "2", "nvidia.com/sriov_rdma_vf": "4"}},
		"MIG manager": {
			labels: map[string]string{"nvidia.com/mig.config": "all-1g.10gb"},
			want:   map[Kind]string{MIGManager: "nvidia.com/mig.config=all-1g.10gb"},
		},
		"MIG manager that the GPU Operator keeps off the node": {
			labels: map[string]string{"nvidia.com/mig.config": "all-disabled", "nvidia.com/gpu.deploy.mig-manager": "false"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: test.labels}}
			node.Status.Allocatable = corev1.ResourceList{}
			for name, amount := range test.allocatable {
				node.Status.Allocatable[name] = resource.MustParse(amount)
			}
			found := OnNode(node)
			for _, f := range found {
				if want, wanted := test.want[f.Kind]; f.There != wanted || !strings.Contains(f.Text, want) {
					t.Errorf("%+v", f)
				}
				if f.There == strings.HasPrefix(f.Text, "No ") {
					t.Errorf("there is %t, and the text is %q", f.There, f.Text)
				}
			}
			expect.Equal(t, len(found), 2, "found", found)
		})
	}
}

func TestOtherDriver(t *testing.T) {
	t.Parallel()
	dir := must.Get(os.MkdirTemp("", "n"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	find := func() bool { return OtherDriver(t.Context(), dir, "gpu.nvidia.com").There }
	listen := func(name string) *net.UnixListener {
		return must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"}))(t)
	}
	defer listen("gpu.nvidia.com-uid-1-reg.sock").Close()
	defer listen("compute-domain.nvidia.com-reg.sock").Close()
	if find() {
		t.Error("this driver's own socket, and that of another name, were taken for NVIDIA's driver")
	}
	other := listen("gpu.nvidia.com-reg.sock")
	other.SetUnlinkOnClose(false)
	if !find() {
		t.Error("NVIDIA's driver was not found")
	}
	_ = other.Close()
	if find() {
		t.Error("a socket that was left behind was taken for a driver")
	}
}
