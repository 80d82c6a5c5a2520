// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/partage-dev/partage/test/flow/harness"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// BenchmarkMPSReady measures how long it takes from Prepare to an MPS share that
// clients can use, and back. An operation is four shares of one GPU, prepared
// and unprepared one by one. The first starts daemon and server, the last ends
// them; ratios compare these with what the two take by themselves, started and
// ended by hand in the same operation.
func BenchmarkMPSReady(b *testing.B) {
	const shares = 4
	n := harness.NewNode(b, "dgx-h100")
	n.StartSupervisor(b)
	p := n.Start(b)
	p.Ready(b)
	var alone, aloneEnd, first, more, release, last []time.Duration
	for b.Loop() {
		started, ended := daemonAlone(b, n, 1)
		alone, aloneEnd = append(alone, started), append(aloneEnd, ended)

		var claims []*drapb.Claim
		for range shares {
			claims = append(claims, n.Allocate(b, []harness.Device{{GPU: 0, Kind: harness.MPS}}))
		}
		first = append(first, timed(func() { p.MustPrepare(b, claims[0]) }))
		for _, c := range claims[1:] {
			more = append(more, timed(func() { p.MustPrepare(b, c) }))
		}
		for _, c := range claims[1:] {
			release = append(release, timed(func() { p.MustUnprepare(b, c) }))
		}
		last = append(last, timed(func() { p.MustUnprepare(b, claims[0]) }))
	}
	report(b, "daemon-alone", alone)
	report(b, "first-share", first)
	report(b, "next-share", more)
	report(b, "release", release)
	report(b, "last-release", last)
	b.ReportMetric(median(first)/median(alone), "first-ratio")
	b.ReportMetric(median(more)/median(alone), "next-ratio")
	b.ReportMetric(median(last)/median(aloneEnd), "last-ratio")
}

func median(all []time.Duration) float64 {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2].Seconds()
}

// daemonAlone starts a control daemon with a server for a GPU until that takes
// clients, and ends them.
func daemonAlone(t testing.TB, n *harness.Node, gpu int) (start, end time.Duration) {
	t.Helper()
	dir := must.Get(os.MkdirTemp(filepath.Dir(n.Root), "d"))(t)
	defer func() { _ = os.RemoveAll(dir) }()
	program := filepath.Join(n.Root, "usr/bin/nvidia-cuda-mps-control")
	environment := []string{
		"LD_LIBRARY_PATH=" + sysroot.LibraryDir(n.Root), "CUDA_VISIBLE_DEVICES=" + n.Machine(t).GPUs[gpu].UUID,
		"CUDA_MPS_PIPE_DIRECTORY=" + dir, "CUDA_MPS_LOG_DIRECTORY=" + dir,
	}
	daemon := exec.Command(program, "-f")
	daemon.Env = environment
	daemon.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	command := func(text string) string {
		cmd := exec.CommandContext(t.Context(), program)
		cmd.Env, cmd.Stdin = environment, strings.NewReader(text+"\n")
		// It fails as long as there is no daemon.
		out, _ := cmd.Output()
		return string(bytes.TrimSpace(out))
	}
	start = timed(func() {
		must.Do(t, daemon.Start())
		err := harness.Eventually(t.Context(), func() error {
			_, err := os.Stat(filepath.Join(dir, "nvidia-cuda-mps-control.pid"))
			return err
		})
		must.Do(t, err)
		command("start_server -uid 0")
		untilActive(t, command)
	})
	end = timed(func() {
		command("quit")
		must.Do(t, daemon.Wait())
	})
	return start, end
}

// untilActive waits until the only server takes clients.
func untilActive(t testing.TB, command func(string) string) {
	t.Helper()
	server := ""
	err := harness.Eventually(t.Context(), func() error {
		if server == "" {
			server = command("get_server_list")
		}
		if state := command("get_server_status " + server); state != "ACTIVE" {
			return fmt.Errorf("server %q is %q", server, state)
		}
		return nil
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}
