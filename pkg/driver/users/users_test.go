// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package users

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/pkg/node/holder"
	"github.com/partage-dev/partage/pkg/node/host"
	"github.com/partage-dev/partage/test/must"
)

const (
	pci   = "0000:1b:00.0"
	other = "0000:1c:00.0"
	train = "3f2a1b4c-0000-4000-8000-000000000001" // of namespace team
	stray = "3f2a1b4c-0000-4000-8000-000000000002" // of namespace team
	third = "3f2a1b4c-0000-4000-8000-000000000003" // of a namespace that nobody listed
	dcgm  = "3f2a1b4c-0000-4000-8000-000000000004" // of namespace monitoring
	own   = "3f2a1b4c-0000-4000-8000-000000000005" // of the driver's namespace
	gone  = "3f2a1b4c-0000-4000-8000-000000000006" // whose name nobody knows
)

// node is one with a GPU of minor 2.
type node struct {
	t         *testing.T
	dir       string
	listed    []gpu.Process
	now       time.Duration
	listError error
	servers   []int
	users     *Users
}

func newNode(t *testing.T) *node {
	n := &node{t: t, dir: t.TempDir(), now: time.Hour}
	n.write("driver/nvidia/gpus/"+pci+"/information", "Device Minor: \t 2\n")
	for uid, name := range map[string]string{train: "team_train", stray: "team_stray", third: "third_x", dcgm: "monitoring_dcgm", own: "partage_mps"} {
		n.write(filepath.Join("logs", name+"_"+uid, "container", "0.log"), "")
	}
	roots := host.Roots{Proc: n.dir, PodLogs: filepath.Join(n.dir, "logs")}
	names := &holder.PodNames{Roots: roots}
	n.users = &Users{
		Finder:  &holder.Finder{Roots: roots, Proc: filepath.Join(n.dir, "processes"), PodName: names.Name},
		List:    func(context.Context, string) ([]gpu.Process, error) { return n.listed, n.listError },
		Ignored: func(namespace string) bool { return namespace == "monitoring" || namespace == "partage" },
		Servers: func(context.Context) ([]int, error) { return n.servers, nil },
		Clock:   func() time.Duration { return n.now },
	}
	n.write("processes/1/comm", "init\n")
	return n
}

func (n *node) write(name, content string) {
	n.t.Helper()
	path := filepath.Join(n.dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		n.t.Fatal(err)
	}
}

