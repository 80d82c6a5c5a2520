// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package controlplane runs etcd, the API server, the controller manager and the scheduler.
package controlplane

import (
	"context"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/partage-dev/partage/test/cluster/internal/kubeapi"
	"github.com/partage-dev/partage/test/cluster/internal/pki"
	"github.com/partage-dev/partage/test/cluster/internal/poll"
	"github.com/partage-dev/partage/test/cluster/internal/service"
)

// names of the components, also of their logs.
const (
	etcd       = "etcd"
	apiserver  = "kube-apiserver"
	controller = "kube-controller-manager"
	scheduler  = "kube-scheduler"
)

const (
	startLimit  = 5 * time.Minute // generous: an emulated machine is slow
	issuer      = "https://kubernetes.default.svc"
	etcdClients = "http://127.0.0.1:2379"
	etcdPeers   = "http://127.0.0.1:2380"
)

var (
	// ServiceNet is the range of Service addresses. There is no kube-proxy; only ServiceAddress answers.
	ServiceNet = netip.MustParsePrefix("10.96.0.0/16")
	// ServiceAddress is how pods reach the API server: the first of the range, as the API server itself chooses.
	ServiceAddress = netip.MustParseAddr("10.96.0.1")
	// DNSAddress is where a DNS server would be.
	DNSAddress = netip.MustParseAddr("10.96.0.10")
)

// ControlPlane is the control plane of one cluster, all on one node.
type ControlPlane struct {
	Address       netip.Addr // of the node it runs on
	PKI           string     // folder with the files of Keys
	Data          string     // folder for its data
	Log           func(component string) string
	FeatureGates  string // as in --feature-gates; may be empty
	RuntimeConfig string // as in the API server's --runtime-config; may be empty
	NodeGrace     string // as in the controller manager's --node-monitor-grace-period; may be empty
}

// Server is the URL of the API server.
func Server(address netip.Addr) string {
	return "https://" + netip.AddrPortFrom(address, 443).String()
}

// Keys issues what the control plane needs, and the administrator's kubeconfig.
func (c ControlPlane) Keys(a *pki.Authority, adminKubeconfig string) error {
	masters := []string{"system:masters"}
	issue := []struct {
		file string
		pki.Subject
	}{
		{"apiserver", pki.Subject{
			Name: "kube-apiserver",
			DNS:  []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"},
			IPs:  []netip.Addr{netip.MustParseAddr("127.0.0.1"), ServiceAddress, c.Address},
		}},
		{"apiserver-kubelet-client", pki.Subject{Name: "kube-apiserver-kubelet-client", Groups: masters}},
		{"bootstrap", pki.Subject{Name: "partage-bootstrap", Groups: masters}},
	}
	for _, i := range issue {
		if err := a.Issue(i.file, i.Subject); err != nil {
			return err
		}
	}
	for path, user := range map[string]pki.Subject{
		adminKubeconfig:          {Name: "admin", Groups: masters},
		c.kubeconfig(controller): {Name: "system:kube-controller-manager"},
		c.kubeconfig(scheduler):  {Name: "system:kube-scheduler"},
	} {
		if err := a.Kubeconfig(path, Server(c.Address), user); err != nil {
			return err
		}
	}
	return a.KeyPair("sa")
}

func (c ControlPlane) kubeconfig(component string) string {
	return filepath.Join(c.PKI, component+".kubeconfig")
}

// Start starts the components and returns when pods can be created and scheduled. The folder Data must exist.
func (c ControlPlane) Start(ctx context.Context, sup *service.Supervisor, report func(string, ...any)) error {
	for _, name := range []string{etcd, apiserver} {
		if err := c.start(ctx, sup, name); err != nil {
			return err
		}
	}
	api, err := kubeapi.New(Server(c.Address), c.PKI, "bootstrap")
	if err != nil {
		return err
	}
	if err := c.wait(ctx, apiserver, "the API server to be ready", func(ctx context.Context) error {
		return api.Healthy(ctx, "/readyz")
	}); err != nil {
		return err
	}
	report("API server ready")
	// Only now: the controller manager gives up when the API server is not healthy for some 20 seconds.
	for _, name := range []string{controller, scheduler} {
		if err := c.start(ctx, sup, name); err != nil {
			return err
		}
	}
	if err := c.wait(ctx, scheduler, "the scheduler to be healthy", func(ctx context.Context) error {
		return kubeapi.HealthyLocal(ctx, "https://127.0.0.1:10259/healthz")
	}); err != nil {
		return err
	}
	if err := c.wait(ctx, controller, "the default ServiceAccount", api.HasDefaultServiceAccount); err != nil {
		return err
	}
	report("controller manager and scheduler ready")
	return nil
}

