//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// What Kubernetes AI Conformance asks of accelerators and its tests, as test/aiconformance pins them, do not try yet. The tests here ask
// the same as the requirements: https://github.com/kubernetes-sigs/ai-conformance, kars 0001 and 0059.

// TestAIConformanceDriverVersions checks that the devices of a node say one version of the driver and of CUDA, and that nvidia-smi in a
// container says the same.
func TestAIConformanceDriverVersions(t *testing.T) {
	t.Parallel()
	published, err := publishedSlices(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	said, devices := map[resourceapi.QualifiedName]string{}, 0
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			devices++
			for _, name := range []resourceapi.QualifiedName{"driverVersion", "cudaDriverVersion"} {
				version := ptr.Deref(d.Attributes[name].VersionValue, "none")
				if said[name] != "" && said[name] != version {
					t.Errorf("device %s has %s %s, another one %s", d.Name, name, version, said[name])
				}
				said[name] = version
			}
		}
	}
	if devices == 0 {
		t.Fatal("no devices")
	}
	ns, gpus := reserve(t, 1)
	apply(t, ns, claim("c", wholeGPU.on(gpus...), "")+podUsing("p", "c"))
	waitRunning(t, ns, "p")
	driver, err := inPod(ns, "p", "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader,nounits")
	if err != nil {
		t.Fatalf("%v\n%s", err, driver)
	}
	header, err := inPod(ns, "p", "nvidia-smi")
	if err != nil {
		t.Fatalf("%v\n%s", err, header)
	}
	cuda := regexp.MustCompile(`CUDA Version: *([0-9]+\.[0-9]+)`).FindStringSubmatch(header)
	// A version of the API has three numbers without leading zeros, which nvidia-smi prints otherwise.
	same := regexp.MustCompile(`\b0+([0-9])`).ReplaceAllString(strings.TrimSpace(driver), "$1")
	if !strings.HasPrefix(said["driverVersion"], same) {
		t.Errorf("the slices say driver %s, nvidia-smi %s", said["driverVersion"], driver)
	}
	if cuda == nil || !strings.HasPrefix(said["cudaDriverVersion"], cuda[1]+".") {
		t.Errorf("the slices say CUDA %s, nvidia-smi %q:\n%s", said["cudaDriverVersion"], cuda, header)
	}
	record(t, "Kubernetes AI Conformance", "its test passes, and ours of what it does not try yet")
}

// TestAIConformanceMetrics checks that there are metrics of each GPU's utilization, memory, temperature, power and links.
func TestAIConformanceMetrics(t *testing.T) {
	t.Parallel()
	gpus := showMachine(t).GPUs
	address := "http://" + net.JoinHostPort(driverPod(t, pluginComponent).Status.PodIP, metricsPort) + "/metrics"
	// Some come with the first sample.
	eventually(t, "metrics of all GPUs", func(ctx context.Context) (bool, string) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
		if err != nil {
			return false, err.Error()
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return false, err.Error()
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			return false, err.Error()
		}
		var missing []string
		for _, names := range []string{"util", "mem", "temperature", "power|watt|energy", "nvlink|pcie_tx|bandwidth"} {
			of := regexp.MustCompile(`(?m)^[a-z_]*(`+names+`)[a-z_]*\{[^}]*\bgpu="([^"]+)"`).FindAllStringSubmatch(string(text), -1)
			found := map[string]bool{}
			for _, match := range of {
				found[match[2]] = true
			}
			if len(found) < len(gpus) {
				missing = append(missing, fmt.Sprintf("%s: of %d GPUs out of %d", names, len(found), len(gpus)))
			}
		}
		return len(missing) == 0, strings.Join(missing, ", ")
	})
}
