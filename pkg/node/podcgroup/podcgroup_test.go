// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package podcgroup

import (
	"strings"
	"testing"
	"testing/fstest"
)

const (
	uid    = "8b3f0e6e-7a59-4c8a-9d3c-2f1f4a1f0b11"
	under  = "8b3f0e6e_7a59_4c8a_9d3c_2f1f4a1f0b11"
	static = "0123456789abcdef0123456789abcdef"
	id     = "5e0b7f1c2d3a4958677685940312fedcba98765432100123456789abcdef0123"
	// node is a node that is a container itself.
	node  = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	other = "11111111-1111-4111-8111-111111111111"
)

// slice is a pod's cgroup by systemd's driver.
func slice(class string) string {
	if class == "" {
		return "/kubepods.slice/kubepods-pod" + under + ".slice"
	}
	return "/kubepods.slice/kubepods-" + class + ".slice/kubepods-" + class + "-pod" + under + ".slice"
}

func TestFind(t *testing.T) {
	for name, test := range map[string]struct {
		file string
		want Pod
	}{
		"systemd, guaranteed, containerd": {"0::" + slice("") + "/cri-containerd-" + id + ".scope\n", Pod{uid, id, slice("")}},
		"systemd, burstable, CRI-O":       {"0::" + slice("burstable") + "/crio-" + id + ".scope\n", Pod{uid, id, slice("burstable")}},
		"systemd, besteffort, CRI-O with crun": {
			"0::" + slice("besteffort") + "/crio-" + id + ".scope/container\n", Pod{uid, id, slice("besteffort")},
		},
		"systemd, CRI-O's monitor": {"0::" + slice("") + "/crio-conmon-" + id + ".scope\n", Pod{uid, id, slice("")}},
		"systemd, cri-dockerd":     {"0::" + slice("") + "/docker-" + id + ".scope\n", Pod{uid, id, slice("")}},
		"systemd, version 1": {
			"12:pids:" + slice("burstable") + "/cri-containerd-" + id + ".scope\n1:name=systemd:" + slice("burstable") + "/cri-containerd-" + id + ".scope\n0::/\n",
			Pod{uid, id, ""},
		},
		"systemd, both versions": {
			"4:memory:" + slice("") + "/cri-containerd-" + id + ".scope\n0::" + slice("") + "/cri-containerd-" + id + ".scope\n", Pod{uid, id, slice("")},
		},
		"cgroupfs, guaranteed, containerd": {"0::/kubepods/pod" + uid + "/" + id + "\n", Pod{uid, id, "/kubepods/pod" + uid}},
		"cgroupfs, burstable, CRI-O":       {"0::/kubepods/burstable/pod" + uid + "/crio-" + id + "\n", Pod{uid, id, "/kubepods/burstable/pod" + uid}},
		"cgroupfs, besteffort, version 1":  {"9:devices:/kubepods/besteffort/pod" + uid + "/" + id + "\n0::/\n", Pod{uid, id, ""}},
		"a runtime that does not know systemd's driver": {
			"0::/system.slice/containerd.service/kubepods-burstable-pod" + under + ".slice:cri-containerd:" + id + "\n", Pod{uid, id, ""},
		},
		"static pod":                 {"0::/kubepods/burstable/pod" + static + "/" + id + "\n", Pod{static, id, "/kubepods/burstable/pod" + static}},
		"static pod, systemd":        {"0::/kubepods.slice/kubepods-pod" + static + ".slice/crio-" + id + ".scope", Pod{static, id, "/kubepods.slice/kubepods-pod" + static + ".slice"}},
		"the pod's own":              {"0::" + slice("burstable") + "\n", Pod{uid, "", slice("burstable")}},
		"a root of the kubelet's":    {"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + under + ".slice/cri-containerd-" + id + ".scope\n", Pod{uid, id, "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + under + ".slice"}},
		"a node that is a container": {"0::/docker/" + node + "/kubelet/kubepods/burstable/pod" + uid + "/" + id + "\n", Pod{uid, id, "/docker/" + node + "/kubelet/kubepods/burstable/pod" + uid}},
		"a node that is a container, systemd": {
			"0::/system.slice/docker-" + node + ".scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + under + ".slice/cri-containerd-" + id + ".scope\n",
			Pod{uid, id, "/system.slice/docker-" + node + ".scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + under + ".slice"},
		},
		"another cgroup namespace": {"0::/../../kubepods-besteffort-pod" + under + ".slice/crio-" + id + ".scope/nested\n", Pod{uid, id, ""}},
		"a cgroup that has gone":   {"0::/kubepods/pod" + uid + "/" + id + " (deleted)\n", Pod{uid, id, "/kubepods/pod" + uid}},
		"a pod that has gone":      {"0::" + slice("") + " (deleted)\n", Pod{uid, "", slice("")}},
		// A container that may make cgroups chooses their names.
		"a pod's name below a container":       {"0::/kubepods/pod" + uid + "/" + id + "/pod" + other + "/" + node + "\n", Pod{uid, id, "/kubepods/pod" + uid}},
		"a pod's name, systemd":                {"0::" + slice("") + "/crio-" + id + ".scope/kubepods-pod" + other + ".slice/x\n", Pod{uid, id, slice("")}},
		"a strange name below a container":     {"0::/kubepods/pod" + uid + "/" + id + "/x..y\n", Pod{uid, id, "/kubepods/pod" + uid}},
		"a colon in a name below a container":  {"0::/kubepods/pod" + uid + "/" + id + "/a:b:c\n", Pod{uid, id, "/kubepods/pod" + uid}},
		"a cgroup of a pod without container":  {"0::" + slice("") + "/x.scope\n", Pod{uid, "", slice("")}},
		"a node in a pod, which is one tenant": {"0::/kubepods/pod" + uid + "/" + id + "/kubelet/kubepods/pod" + other + "/" + node + "\n", Pod{uid, id, "/kubepods/pod" + uid}},

		"a service":           {"0::/system.slice/nvidia-persistenced.service\n", Pod{}},
		"a pod of podman":     {"0::/machine.slice/machine-libpod_pod_" + id + ".slice/libpod-" + node + ".scope\n", Pod{}},
		"part of a word":      {"0::/tripod" + static + "/x\n", Pod{}},
		"more than a UID":     {"0::/kubepods/pod" + uid + "0/x\n", Pod{}},
		"names no pod":        {"0::/kubepods-x/y\n", Pod{}},
		"controllers, not at": {"12:pod" + static + ":/\n", Pod{}},
		"root":                {"0::/\n", Pod{}},
		"empty":               {"", Pod{}},
		"no line of it":       {"pod" + uid + "\n", Pod{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := Find(test.file)
			if got != test.want || ok != (test.want.UID != "") {
				t.Errorf("%q:\ngot  %+v, %t\nwant %+v", test.file, got, ok, test.want)
			}
			if ok && !inPod(test.file) {
				t.Errorf("%q is in a pod, and not in any", test.file)
			}
		})
	}
}

