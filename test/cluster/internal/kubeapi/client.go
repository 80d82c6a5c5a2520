// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package kubeapi asks the API server the few things that bringing a cluster up needs. It keeps client-go, minutes of
// building, out of the program that a newcomer builds first.
package kubeapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

const requestLimit = 5 * time.Second

// Client talks to one API server.
type Client struct {
	server string
	http   *http.Client
}

// New returns a client that shows the certificate NAME.crt of the folder pki.
func New(server, pki, name string) (*Client, error) {
	ca, err := os.ReadFile(filepath.Join(pki, "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("read the authority: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(pki, name+".crt"), filepath.Join(pki, name+".key"))
	if err != nil {
		return nil, fmt.Errorf("read the client certificate: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	return &Client{server: server, http: &http.Client{
		Timeout: requestLimit,
		Transport: &http.Transport{
			TLSClientConfig:   &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2: true,
		},
	}}, nil
}

// Healthy asks an endpoint that answers 200 when all is well.
func (c *Client) Healthy(ctx context.Context, path string) error {
	_, err := get(ctx, c.http, c.server+path)
	return err
}

// HasDefaultServiceAccount fails while pods of the namespace default would be refused.
func (c *Client) HasDefaultServiceAccount(ctx context.Context) error {
	_, err := get(ctx, c.http, c.server+"/api/v1/namespaces/default/serviceaccounts/default")
	return err
}

// NodeReady fails while the node is not there or not ready, with the node's own reason.
func (c *Client) NodeReady(ctx context.Context, name string) error {
	b, err := get(ctx, c.http, c.server+"/api/v1/nodes/"+name)
	if err != nil {
		return err
	}
	var node struct {
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := json.Unmarshal(b, &node); err != nil {
		return fmt.Errorf("read node %s: %w", name, err)
	}
	for _, c := range node.Status.Conditions {
		if c.Type == "Ready" && c.Status == "True" {
			return nil
		}
		if c.Type == "Ready" {
			return fmt.Errorf("node %s is not ready: %s", name, c.Message)
		}
	}
	return fmt.Errorf("node %s says nothing about being ready", name)
}

var local = &http.Client{Timeout: requestLimit, Transport: &http.Transport{
	TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // a self-signed server on our own loopback
}}

// HealthyLocal asks a server of this node whose certificate is its own.
func HealthyLocal(ctx context.Context, url string) error {
	_, err := get(ctx, local, url)
	return err
}

func get(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", url, err)
	}
	res, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask: %w", err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", url, err)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", url, res.Status)
	}
	return b, nil
}
