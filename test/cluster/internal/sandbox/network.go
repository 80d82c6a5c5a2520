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

// Network is a node's own network. It is joined to those of the cluster's other nodes, not to the machine's.
type Network struct {
	Nodes netip.Prefix // of all nodes' addresses
	Self  Host
	Peers []Host // the other nodes
	// API is the first address of the Service range. There is no kube-proxy; the API server answers on this address itself,
	// so that the in-cluster configuration of pods works.
	API netip.Addr
	// Server is the address of the node with the API server.
	Server netip.Addr
	// Services is the range of Service addresses. All but API are unreachable: programs fail at once instead of waiting.
	Services netip.Prefix
}

// Host is a node and where its pods are.
type Host struct {
	Name    string
	Address netip.Addr
	Pods    netip.Prefix
}

// bridge carries the node's address: every kernel that can run pods has bridges, few have dummy devices. The cables to other nodes
// are its ports.
const bridge = "node0"

// Connect puts a cable between two nodes whose gates are not open yet. It never is in the machine's own network.
func Connect(a, b *Process, number int) error {
	cable := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("cable%d", number), Namespace: netlink.NsPid(a.PID)},
		PeerName:  "cable0", PeerNamespace: netlink.NsPid(b.PID),
	}
	if err := netlink.LinkAdd(cable); err != nil {
		return needs(err, "virtual Ethernet pairs (CONFIG_VETH)")
	}
	return nil
}

func (n Network) setup() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback device: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("turn the loopback device on: %w", err)
	}
	br, err := n.addBridge()
	if err != nil {
		return err
	}
	if err := n.addRoutes(lo, br); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil { //nolint:gosec // a kernel file
		return fmt.Errorf("turn forwarding on: %w", err)
	}
	return tryPair()
}

// addBridge makes the bridge with the node's address and plugs in the cables that there are.
func (n Network) addBridge() (netlink.Link, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list network devices: %w", err)
	}
	br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}
	if err := netlink.LinkAdd(br); err != nil {
		return nil, needs(err, "bridge devices (CONFIG_BRIDGE)")
	}
	for _, link := range links {
		if link.Type() != "veth" {
			continue
		}
		if err := errors.Join(netlink.LinkSetMaster(link, br), netlink.LinkSetUp(link)); err != nil {
			return nil, fmt.Errorf("plug %s into %s: %w", link.Attrs().Name, bridge, err)
		}
	}
	if err := netlink.AddrAdd(br, address(netip.PrefixFrom(n.Self.Address, n.Nodes.Bits()))); err != nil {
		return nil, fmt.Errorf("add %s to %s: %w", n.Self.Address, bridge, err)
	}
	if err := netlink.LinkSetUp(br); err != nil {
		return nil, fmt.Errorf("turn %s on: %w", bridge, err)
	}
	return br, nil
}

func (n Network) addRoutes(lo, br netlink.Link) error {
	api := netip.PrefixFrom(n.API, n.API.BitLen())
	var routes []*netlink.Route
	if n.Server == n.Self.Address {
		if err := netlink.AddrAdd(lo, address(api)); err != nil {
			return fmt.Errorf("add %s to the loopback device: %w", n.API, err)
		}
	} else {
		routes = append(routes, &netlink.Route{Dst: address(api).IPNet, Gw: n.Server.AsSlice()})
	}
	for _, peer := range n.Peers {
		routes = append(routes, &netlink.Route{Dst: address(peer.Pods).IPNet, Gw: peer.Address.AsSlice()})
	}
	// The API server and the kubelet pick addresses by the default route, even one that leads nowhere.
	everything := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	routes = append(routes,
		&netlink.Route{LinkIndex: br.Attrs().Index, Dst: everything, Scope: netlink.SCOPE_LINK},
		&netlink.Route{Dst: address(n.Services).IPNet, Type: unix.RTN_UNREACHABLE})
	for _, route := range routes {
		if err := netlink.RouteAdd(route); err != nil {
			return fmt.Errorf("add the route to %s: %w", route.Dst, err)
		}
	}
	return nil
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