// run starts a process of a pod, or outside of pods. Its ID is one that the kernel gives to no process.
func (n *node) run(pid int, pod string, start time.Duration, open bool) {
	n.t.Helper()
	dir := filepath.Join("processes", strconv.Itoa(pid))
	cgroup := "0::/system.slice/nvidia-persistenced.service"
	if pod != "" {
		cgroup = "0::/kubepods/burstable/pod" + pod + "/" + strings.Repeat("0123456789abcdef", 4)
	}
	n.write(filepath.Join(dir, "comm"), "program\n")
	n.write(filepath.Join(dir, "cgroup"), cgroup+"\n")
	n.write(filepath.Join(dir, "stat"), fmt.Sprintf("%d (program) S %s%d 0\n", pid, strings.Repeat("0 ", 18), int(start/(10*time.Millisecond))))
	if err := os.Mkdir(filepath.Join(n.dir, dir, "fd"), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if open {
		if err := os.Symlink("/dev/nvidia2", filepath.Join(n.dir, dir, "fd", "3")); err != nil {
			n.t.Fatal(err)
		}
	}
}

func (n *node) end(pid int) {
	n.t.Helper()
	if err := os.RemoveAll(filepath.Join(n.dir, "processes", strconv.Itoa(pid))); err != nil {
		n.t.Fatal(err)
	}
}

// claim is one of namespace team that was prepared before all processes, with a device on each of these GPUs.
func claim(name string, change func(*record.Device), addresses ...string) *record.Record {
	r := &record.Record{Claim: record.Ref{Namespace: "team", Name: name, UID: types.UID("uid-" + name)}, State: record.Prepared, Arrived: time.Minute}
	for _, address := range addresses {
		d := record.Device{Device: device.GPUName(address), Type: device.Whole, PCIAddress: address, Mark: record.Started}
		if change != nil {
			change(&d)
		}
		r.Devices = append(r.Devices, d)
	}
	return r
}

func onInstance(id int) func(*record.Device) {
	return func(d *record.Device) {
		d.Type, d.Partition = device.Partition, &record.Partition{Place: record.Place{ProfileID: 19}, Made: &gpu.PartitionID{InstanceID: id}}
	}
}

func observing(d *record.Device) { d.Admin = true }

// TestUsers shows which processes a claim explains. Each has PID 5000001 and up.
func TestUsers(t *testing.T) {
	t.Parallel()
	type process struct {
		pod string
		// at are the places where the process has a context: -1 is the undivided GPU.
		at   []int
		open bool
	}
	const memory, open = "memory", "open"
	for name, test := range map[string]struct {
		processes []process
		claims    []*record.Record
		change    func(*node)
		want      string
		instances map[int]string
	}{
		"nobody":                             {},
		"a context without a claim":          {processes: []process{{train, []int{-1}, true}}, want: memory},
		"a node without a claim":             {processes: []process{{train, nil, true}}, want: open},
		"another GPU's node":                 {processes: []process{{train, nil, false}}},
		"of the claim":                       {processes: []process{{train, []int{-1}, true}}, claims: []*record.Record{claim("a", nil, pci)}},
		"of the claim, node only":            {processes: []process{{train, nil, true}}, claims: []*record.Record{claim("a", nil, pci)}},
		"of a claim of both GPUs":            {processes: []process{{train, []int{-1}, true}}, claims: []*record.Record{claim("a", nil, other, pci)}},
		"of a claim of another GPU":          {processes: []process{{train, []int{-1}, true}}, claims: []*record.Record{claim("a", nil, other)}, want: memory},
		"another pod of its namespace":       {processes: []process{{stray, []int{-1}, true}}, claims: []*record.Record{claim("a", nil, pci)}},
		"of the second claim":                {processes: []process{{train, []int{-1}, true}}, claims: []*record.Record{claim("b", nil, pci), claim("a", nil, pci)}},
		"of a namespace that nobody listed":  {processes: []process{{third, []int{-1}, true}}, claims: []*record.Record{claim("a", nil, pci)}, want: memory},
		"of a namespace nobody listed, node": {processes: []process{{third, nil, true}}, want: open},
		"of a namespace that is ignored":     {processes: []process{{dcgm, []int{-1}, true}, {dcgm, nil, true}}},
		"of the driver":                      {processes: []process{{own, []int{-1}, true}, {own, nil, true}}},
		"outside of pods":                    {processes: []process{{"", []int{-1}, true}, {"", nil, true}}},
		"ended, and still listed":            {change: func(n *node) { n.listed = []gpu.Process{{PID: 5000001, InstanceID: -1}} }, want: memory},
		"ended, beside an MPS server": {change: func(n *node) {
			n.listed, n.servers = []gpu.Process{{PID: 5000001, InstanceID: -1}, {PID: 5000002, InstanceID: -1}}, []int{5000002}
		}},
		"ended, MPS elsewhere": {change: func(n *node) {
			n.listed, n.servers = []gpu.Process{{PID: 5000001, InstanceID: -1}}, []int{5000002}
		}, want: memory},
		"ended, nobody has waited for it": {processes: []process{{"", []int{-1}, true}}, change: func(n *node) {
			n.write("processes/5000001/stat", "5000001 (program) Z "+strings.Repeat("0 ", 18)+"0 0\n")
		}},
		"ended, on an instance of a claim":    {claims: []*record.Record{claim("a", onInstance(7), pci)}, change: func(n *node) { n.listed = []gpu.Process{{PID: 5000001, InstanceID: 7}} }, instances: map[int]string{7: memory}},
		"of a pod that nobody knows":          {processes: []process{{gone, []int{-1}, true}}, claims: []*record.Record{claim("a", nil, pci)}, want: memory},
		"on the claim's instance":             {processes: []process{{train, []int{7}, true}}, claims: []*record.Record{claim("a", onInstance(7), pci)}},
		"on another instance":                 {processes: []process{{train, []int{7}, true}}, claims: []*record.Record{claim("a", onInstance(8), pci)}, instances: map[int]string{7: memory}},
		"on an instance, claim of the GPU":    {processes: []process{{train, []int{7}, true}}, claims: []*record.Record{claim("a", nil, pci)}, instances: map[int]string{7: memory}},
		"on the GPU, claim of an instance":    {processes: []process{{train, []int{-1}, true}}, claims: []*record.Record{claim("a", onInstance(7), pci)}, want: memory},
		"on both, with both":                  {processes: []process{{train, []int{-1, 7}, true}}, claims: []*record.Record{claim("a", onInstance(7), pci), claim("b", nil, pci)}},
		"a node, claim of an instance":        {processes: []process{{train, nil, true}}, claims: []*record.Record{claim("a", onInstance(7), pci)}},
		"the observer":                        {processes: []process{{train, []int{-1, 7}, true}}, claims: []*record.Record{claim("a", observing, pci)}},
		"a node beside an observer":           {processes: []process{{third, nil, true}}, claims: []*record.Record{claim("a", observing, pci)}},
		"a context beside an observer":        {processes: []process{{third, []int{-1}, true}}, claims: []*record.Record{claim("a", observing, pci)}, want: memory},
		"an observer of another GPU":          {processes: []process{{third, nil, true}}, claims: []*record.Record{claim("a", observing, other)}, want: open},
		"an MPS server of a pod nobody knows": {processes: []process{{gone, []int{-1}, true}}, change: func(n *node) { n.servers = []int{5000001} }},
		"the driver does not say":             {change: func(n *node) { n.listError = gpu.ErrHung }, want: memory},
		"the driver cannot say":               {processes: []process{{third, nil, true}}, change: func(n *node) { n.listError = gpu.ErrNotSupported }, want: open},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			for i, p := range test.processes {
				n.run(5000001+i, p.pod, 2*time.Minute, p.open)
				for _, instance := range p.at {
					n.listed = append(n.listed, gpu.Process{PID: 5000001 + i, InstanceID: instance})
				}
			}
			if test.change != nil {
				test.change(n)
			}
			got, instances, _ := n.users.Users(t.Context(), pci, test.claims, nil)
			for id, text := range instances {
				instances[id] = kindOf(text)
			}
			if got := kindOf(got); got != test.want || !maps.Equal(instances, test.instances) {
				t.Errorf("got %+v and %+v, want %+v and %+v", got, instances, test.want, test.instances)
			}
		})
	}
}

