// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/partage-dev/partage/test/gpusim/cuda"
)

// ClientOptions are what a CUDA program finds around itself.
type ClientOptions struct {
	Pipe   string // folder of the control daemon
	Shared string // what is its /dev/shm
	// Here are the devices whose nodes it sees, below Root.
	Here []cuda.Device
	Root string
	// Visible, Percentage, Memory and Priority are the variables, nil where one is not set.
	Visible, Percentage, Memory, Priority *string
}

// Client is a program that is connected to an MPS server.
type Client struct {
	// Devices are numbered as in the program, and so are the Limits in effect.
	Devices []cuda.Device
	Limits  []Limits
	// priority is the one in effect.
	priority priority

	nodes   cuda.Nodes
	conn    *net.UnixConn
	encoder *json.Encoder
	mu      sync.Mutex // one request at a time
	replies chan reply

	ended chan struct{} // closed when the contexts are no good any more
	once  sync.Once
	code  cuda.Error    // valid then
	left  chan struct{} // closed when the server has hung up; nil before it has taken the client
}

// leaveTime is how long a server may take to forget a client that leaves.
const leaveTime = 5 * time.Second

// Connect connects to the server of the daemon, which may have to be started, or
// to lose the clients of another user first. The error is ErrNoDaemon where no
// daemon can be reached, else a cuda.Error.
func Connect(ctx context.Context, o ClientOptions) (*Client, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, network, filepath.Join(o.Pipe, controlSocket))
	if err != nil {
		return nil, ErrNoDaemon
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, ErrNoDaemon
	}
	stop := context.AfterFunc(ctx, func() { _ = u.Close() })
	defer stop()
	client := &Client{conn: u, encoder: json.NewEncoder(u), replies: make(chan reply), ended: make(chan struct{})}
	decoder := packets(u)
	if err := client.join(decoder, o); err != nil {
		client.Close()
		return nil, err
	}
	client.left = make(chan struct{})
	go client.listen(decoder)
	return client, nil
}

// join agrees with the server about devices and limits.
func (c *Client) join(decoder *json.Decoder, o ClientOptions) error {
	var w welcome
	if c.encoder.Encode(hello{}) != nil || decoder.Decode(&w) != nil {
		return cuda.MPSConnectionFailed
	}
	if w.Code != 0 {
		return w.Code
	}
	// The server's devices, in its order, as far as their nodes are here.
	var devices []cuda.Device
	for _, uuid := range w.Devices {
		if i := slices.IndexFunc(o.Here, func(d cuda.Device) bool { return d.UUID == uuid }); i >= 0 {
			devices = append(devices, o.Here[i])
		}
	}
	c.Devices = cuda.Enumerate(devices)
	if o.Visible != nil {
		c.Devices = cuda.Select(devices, *o.Visible)
	}
	if len(c.Devices) == 0 {
		return cuda.NoDevice
	}
	var token []byte
	var err error
	if w.Shared != "" {
		token, err = os.ReadFile(filepath.Join(o.Shared, w.Shared))
	}
	if err != nil {
		return fmt.Errorf("%w (no %s in %s: server and client have different ones)", cuda.MPSConnectionFailed, w.Shared, o.Shared)
	}
	if c.nodes, err = cuda.Open(o.Root, c.Devices...); err != nil {
		return fmt.Errorf("%w (%w)", cuda.NoDevice, err)
	}
	var answer joined
	own, void := ownLimits(c.Devices, o)
	if c.encoder.Encode(join{Token: string(token), Devices: own, Void: void, Priority: ownPriority(o)}) != nil || decoder.Decode(&answer) != nil {
		return cuda.MPSConnectionFailed
	}
	if answer.Code != 0 {
		return answer.Code
	}
	c.Limits, c.priority = answer.Devices, answer.Priority
	return nil
}