func TestIn(t *testing.T) {
	for file, want := range map[string]bool{
		"4:memory:/system.slice\n3:pids:/kubepods/burstable/podetcd-1/a\n0::/\n": true,
		"0::/kubepods.slice\n":                             true,
		"0::/kubelet.slice/kubelet-kubepods.slice/x\n":     true,
		"0::/kubepods-burstable.slice/x\n":                 true,
		"0::/../../burstable/pod" + static + "/a\n":        true,
		"0::/user.slice/user-1000.slice/session-2.scope\n": false,
		"0::/machine.slice/libpod-" + id + ".scope\n":      false,
		"0::/podman\n":      false,
		"0::/mykubepodsx\n": false,
		"12:kubepods:/\n":   false,
		"0::/\n":            false,
		"":                  false,
	} {
		if got := inPod(file); got != want {
			t.Errorf("%q: got %t", file, got)
		}
	}
}

func TestFromRoot(t *testing.T) {
	for path, want := range map[string]bool{"/": true, "/a/b": true, "/a/x..y": true, "/..": false, "/../a": false, "/a/../../b": false, "a": false, "": false} {
		if got := fromRoot(path); got != want {
			t.Errorf("%q: got %t", path, got)
		}
	}
}

func TestLinesStop(t *testing.T) {
	for controllers, path := range Lines("2:cpu:/a\n1:memory:/b\n") {
		if controllers != "cpu" || !strings.HasSuffix(path, "a") {
			t.Errorf("got %s %s", controllers, path)
		}
		break
	}
}

func TestOOMKills(t *testing.T) {
	const events = "1/root/sys/fs/cgroup/kubepods/podA/memory.events"
	for text, want := range map[string]int{
		"low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n": 2, "oom_kill 0\n": 0, "low 0\n": -1, "oom_kill many\n": -1,
	} {
		procfs := fstest.MapFS{events: {Data: []byte(text)}}
		got, known := Pod{Cgroup: "/kubepods/podA"}.OOMKills(procfs)
		if known != (want >= 0) || known && got != want {
			t.Errorf("%q: got %d, %t, want %d", text, got, known, want)
		}
		if _, known := (Pod{Cgroup: "/kubepods/podB"}).OOMKills(procfs); known {
			t.Error("known of a pod that has ended")
		}
		if _, known := (Pod{}).OOMKills(procfs); known {
			t.Error("known without a cgroup of version 2")
		}
	}
}
