// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package boot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/partage-dev/partage/test/cluster/internal/controlplane"
	"github.com/partage-dev/partage/test/cluster/internal/layout"
	"github.com/partage-dev/partage/test/cluster/internal/machine"
	"github.com/partage-dev/partage/test/cluster/internal/node"
	"github.com/partage-dev/partage/test/cluster/internal/poll"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/service"
)

// Switch is the socket, in the node, on which its first process is told to reboot it.
const Switch = "/run/cluster/power"

const (
	endLimit   = 20 * time.Second
	headerTime = 5 * time.Second
)

// power turns the node's own programs on and off. The control plane is another machine as far as that goes: it keeps running.
type power struct {
	ctx  context.Context //nolint:containedctx // of the first process: what it starts lives as long
	node node.Node
	sup  *service.Supervisor

	mu  sync.Mutex // a reboot at a time
	off context.CancelFunc
}

func newPower(ctx context.Context, plan Plan, files layout.Cluster, sup *service.Supervisor) *power {
	return &power{ctx: ctx, sup: sup, node: node.Node{
		Name: plan.Node, Address: plan.Address.Addr(), Pods: plan.Pods, API: plan.Address.Addr(),
		DNS: controlplane.DNSAddress, Machine: plan.Machine,
		PKI: files.PKI(), Config: files.Run(), Bin: files.Bin(), CNI: files.CNI(), Images: plan.Images, Log: files.Log,
		FeatureGates: plan.FeatureGates, SyncFrequency: plan.SyncFrequency,
	}}
}

// on starts the node for the first time.
func (p *power) on(report func(string, ...any)) error {
	ctx, off := context.WithCancel(p.ctx)
	p.off = off
	return p.node.Start(ctx, p.sup, report)
}

// reboot ends all programs and containers of the node at once, as a power cut does, and starts it again.
func (p *power) reboot() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.off()
	if err := poll.Until(p.ctx, endLimit, "the node's programs to end", func(context.Context) error {
		if node.Running(p.sup) {
			return errors.New("containerd or the kubelet still runs")
		}
		return nil
	}); err != nil {
		return err
	}
	shim := filepath.Join(p.node.Bin, "containerd-shim-runc-v2")
	if err := sandbox.PowerOff(p.ctx, shim, filepath.Dir(Switch), machine.Root); err != nil {
		return err
	}
	ctx, off := context.WithCancel(p.ctx)
	p.off = off
	return p.node.Reboot(ctx, p.sup)
}

// listen serves the switch until the first process ends.
func (p *power) listen() error {
	if err := os.MkdirAll(filepath.Dir(Switch), 0o700); err != nil {
		return fmt.Errorf("make the folder of the node's switch: %w", err)
	}
	socket, err := (&net.ListenConfig{}).Listen(p.ctx, "unix", Switch)
	if err != nil {
		return fmt.Errorf("listen for reboots: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /reboot", func(w http.ResponseWriter, _ *http.Request) {
		if err := p.reboot(); err != nil { //nolint:contextcheck // a reboot goes on when the caller does not wait
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: headerTime}
	go func() { _ = server.Serve(socket) }() // ends with the process
	return nil
}

// Reboot asks the node in which this process runs to reboot, and returns when its kubelet has been started.
func Reboot(ctx context.Context) error {
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", Switch)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://node/reboot", nil)
	if err != nil {
		return fmt.Errorf("reboot the node: %w", err)
	}
	answer, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("reboot the node: %w", err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return fmt.Errorf("reboot the node: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("reboot the node: %s", text)
	}
	return nil
}
