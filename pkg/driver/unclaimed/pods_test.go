// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/partage-dev/partage/test/flow/fakekubelet"
)

// uidOf is the UID of a pod.
func uidOf(n int) string { return fmt.Sprintf("3f2a1b4c-0000-4000-8000-%012d", n) }

// TestPodsWithAClaim: a claim that is not in the cluster any more is with the pods that the kubelet lists with it, and may be with those of its
// namespace that run and were deleted.
func TestPodsWithAClaim(t *testing.T) {
	t.Parallel()
	const name, other = "team/train-0", "victim/web"
	with := fakekubelet.Pod("team", "train-0", "gpu", of("gpu-0000-1b-00-0"))
	without, others := fakekubelet.Pod("team", "train-0", ""), fakekubelet.Pod("victim", "web", "")
	for title, test := range map[string]struct {
		listed []string
		// running are the names of pods with processes, by number.
		running map[int]string
		want    string
	}{
		"none":                             {},
		"listed with it":                   {listed: []string{"with"}, running: map[int]string{1: name}, want: "pod team/train-0"},
		"listed without it":                {listed: []string{"without"}, running: map[int]string{1: name}},
		"of other namespaces":              {listed: []string{"others"}, running: map[int]string{1: other}},
		"of others, deleted":               {running: map[int]string{1: other}},
		"deleted":                          {running: map[int]string{1: name}, want: "pod team/train-0, which was deleted and runs"},
		"deleted, and another of its name": {listed: []string{"without"}, running: map[int]string{1: name, 2: name}, want: "pod team/train-0, which was deleted and runs"},
		"nobody knows its name":            {running: map[int]string{1: ""}, want: "pod with UID " + uidOf(1) + ", whose name is not known"},
	} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			r, proc := newRig(t), t.TempDir()
			listed := append([]string{}, test.listed...)
			pods := map[string]*podresourcesapi.PodResources{"with": with, "without": without, "others": others}
			all := []*podresourcesapi.PodResources{plugin}
			for _, l := range listed {
				all = append(all, pods[l])
			}
			r.kubelet.Set(all...)
			names := map[string]string{}
			for n, name := range test.running {
				names[uidOf(n)] = name
				dir := filepath.Join(proc, strconv.Itoa(100+n))
				if err := os.Mkdir(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				cgroup := fmt.Sprintf("0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod%s.slice/cri-containerd-%s.scope\n",
					strings.ReplaceAll(uidOf(n), "-", "_"), strings.Repeat("0a", 32))
				if err := os.WriteFile(filepath.Join(dir, "cgroup"), []byte(cgroup), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			p := Pods{Socket: r.Socket, PodName: r.PodName, Proc: proc, Named: func(uid string) string { return names[uid] }}
			got, err := p.With(t.Context(), "team", "gpu")
			if err != nil || (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("got %q, %v, want %q", got, err, test.want)
			}
			r.kubelet.Fail(true)
			if got, err := p.With(t.Context(), "team", "gpu"); err == nil {
				t.Errorf("the kubelet does not answer: got %q", got)
			}
		})
	}
}
