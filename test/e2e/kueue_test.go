//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const (
	// kueueSuite is the suite on a cluster with Kueue.
	kueueSuite    = "kueue"
	kueueExamples = "docs/examples/kueue"
	// team is the namespace of the examples.
	team = "team-kueue"
)

// TestKueueQuota puts the jobs of docs/how-to/kueue.md, three of each, through a real Kueue with the quota of that page: as many run as
// the quota has room for, one waits and is told why, and starts when another ends. MIG partitions have quota by the driver's counter
// of memory, MPS shares by their capacity, and time slices by number.
func TestKueueQuota(t *testing.T) {
	if suite != kueueSuite {
		t.Skip("needs the cluster of suite " + kueueSuite)
	}
	queues, err := os.ReadFile(filepath.Join(repoRoot, kueueExamples, "queues.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: team}}
	if _, err := client.CoreV1().Namespaces().Create(t.Context(), namespace, metav1.CreateOptions{}); err != nil {
		t.Fatalf("creating the namespace %s: %v", team, err)
	}
	apply(t, team, string(queues))
	templates, jobs := readKueueJobs(t)
	tests := map[string]struct {
		example string
		change  func(*resourceapi.ExactDeviceRequest)
		quota   string // the resource of the ClusterQueue
		charge  string // of each job
		fit     int
		prints  string
	}{
		"partition": {example: "partition", quota: "gpu-memory", charge: "9984Mi", fit: 2, prints: "MIG 1g.10gb"},
		"share":     {example: "share", quota: "gpu-share-memory", charge: "8Gi", fit: 2, prints: "GPU 0:"},
		"time-slice": {
			example: "share", quota: "gpu-time-slices", charge: "1", fit: 1, prints: "GPU 0:",
			change: func(r *resourceapi.ExactDeviceRequest) { r.DeviceClassName, r.Capacity = "timeslice.partage.dev", nil },
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			template := templates[tc.example].DeepCopy()
			template.Name = name
			if tc.change != nil {
				tc.change(template.Spec.Spec.Devices.Requests[0].Exactly)
			}
			createTemplate(t, template)
			var running []*batchv1.Job
			for n := range tc.fit {
				job := createQueuedJob(t, jobs[tc.example], fmt.Sprintf("%s-%d", name, n), template.Name)
				waitAdmitted(t, job, tc.quota, tc.charge)
				waitJobLog(t, job, tc.prints)
				running = append(running, job)
			}
			last := createQueuedJob(t, jobs[tc.example], name+"-last", template.Name)
			waitQuota(t, last, tc.quota)
			endJob(t, running[0])
			waitAdmitted(t, last, tc.quota, tc.charge)
			waitJobLog(t, last, tc.prints)
		})
	}
	// A whole GPU has quota by the same counter, and more memory than the queue has.
	t.Run("whole GPU", func(t *testing.T) {
		t.Parallel()
		template := templates["partition"].DeepCopy()
		template.Name = "whole"
		template.Spec.Spec.Devices.Requests[0].Exactly = &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}
		createTemplate(t, template)
		waitQuota(t, createQueuedJob(t, jobs["partition"], "whole", template.Name), "gpu-memory", "81559Mi")
	})
	t.Cleanup(func() { record(t, "Kueue", "jobs wait until there is quota for their devices") })
}

// readKueueJobs returns the templates and the jobs of the guide, by name.
func readKueueJobs(t *testing.T) (templates map[string]*resourceapi.ResourceClaimTemplate, jobs map[string]*batchv1.Job) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(repoRoot, kueueExamples, "jobs.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	templates, jobs = map[string]*resourceapi.ResourceClaimTemplate{}, map[string]*batchv1.Job{}
	for document := range strings.SplitSeq(string(content), "\n---\n") {
		var kind metav1.TypeMeta
		var template resourceapi.ResourceClaimTemplate
		var job batchv1.Job
		err := yaml.Unmarshal([]byte(document), &kind)
		switch {
		case err != nil:
		case kind.Kind == "Job":
			err = yaml.UnmarshalStrict([]byte(document), &job)
			jobs[job.Name] = &job
		default:
			err = yaml.UnmarshalStrict([]byte(document), &template)
			templates[template.Name] = &template
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
	}
	return templates, jobs
}

func createTemplate(t *testing.T, template *resourceapi.ResourceClaimTemplate) {
	t.Helper()
	if _, err := client.ResourceV1().ResourceClaimTemplates(team).Create(t.Context(), template, metav1.CreateOptions{}); err != nil {
		t.Fatalf("creating the template %s: %v", template.Name, err)
	}
}

// createQueuedJob makes a copy of a job for a template, with the tests' image. It lists its devices and ends when endJob says so.
// Nothing in it says that it waits: that is for Kueue's webhook.
func createQueuedJob(t *testing.T, example *batchv1.Job, name, template string) *batchv1.Job {
	t.Helper()
	job := example.DeepCopy()
	job.Name = name
	pod := &job.Spec.Template.Spec
	pod.TerminationGracePeriodSeconds = new(int64(1))
	pod.Containers[0].Image, pod.Containers[0].ImagePullPolicy = demoImage, corev1.PullNever
	pod.Containers[0].Command = []string{"sh", "-c", "nvidia-smi -L; until [ -e /tmp/end ]; do sleep 1; done"}
	pod.ResourceClaims[0].ResourceClaimTemplateName = &template
	created, err := client.BatchV1().Jobs(team).Create(t.Context(), job, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating the job %s: %v", name, err)
	}
	t.Cleanup(func() {
		o := metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationForeground)}
		if err := client.BatchV1().Jobs(team).Delete(context.WithoutCancel(t.Context()), name, o); err != nil {
			t.Errorf("deleting the job %s: %v", name, err)
		}
	})
	return created
}

