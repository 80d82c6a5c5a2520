// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package pki makes the keys, certificates and kubeconfigs of a cluster, all signed by one authority that lives as long as it.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"
)

const (
	lifetime = 365 * 24 * time.Hour
	skew     = time.Hour // clocks of machines differ a little
)

// Authority signs. It is made anew for every cluster.
type Authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// New makes an authority and writes ca.crt and ca.key to dir.
func New(dir string) (*Authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of keys: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the authority's key: %w", err)
	}
	a := &Authority{dir: dir, key: key}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "partage-local-ca"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
	}
	a.cert = template
	der, err := a.sign(template, &key.PublicKey)
	if err != nil {
		return nil, err
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("read the authority's certificate: %w", err)
	}
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a, a.write("ca", der, key)
}

// Subject is who a certificate is about. With addresses or names it is a server's, otherwise a client's.
type Subject struct {
	Name   string // common name: the user, for a client
	Groups []string
	DNS    []string
	IPs    []netip.Addr
}

// Issue writes FILE.crt and FILE.key.
func (a *Authority) Issue(file string, s Subject) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make the key of %s: %w", s.Name, err)
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: s.Name, Organization: s.Groups},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		DNSNames:    s.DNS,
	}
	for _, ip := range s.IPs {
		template.IPAddresses = append(template.IPAddresses, net.IP(ip.AsSlice()))
	}
	if len(s.DNS)+len(s.IPs) > 0 {
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}
	der, err := a.sign(template, &key.PublicKey)
	if err != nil {
		return err
	}
	return a.write(file, der, key)
}

// KeyPair writes FILE.key and FILE.pub, for tokens.
func (a *Authority) KeyPair(file string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make the key pair %s: %w", file, err)
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return fmt.Errorf("encode the public key %s: %w", file, err)
	}
	if err := a.writePEM(file+".pub", "PUBLIC KEY", public); err != nil {
		return err
	}
	return a.writeKey(file, key)
}

// Kubeconfig issues a client certificate and writes a kubeconfig with everything inside it, readable by the owner only.
func (a *Authority) Kubeconfig(path, server string, s Subject) error {
	file := "client-" + filepath.Base(path)
	if err := a.Issue(file, s); err != nil {
		return err
	}
	cert, err := os.ReadFile(filepath.Join(a.dir, file+".crt"))
	if err != nil {
		return fmt.Errorf("read a certificate back: %w", err)
	}
	key, err := os.ReadFile(filepath.Join(a.dir, file+".key"))
	if err != nil {
		return fmt.Errorf("read a key back: %w", err)
	}
	text := base64.StdEncoding.EncodeToString
	type object = map[string]any
	config, err := json.MarshalIndent(object{ // JSON is YAML
		"apiVersion": "v1", "kind": "Config", "current-context": "partage",
		"clusters": []object{{"name": "partage", "cluster": object{"server": server, "certificate-authority-data": text(a.pem)}}},
		"users":    []object{{"name": s.Name, "user": object{"client-certificate-data": text(cert), "client-key-data": text(key)}}},
		"contexts": []object{{"name": "partage", "context": object{"cluster": "partage", "user": s.Name}}},
	}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode kubeconfig: %w", err)
	}
	if err := os.WriteFile(path, append(config, '\n'), 0o600); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}

func (a *Authority) sign(template *x509.Certificate, public *ecdsa.PublicKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make a serial number: %w", err)
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-skew)
	template.NotAfter = time.Now().Add(lifetime)
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, public, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign the certificate of %s: %w", template.Subject.CommonName, err)
	}
	return der, nil
}

func (a *Authority) write(file string, der []byte, key *ecdsa.PrivateKey) error {
	if err := a.writePEM(file+".crt", "CERTIFICATE", der); err != nil {
		return err
	}
	return a.writeKey(file, key)
}

func (a *Authority) writeKey(file string, key *ecdsa.PrivateKey) error {
	b, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("encode the key %s: %w", file, err)
	}
	return a.writePEM(file+".key", "EC PRIVATE KEY", b)
}

func (a *Authority) writePEM(file, kind string, b []byte) error {
	path := filepath.Join(a.dir, file)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
		return fmt.Errorf("write a key or certificate: %w", err)
	}
	return nil
}
