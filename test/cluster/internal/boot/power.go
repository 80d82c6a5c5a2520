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

	"github.com/partage-dev/partage/test/cluster/internal/machine"
	"github.com/partage-dev/partage/test/cluster/internal/node"
	"github.com/partage-dev/partage/test/cluster/internal/poll"
	"github.com/partage-dev/partage/test/cluster/internal/sandbox"
	"github.com/partage-dev/partage/test/cluster/internal/service"
)

// Switch is the socket, in the node, on which its first process is told to turn it off and on.
const Switch = "/run/cluster/power"

// Turn is what can be done with a node's power, by the name of the command.
type Turn string

// Reboot is Off and On.
const (
	Off    Turn = "power-off"
	On     Turn = "power-on"
	Reboot Turn = "reboot"
)

const (
	endLimit   = 20 * time.Second
	headerTime = 5 * time.Second
)

// power turns the node's own programs on and off. The control plane is another machine as far as that goes: it keeps running.
type power struct {
	ctx  context.Context //nolint:containedctx // of the first process: what it starts lives as long
	node node.Node
	sup  *service.Supervisor

	mu  sync.Mutex // a turn at a time
	off context.CancelFunc
}

func newPower(ctx context.Context, n node.Node, sup *service.Supervisor) *power {
	return &power{ctx: ctx, sup: sup, node: n}
}

// on starts the node for the first time.
func (p *power) on(report func(string, ...any)) error {
	ctx, off := context.WithCancel(p.ctx)
	p.off = off
	return p.node.Start(ctx, p.sup, report)
}

// turn does what is asked for. A node that is on stays on, and one that is off stays off.
func (p *power) turn(to Turn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch to {
	case Off:
		return p.cut()
	case On:
		return p.boot()
	case Reboot:
		if err := p.cut(); err != nil {
			return err
		}
		return p.boot()
	}
	return fmt.Errorf("turn the node %q: want %s, %s or %s", to, Off, On, Reboot)
}

// cut ends all programs and containers of the node at once, as a power cut does.
func (p *power) cut() error {
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
	return sandbox.PowerOff(p.ctx, shim, filepath.Dir(Switch), machine.Root)
}

// boot starts the node again.
func (p *power) boot() error {
	if node.Running(p.sup) {
		return nil
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
		return fmt.Errorf("listen on the node's switch: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /{turn}", func(w http.ResponseWriter, r *http.Request) {
		if err := p.turn(Turn(r.PathValue("turn"))); err != nil { //nolint:contextcheck // it goes on when the caller does not wait
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: headerTime}
	go func() { _ = server.Serve(socket) }() // ends with the process
	return nil
}

// Power turns the node in which this process runs off or on. After On and Reboot its kubelet has been started.
func Power(ctx context.Context, turn Turn) error {
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", Switch)
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://node/"+string(turn), nil)
	if err != nil {
		return fmt.Errorf("ask for the node's power: %w", err)
	}
	answer, err := client.Do(request)
	if err != nil {
		return fmt.Errorf("ask for the node's power: %w", err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return fmt.Errorf("ask for the node's power: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("turn the node's power: %s: %s", turn, text)
	}
	return nil
}