// kindOf says how those that a text describes use the GPU.
func kindOf(text string) string {
	switch {
	case text == "":
		return ""
	case strings.Contains(text, " open)"):
		return "open"
	}
	return "memory"
}

// TestMonitorRestarted shows a monitor without a claim, in a namespace that nobody listed: it does not keep the GPU back
// if it was there before the claim, and for ten minutes if it is started again in the middle of one.
func TestMonitorRestarted(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c := claim("a", nil, pci)
	c.Arrived = 2 * time.Hour
	step := func(when string, now time.Duration, open bool, claims ...*record.Record) {
		t.Helper()
		n.now = now
		if got, _, _ := n.users.Users(t.Context(), pci, claims, nil); kindOf(got) == "open" != open || kindOf(got) == "memory" {
			t.Errorf("%s: got %+v", when, got)
		}
	}
	n.run(5000001, third, time.Hour, true)
	step("the plugin was started in the middle of the claim", 3*time.Hour, false, c)
	step("the claim is given back", 3*time.Hour, false)
	n.end(5000001)
	n.run(5000001, third, 4*time.Hour, true)
	step("the monitor is started again", 4*time.Hour, true, c)
	step("the claim is given back soon after", 4*time.Hour+time.Minute, true)
	step("it waits for ten minutes at most", 4*time.Hour+10*time.Minute, false)
	next := claim("b", nil, pci)
	next.Arrived = 4*time.Hour + 5*time.Minute
	step("the next claim has it", 4*time.Hour+11*time.Minute, false, next)
	step("and is given back", 4*time.Hour+12*time.Minute, false)
}

// TestSlowSupervisor shows that an observation does not take longer because of the MPS supervisor.
func TestSlowSupervisor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.users.Servers = func(ctx context.Context) ([]int, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for i, pod := range []string{stray, third, gone} {
		n.run(5000001+i, pod, 0, true)
		n.listed = append(n.listed, gpu.Process{PID: 5000001 + i, InstanceID: -1})
	}
	began := time.Now()
	got, _, _ := n.users.Users(t.Context(), pci, []*record.Record{claim("a", nil, pci), claim("b", nil, pci)}, nil)
	if took := time.Since(began); took > 30*time.Second || got == "" || !strings.Contains(got, "third/x") || strings.Contains(got, "stray") {
		t.Errorf("got %+v after %s", got, took)
	}
}

// TestServersBesideSlowFiles: open files that cannot be read in time leave time to ask which processes are MPS servers.
func TestServersBesideSlowFiles(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.run(5000001, gone, time.Minute, true)
	n.listed, n.servers = []gpu.Process{{PID: 5000001, InstanceID: -1}}, []int{5000001}
	slow := filepath.Join(n.dir, "processes/2/cgroup")
	n.write("processes/2/comm", "slow\n")
	must.Do(t, unix.Mkfifo(slow, 0o600))
	t.Cleanup(func() {
		writer, err := os.OpenFile(slow, os.O_RDWR, 0)
		if err != nil {
			t.Error(err)
			return
		}
		_ = writer.Close()
	})
	n.users.Servers = func(ctx context.Context) ([]int, error) {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Millisecond): // a question to another process
			return n.servers, nil
		}
	}
	for range 2 {
		if got, instances, opened := n.users.Users(t.Context(), pci, nil, nil); got != "" || len(instances) > 0 || opened != "" {
			t.Errorf("got %q, %v, %q", got, instances, opened)
		}
	}
}