// workload is what a test reads of Kueue's Workload.
type workload struct {
	Status struct {
		Conditions []metav1.Condition `json:"conditions"`
		Admission  struct {
			PodSetAssignments []struct {
				ResourceUsage corev1.ResourceList `json:"resourceUsage"`
			} `json:"podSetAssignments"`
		} `json:"admission"`
	} `json:"status"`
}

// usage is what the workload is charged of a resource of its queue.
func (w workload) usage(quota string) string {
	var all []string
	for _, set := range w.Status.Admission.PodSetAssignments {
		used := set.ResourceUsage[corev1.ResourceName(quota)]
		all = append(all, used.String())
	}
	return strings.Join(all, " ")
}

func (w workload) String() string {
	var all []string
	for _, c := range w.Status.Conditions {
		all = append(all, fmt.Sprintf("%s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message))
	}
	return strings.Join(all, " | ")
}

// workloadOf reads what Kueue made of a job.
func workloadOf(ctx context.Context, job *batchv1.Job) (workload, error) {
	raw, err := client.CoreV1().RESTClient().Get().AbsPath("/apis/kueue.x-k8s.io/v1beta2/namespaces/"+team+"/workloads").
		Param("labelSelector", "kueue.x-k8s.io/job-uid="+string(job.UID)).DoRaw(ctx)
	if err != nil {
		return workload{}, fmt.Errorf("listing the workloads of job %s: %w", job.Name, err)
	}
	var list struct {
		Items []workload `json:"items"`
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return workload{}, fmt.Errorf("reading the workloads of job %s: %w", job.Name, err)
	}
	if len(list.Items) != 1 {
		return workload{}, fmt.Errorf("job %s has %d workloads", job.Name, len(list.Items))
	}
	return list.Items[0], nil
}

// waitAdmitted waits until Kueue lets a job run and charges so much for it.
func waitAdmitted(t *testing.T, job *batchv1.Job, quota, charge string) {
	t.Helper()
	eventually(t, fmt.Sprintf("job %s admitted for %s of %s", job.Name, charge, quota), func(ctx context.Context) (bool, string) {
		w, err := workloadOf(ctx, job)
		if err != nil {
			return false, err.Error()
		}
		admitted := meta.IsStatusConditionTrue(w.Status.Conditions, "Admitted")
		return admitted && w.usage(quota) == charge, fmt.Sprintf("usage %q, %s", w.usage(quota), w)
	})
}

// waitQuota waits until Kueue says that a job waits for quota, in a message with these parts. It has no pods then.
func waitQuota(t *testing.T, job *batchv1.Job, parts ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("job %s waiting for %v", job.Name, parts), func(ctx context.Context) (bool, string) {
		w, err := workloadOf(ctx, job)
		if err != nil {
			return false, err.Error()
		}
		c := meta.FindStatusCondition(w.Status.Conditions, "QuotaReserved")
		told := c != nil && c.Status == metav1.ConditionFalse && c.Reason == "Pending" && strings.Contains(c.Message, "insufficient") &&
			!slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(c.Message, part) })
		return told, w.String()
	})
	w, err := workloadOf(t.Context(), job)
	t.Logf("job %s: %s %v", job.Name, w, err)
	now, err := client.BatchV1().Jobs(team).Get(t.Context(), job.Name, metav1.GetOptions{})
	if err != nil || now.Spec.Suspend == nil || !*now.Spec.Suspend || now.Status.Active > 0 {
		t.Errorf("job %s waits for quota, but: %+v, %v", job.Name, now.Status, err)
	}
	if pods := podsOfJob(t, job); len(pods) > 0 {
		t.Errorf("job %s waits for quota and has the pods %v", job.Name, pods)
	}
}

// podsOfJob returns the names of a job's pods.
func podsOfJob(t *testing.T, job *batchv1.Job) []string {
	t.Helper()
	pods, err := client.CoreV1().Pods(team).List(t.Context(), metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job.Name})
	if err != nil {
		t.Fatalf("listing the pods of job %s: %v", job.Name, err)
	}
	var names []string
	for _, p := range pods.Items {
		names = append(names, p.Name)
	}
	return names
}

// waitJobLog waits until the only pod of a job runs and has printed a text.
func waitJobLog(t *testing.T, job *batchv1.Job, want string) {
	t.Helper()
	var pods []string
	eventually(t, "a pod of job "+job.Name, func(context.Context) (bool, string) {
		pods = podsOfJob(t, job)
		return len(pods) == 1, fmt.Sprint(pods)
	})
	waitRunning(t, team, pods[0])
	waitLog(t, team, pods[0], "main", want)
}

// endJob lets the pod of a job end, and waits until the job is complete.
func endJob(t *testing.T, job *batchv1.Job) {
	t.Helper()
	kubectl(t, "exec", "-n", team, podsOfJob(t, job)[0], "--", "touch", "/tmp/end")
	eventually(t, "job "+job.Name+" complete", func(ctx context.Context) (bool, string) {
		now, err := client.BatchV1().Jobs(team).Get(ctx, job.Name, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		return now.Status.Succeeded == 1, fmt.Sprintf("%+v", now.Status)
	})
}
