// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package chart tests what the objects of the chart say, as helm renders them.
package chart

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
)

// rendered is what helm makes of the chart with its default values.
const rendered = "../../deployments/helm/testdata/defaults.golden.yaml"

// clusterRole returns a ClusterRole of the chart.
func clusterRole(t *testing.T, name string) *rbacv1.ClusterRole {
	t.Helper()
	objects, err := os.ReadFile(rendered)
	if err != nil {
		t.Fatal(err)
	}
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(objects), 4096); ; {
		role := &rbacv1.ClusterRole{}
		err := decoder.Decode(role)
		switch {
		case errors.Is(err, io.EOF):
			t.Fatalf("the chart has no ClusterRole %s", name)
		case err == nil && role.Kind == "ClusterRole" && role.Name == name:
			return role
		}
	}
}

// TestNoRightIsIdle: the plugin runs on every node with GPUs. What it never asks for, somebody who takes one of these nodes
// over does not get either: it lists and watches slices, and applies the status of claims.
func TestNoRightIsIdle(t *testing.T) {
	role := clusterRole(t, "partage-gpu-kubelet-plugin")
	if len(role.Rules) < 5 {
		t.Fatalf("the plugin has %d rules", len(role.Rules))
	}
	for name, right := range map[string]struct{ verb, resource string }{
		"slices":   {"get", "resourceslices"},
		"statuses": {"update", "resourceclaims/status"},
		"driver":   {"associated-node:update", "resourceclaims/driver"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, rule := range role.Rules {
				if slices.Contains(rule.Verbs, right.verb) && slices.Contains(rule.Resources, right.resource) {
					t.Errorf("the plugin may %s %s, and never does", right.verb, right.resource)
				}
			}
		})
	}
}
