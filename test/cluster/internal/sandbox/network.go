// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Network is a node's own network. It is not joined to the machine's.
type Network struct {
	Node netip.Prefix // the node's address and its network, on a bridge
	// API is the first address of the Service range. There is no kube-proxy; the API server answers on this address itself,
	// so that the in-cluster configuration of pods works. Not valid: the node has no API server.
	API netip.Addr
	// Services is the range of Service addresses. All but API are unreachable: programs fail at once instead of waiting.
	Services netip.Prefix
}

// bridge carries the node's address: every kernel that can run pods has bridges, few have dummy devices.
const bridge = "node0"

func (n Network) setup() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback device: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("turn the loopback device on: %w", err)
	}
	if n.API.IsValid() {
		if err := netlink.AddrAdd(lo, address(netip.PrefixFrom(n.API, n.API.BitLen()))); err != nil {
			return fmt.Errorf("add %s to the loopback device: %w", n.API, err)
		}
	}
	br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}
	if err := netlink.LinkAdd(br); err != nil {
		return needs(err, "bridge devices (CONFIG_BRIDGE)")
	}
	if err := netlink.AddrAdd(br, address(n.Node)); err != nil {
		return fmt.Errorf("add %s to %s: %w", n.Node, bridge, err)
	}
	if err := netlink.LinkSetUp(br); err != nil {
		return fmt.Errorf("turn %s on: %w", bridge, err)
	}
	// The API server and the kubelet pick addresses by the default route, even one that leads nowhere.
	everything := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: br.Index, Dst: everything, Scope: netlink.SCOPE_LINK}); err != nil {
		return fmt.Errorf("add the default route: %w", err)
	}
	if n.Services.IsValid() {
		none := &netlink.Route{Dst: address(n.Services).IPNet, Type: unix.RTN_UNREACHABLE}
		if err := netlink.RouteAdd(none); err != nil {
			return fmt.Errorf("make %s unreachable: %w", n.Services, err)
		}
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil { //nolint:gosec // a kernel file
		return fmt.Errorf("turn forwarding on: %w", err)
	}
	return tryPair()
}

// tryPair finds out now whether pods will get their devices, instead of at the first pod.
func tryPair() error {
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "try0"}, PeerName: "try1"}
	if err := netlink.LinkAdd(pair); err != nil {
		return needs(err, "virtual Ethernet pairs (CONFIG_VETH)")
	}
	if err := netlink.LinkDel(pair); err != nil {
		return fmt.Errorf("remove a device pair: %w", err)
	}
	return nil
}

func needs(err error, feature string) error {
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("this kernel has no %s: %w", feature, err)
	}
	return fmt.Errorf("make a network device (needs %s): %w", feature, err)
}

func address(p netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
}
