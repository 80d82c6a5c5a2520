//go:build neighbours

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// This file is put into a package of NVIDIA's dcgm-exporter: test/neighbours/build does that.
package transformation

import (
	"context"
	"fmt"
	stdos "os"
	"strings"
	"testing"

	resourcev1beta1 "k8s.io/api/resource/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// TestSlicesOfCluster says of how many devices of a cluster, by type, dcgm-exporter knows the GPU.
func TestSlicesOfCluster(t *testing.T) {
	config, err := clientcmd.BuildConfigFromFlags("", stdos.Getenv("KUBECONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	of := metav1.ListOptions{FieldSelector: "spec.driver=" + DRAGPUDriverName}
	list, err := client.ResourceV1beta1().ResourceSlices().List(context.Background(), of)
	if err != nil {
		t.Fatal(err)
	}
	m := &DRAResourceSliceManager{deviceToUUID: map[string]string{}, migDevices: map[string]*DRAMigDeviceInfo{}}
	found, all := map[string]int{}, map[string]int{}
	for i := range list.Items {
		s := &list.Items[i]
		m.onAddOrUpdate(s)
		for _, d := range s.Spec.Devices {
			kind := getAttrString(d.Basic.Attributes, resourcev1beta1.QualifiedName("type"))
			all[kind]++
			if uuid, _ := m.GetDeviceInfo(s.Spec.Pool.Name, d.Name); uuid != "" {
				found[kind]++
			}
		}
	}
	var parts []string
	for _, kind := range []string{"gpu", "mig", "mps", "timeslice"} {
		parts = append(parts, fmt.Sprintf("%s %d of %d", kind, found[kind], all[kind]))
	}
	fmt.Println("devices: " + strings.Join(parts, ", "))
}