func (c ControlPlane) start(ctx context.Context, sup *service.Supervisor, name string) error {
	return sup.Start(ctx, service.Spec{Name: name, Args: append([]string{name}, c.args()[name]...), Log: c.Log(name)})
}

func (c ControlPlane) wait(ctx context.Context, component, what string, check func(context.Context) error) error {
	if err := poll.Until(ctx, startLimit, what, check); err != nil {
		return &service.LogError{Log: c.Log(component), Err: err}
	}
	return nil
}

// args are the components' arguments.
func (c ControlPlane) args() map[string][]string {
	data := func(dir string) string { return filepath.Join(c.Data, dir) }
	key := func(file string) string { return filepath.Join(c.PKI, file) }
	server := []string{
		"--etcd-servers=" + etcdClients, "--bind-address=0.0.0.0", "--secure-port=443", "--advertise-address=" + c.Address.String(),
		"--tls-cert-file=" + key("apiserver.crt"), "--tls-private-key-file=" + key("apiserver.key"), "--client-ca-file=" + key("ca.crt"),
		"--kubelet-client-certificate=" + key("apiserver-kubelet-client.crt"),
		"--kubelet-client-key=" + key("apiserver-kubelet-client.key"),
		"--kubelet-certificate-authority=" + key("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
		"--service-account-issuer=" + issuer, "--service-account-key-file=" + key("sa.pub"),
		"--service-account-signing-key-file=" + key("sa.key"), "--service-cluster-ip-range=" + ServiceNet.String(),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--cert-dir=" + data("apiserver"),
		// Without kube-proxy, the API server finds the pods of webhooks and of aggregated APIs itself.
		"--enable-aggregator-routing=true",
	}
	if c.RuntimeConfig != "" {
		server = append(server, "--runtime-config="+c.RuntimeConfig)
	}
	manager := []string{
		"--kubeconfig=" + c.kubeconfig(controller), "--service-account-private-key-file=" + key("sa.key"),
		"--root-ca-file=" + key("ca.crt"), "--cluster-signing-cert-file=" + key("ca.crt"), "--cluster-signing-key-file=" + key("ca.key"),
		"--use-service-account-credentials=true", "--leader-elect=false", "--bind-address=127.0.0.1", "--cert-dir=" + data("kcm"),
		"--kube-api-qps=500", "--kube-api-burst=1000", // with the defaults its controllers start 5 s later
	}
	if c.NodeGrace != "" {
		manager = append(manager, "--node-monitor-grace-period="+c.NodeGrace)
	}
	return map[string][]string{
		etcd: {
			"--name=n", "--data-dir=" + data("etcd"),
			"--listen-client-urls=" + etcdClients, "--advertise-client-urls=" + etcdClients,
			"--listen-peer-urls=" + etcdPeers, "--initial-advertise-peer-urls=" + etcdPeers, "--initial-cluster=n=" + etcdPeers,
			"--unsafe-no-fsync", "--log-level=warn",
		},
		apiserver:  c.common(server),
		controller: c.common(append(manager, c.asking(controller)...)),
		scheduler: c.common(append([]string{
			"--kubeconfig=" + c.kubeconfig(scheduler), "--leader-elect=false", "--bind-address=127.0.0.1", "--cert-dir=" + data("scheduler"),
		}, c.asking(scheduler)...)),
	}
}

// asking has a component ask the API server who may read its metrics and profiles.
func (c ControlPlane) asking(component string) []string {
	return []string{"--authentication-kubeconfig=" + c.kubeconfig(component), "--authorization-kubeconfig=" + c.kubeconfig(component)}
}

// common adds the flags that all of Kubernetes knows.
func (c ControlPlane) common(args []string) []string {
	if c.FeatureGates != "" {
		args = append(args, "--feature-gates="+c.FeatureGates)
	}
	return append(args, "--v=2")
}
