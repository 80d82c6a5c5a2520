// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/client-go/rest"
)

// Components of the control plane, by the names of their processes.
const (
	etcd       = "etcd"
	apiserver  = "kube-apiserver"
	controller = "kube-controller-manager"
	scheduler  = "kube-scheduler"
	kwok       = "kwok"
	own        = "plugins"
)

// components are in the order of the tables.
var components = []string{apiserver, controller, scheduler, etcd, kwok, own}

// ticksPerSecond is the unit of times in /proc, the same on all machines that run Linux.
const ticksPerSecond = 100

// processes are those of the control plane by component.
type processes map[string]int

// findProcesses looks for them in the network that this process is in: there may be other
// clusters on the machine.
func findProcesses() (processes, error) {
	found := processes{own: os.Getpid()}
	network, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("find the network of this process: %w", err)
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		other, err := os.Readlink(filepath.Join(dir, "ns/net"))
		if err != nil || other != network {
			continue // also where it has ended
		}
		line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue
		}
		program, _, _ := bytes.Cut(line, []byte{0})
		name := filepath.Base(string(program))
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && isComponent(name) {
			found[name] = pid
		}
	}
	for _, name := range components {
		if found[name] == 0 {
			return nil, fmt.Errorf("no process is %s", name)
		}
	}
	return found, nil
}

func isComponent(name string) bool {
	for _, c := range components {
		if c == name && c != own {
			return true
		}
	}
	return false
}

// cpu is the time that each has used so far.
func (p processes) cpu() (map[string]time.Duration, error) {
	used := map[string]time.Duration{}
	for name, pid := range p {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return nil, fmt.Errorf("read the CPU time of %s: %w", name, err)
		}
		if used[name], err = cpuTime(string(line)); err != nil {
			return nil, fmt.Errorf("read the CPU time of %s: %w", name, err)
		}
	}
	return used, nil
}

// cpuTime reads the time in user and kernel mode from a line of /proc/PID/stat.
func cpuTime(line string) (time.Duration, error) {
	const user, system = 11, 12 // after the program's name, which ends with the last bracket
	fields := strings.Fields(line[strings.LastIndex(line, ")")+1:])
	if len(fields) <= system {
		return 0, fmt.Errorf("%q has too few fields", line)
	}
	var ticks int64
	for _, f := range []string{fields[user], fields[system]} {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / ticksPerSecond, nil
}

// memory is what a component has, in bytes. Heap is what a Go program can reach.
type memory struct{ resident, peak, heap, database int64 }

// memory reads that of all.
func (p processes) memory(ctx context.Context, admin *rest.Config) (map[string]memory, error) {
	all := map[string]memory{}
	for name, pid := range p {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return nil, fmt.Errorf("read the memory of %s: %w", name, err)
		}
		m := memory{resident: kilobytes(status, "VmRSS:"), peak: kilobytes(status, "VmHWM:")}
		if url, has := metricsOf[name]; has {
			if m.heap, m.database, err = insides(ctx, admin, name, url); err != nil {
				return nil, fmt.Errorf("ask %s for its memory: %w", name, err)
			}
		}
		all[name] = m
	}
	return all, nil
}

// kilobytes reads a line of /proc/PID/status.
func kilobytes(status []byte, key string) int64 {
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			if fields := strings.Fields(rest); len(fields) == 2 {
				n, _ := strconv.ParseInt(fields[0], 10, 64)
				return n << 10
			}
		}
	}
	return 0
}

// metricsOf is where components answer; that of the API server is in the kubeconfig.
var metricsOf = map[string]string{
	apiserver: "", controller: "https://127.0.0.1:10257", scheduler: "https://127.0.0.1:10259", etcd: "http://127.0.0.1:2379",
}

// insides has a component collect its garbage, except for etcd, which cannot be asked to, and
// returns what is left, and the size of etcd's database.
func insides(ctx context.Context, admin *rest.Config, name, url string) (heap, database int64, err error) {
	config := rest.CopyConfig(admin)
	if url != "" {
		config.Host = url
		config.CAData, config.CAFile, config.Insecure = nil, "", true // the keys of both are their own
	}
	if name == etcd {
		config = &rest.Config{Host: url}
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return 0, 0, err
	}
	defer client.CloseIdleConnections()
	if name != etcd {
		if _, err := get(ctx, client, config.Host+"/debug/pprof/heap?gc=1"); err != nil {
			return 0, 0, err
		}
	}
	text, err := get(ctx, client, config.Host+"/metrics")
	if err != nil {
		return 0, 0, err
	}
	return metric(text, "go_memstats_heap_alloc_bytes"), metric(text, "etcd_mvcc_db_total_size_in_bytes"), nil
}

func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	var body bytes.Buffer
	if _, err := body.ReadFrom(response.Body); err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, response.Status)
	}
	return body.Bytes(), nil
}

// metric finds the value of one without labels.
func metric(text []byte, name string) int64 {
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			f, err := strconv.ParseFloat(value, 64)
			if err == nil {
				return int64(f)
			}
		}
	}
	return 0
}