// ownLimits are what a program says in its environment. It can only lower what
// the server allows. But memory limits are applied by the client's own library, and if
// one names a device that the program does not see, none is, not even the server's: void.
func ownLimits(devices []cuda.Device, o ClientOptions) (own []Limits, void bool) {
	percentage := 100.0
	if o.Percentage != nil {
		if p, err := parsePercentage(*o.Percentage); err == nil {
			percentage = p
		}
	}
	var memory memoryLimits
	if o.Memory != nil {
		memory, _ = parseLimits(*o.Memory)
	}
	if slices.ContainsFunc(memory, func(m memoryLimit) bool { return !names(m.Key, devices) }) {
		memory, void = nil, true
	}
	for i, d := range devices {
		own = append(own, Limits{UUID: d.UUID, Percentage: percentage, Memory: memory.of(i, d.UUID)})
	}
	return own, void
}

func names(key string, devices []cuda.Device) bool {
	for i, d := range devices {
		if key == strconv.Itoa(i) || key == d.UUID {
			return true
		}
	}
	return false
}

// listen takes what the server says.
func (c *Client) listen(decoder *json.Decoder) {
	defer close(c.left)
	for {
		var r reply
		if err := decoder.Decode(&r); err != nil {
			c.end(cuda.MPSRPCFailure)
			return
		}
		if r.Ended {
			c.end(r.Code)
			continue
		}
		select {
		case c.replies <- r:
		case <-c.ended: // who asked has been told
		}
	}
}

func (c *Client) end(code cuda.Error) {
	c.once.Do(func() {
		c.code = code
		close(c.ended)
	})
}

// Ended is closed when the server has ended this client's work, or itself. Failure
// says why.
func (c *Client) Ended() <-chan struct{} { return c.ended }

// Failure is why the client's work has ended. It waits for that.
func (c *Client) Failure() error {
	<-c.ended
	return c.code
}

// Context makes the program's context on a device, where it has none.
func (c *Client) Context(device int) error { return c.do(request{Op: opContext, Device: device}) }

// NewContext makes one more.
func (c *Client) NewContext(device int) error { return c.do(request{Op: opNewContext, Device: device}) }

// Alloc takes memory of a device.
func (c *Client) Alloc(device int, bytes uint64) error {
	return c.do(request{Op: opAllocate, Device: device, Bytes: bytes})
}

// Launch starts a kernel that runs until Synchronize.
func (c *Client) Launch(device int) error { return c.do(request{Op: opLaunch, Device: device}) }

// Synchronize waits until the program has no work on the device.
func (c *Client) Synchronize(device int) error {
	return c.do(request{Op: opSynchronize, Device: device})
}

// MemoryInfo is cuMemGetInfo, in bytes.
func (c *Client) MemoryInfo(device int) (free, total uint64, err error) {
	r, err := c.ask(request{Op: opMemory, Device: device})
	return r.Free, r.Total, err
}

// Fault does what an illegal access does. The error is what the program gets.
func (c *Client) Fault(device int) error { return c.do(request{Op: opFault, Device: device}) }

func (c *Client) do(r request) error {
	_, err := c.ask(r)
	return err
}

func (c *Client) ask(r request) (reply, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-c.ended:
		return reply{}, c.code
	default:
	}
	if err := c.encoder.Encode(r); err != nil {
		return reply{}, cuda.MPSRPCFailure
	}
	select {
	case answer := <-c.replies:
		if answer.Code != 0 {
			return reply{}, answer.Code
		}
		return answer, nil
	case <-c.ended:
		return reply{}, c.code
	}
}

// Close leaves the server. As with CUDA, what the program had is free when it has ended, so this
// waits until the server, which hangs up then, has done its accounts.
func (c *Client) Close() {
	if c.left != nil && c.conn.CloseWrite() == nil {
		select {
		case <-c.left:
		case <-time.After(leaveTime):
		}
	}
	_ = c.conn.Close()
	_ = c.nodes.Close()
}
