// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"fmt"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

const (
	podNamespace = "pods"
	caseParam    = "case"
	// label is what scheduler_perf selects cases by.
	label = "partage"
)

// size is how many nodes and pods there are. Some loads have fewer pods.
type size struct{ nodes, pods int }

// minPods is how many pods there are at least.
const minPods = 4

func (s size) podsOf(c *scenario) int { return max(s.pods*c.share/100, min(s.pods, minPods)) }

// op and testCase are parts of scheduler_perf's configuration.
type op = map[string]any

type testCase struct {
	Name             string          `json:"name"`
	FeatureGates     map[string]bool `json:"featureGates"`
	WorkloadTemplate []op            `json:"workloadTemplate"`
	Workloads        []workload      `json:"workloads"`
}

type workload struct {
	Name   string         `json:"name"`
	Labels []string       `json:"labels"`
	Params map[string]int `json:"params"`
}

// profileFile is the file with the CPU profile of a case.
func profileFile(c *scenario) string { return c.name() + ".prof" }

// writeConfig writes scheduler_perf's configuration into a folder, with the files that it names, and returns
// its path.
func writeConfig(dir string, cases []scenario, s size) (string, error) {
	nodeFile := filepath.Join(dir, "node.yaml")
	if err := writeYAML(nodeFile, nodeTemplate()); err != nil {
		return "", err
	}
	var all []testCase
	for n := range cases {
		c := &cases[n]
		ops := []op{{"opcode": "createNodes", "nodeTemplatePath": nodeFile, "countParam": "$nodes"}}
		for i, r := range c.pods {
			file := filepath.Join(dir, fmt.Sprintf("%s-claim-%d.yaml", c.name(), i))
			if err := writeYAML(file, claimTemplate(i, r)); err != nil {
				return "", err
			}
			ops = append(ops, op{"opcode": "createAny", "templatePath": file, "namespace": podNamespace})
		}
		podFile := filepath.Join(dir, c.name()+"-pod.yaml")
		if err := writeYAML(podFile, podTemplate(len(c.pods))); err != nil {
			return "", err
		}
		ops = append(ops,
			op{"opcode": "startCollectingProfile", "type": "CPU", "filePath": profileFile(c)},
			op{"opcode": "createPods", "namespace": podNamespace, "countParam": "$pods", "podTemplatePath": podFile, "collectMetrics": true},
			op{"opcode": "stopCollectingProfile", "type": "CPU"})
		all = append(all, testCase{
			Name: c.name(), FeatureGates: map[string]bool{"DynamicResourceAllocation": true}, WorkloadTemplate: ops,
			Workloads: []workload{{
				Name: fmt.Sprintf("%dnodes", s.nodes), Labels: []string{label},
				Params: map[string]int{caseParam: n, "nodes": s.nodes, "pods": s.podsOf(c)},
			}},
		})
	}
	file := filepath.Join(dir, "config.yaml")
	return file, writeYAML(file, all)
}

func nodeTemplate() *corev1.Node {
	return &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: "node-{{.Index}}"},
		Status: corev1.NodeStatus{
			Capacity:   corev1.ResourceList{corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceCPU: resource.MustParse("192"), corev1.ResourceMemory: resource.MustParse("2Ti")},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			Phase:      corev1.NodeRunning,
		},
	}
}

func claimTemplate(n int, r request) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{
		TypeMeta:   metav1.TypeMeta{APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceClaimTemplate"},
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("claim-%d", n), Namespace: podNamespace},
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: r.spec()},
	}
}

// podTemplate is of pods that have one of several claims in turn.
func podTemplate(claims int) *corev1.Pod {
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{GenerateName: "pod-"},
		Spec: corev1.PodSpec{
			ResourceClaims: []corev1.PodResourceClaim{{Name: "device", ResourceClaimTemplateName: ptr.To(fmt.Sprintf("claim-{{Mod .Index %d}}", claims))}},
			Containers: []corev1.Container{{
				Name: "pause", Image: "registry.k8s.io/pause:3.10.1",
				Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "device"}}},
			}},
		},
	}
}

func writeYAML(file string, object any) error {
	text, err := yaml.Marshal(object)
	if err != nil {
		return fmt.Errorf("write %s: %w", file, err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return fmt.Errorf("write the configuration of the benchmark: %w", err)
	}
	return nil
}
