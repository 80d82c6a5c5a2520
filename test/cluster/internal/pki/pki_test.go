// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
)

func TestIssue(t *testing.T) {
	dir := t.TempDir()
	a, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		file    string
		subject Subject
		usage   x509.ExtKeyUsage
		hosts   []string // names that must verify
		not     string
	}{
		{
			"server", Subject{Name: "kube-apiserver", DNS: []string{"kubernetes.default"}, IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
			x509.ExtKeyUsageServerAuth,
			[]string{"kubernetes.default", "10.0.0.1"}, "10.0.0.2",
		},
		{"admin", Subject{Name: "admin", Groups: []string{"system:masters"}}, x509.ExtKeyUsageClientAuth, nil, "admin"},
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	for _, tc := range tests {
		t.Run(tc.file, func(t *testing.T) {
			if err := a.Issue(tc.file, tc.subject); err != nil {
				t.Fatal(err)
			}
			pair, err := tls.LoadX509KeyPair(filepath.Join(dir, tc.file+".crt"), filepath.Join(dir, tc.file+".key"))
			if err != nil {
				t.Fatal(err)
			}
			usage := []x509.ExtKeyUsage{tc.usage}
			for _, h := range append([]string{""}, tc.hosts...) {
				if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: usage, DNSName: h}); err != nil {
					t.Errorf("host %q: %v", h, err)
				}
			}
			if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: usage, DNSName: tc.not}); err == nil {
				t.Errorf("host %q verified", tc.not)
			}
			fi, err := os.Stat(filepath.Join(dir, tc.file+".key"))
			if err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("key mode %v, %v", fi.Mode(), err)
			}
		})
	}
}

func TestKubeconfig(t *testing.T) {
	dir := t.TempDir()
	a, err := New(filepath.Join(dir, "pki"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "kubeconfig")
	if err := a.Kubeconfig(path, "https://10.0.0.1:443", Subject{Name: "admin", Groups: []string{"system:masters"}}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Users []struct {
			User struct {
				Cert []byte `json:"client-certificate-data"`
				Key  []byte `json:"client-key-data"`
			}
		}
		Clusters []struct {
			Cluster struct {
				Server string
				CA     []byte `json:"certificate-authority-data"`
			}
		}
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(got.Users[0].User.Cert, got.Users[0].User.Key)
	if err != nil {
		t.Fatal(err)
	}
	if s := pair.Leaf.Subject; s.CommonName != "admin" || s.Organization[0] != "system:masters" {
		t.Errorf("subject %v", s)
	}
	if c := got.Clusters[0].Cluster; c.Server != "https://10.0.0.1:443" || !x509.NewCertPool().AppendCertsFromPEM(c.CA) {
		t.Errorf("cluster %+v", c)
	}
}

func TestKeyPair(t *testing.T) {
	dir := t.TempDir()
	a, err := New(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.KeyPair("sa"); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"sa.key", "sa.pub"} {
		if _, err := os.Stat(filepath.Join(dir, f)); err != nil {
			t.Error(err)
		}
	}
}
