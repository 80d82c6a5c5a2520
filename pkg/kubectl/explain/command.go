// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/kubectl/document"
	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/options"
	"github.com/partage-dev/partage/pkg/kubectl/printer"
	"github.com/partage-dev/partage/pkg/kubectl/stuck"
)

// command is one call.
type command struct {
	*options.Options
	file string
	// manifest is what the file has.
	manifest *Manifest
}

// NewCommand returns the command explain.
func NewCommand(o *options.Options) *cobra.Command {
	c := &command{Options: o}
	cmd := &cobra.Command{
		Use:   "explain [POD | KIND/NAME | KIND NAME | -f FILE]",
		Short: "Say why a pod or a claim waits, why it is stuck, or what it got",
		Long: `Say why a pod or a claim waits, why it is stuck, or what it got.

The verdict is that of the scheduler's own allocator, over the slices and claims of the cluster. Then it says who is in the
way, and the smallest changes that would help; those of devices and nodes were tried with the allocator. A name without a
kind is a pod's or, if there is none, a claim's; deploy/NAME, sts/NAME, job/NAME and other workloads stand for their pods.
Without a name it explains all pods of the namespace, or with -A of all, that wait for devices or are stuck with them. With -f
it says what would happen to the pods, claims and templates of a file that is not applied yet, and what the API server would
refuse, which is asked for by a dry run.

The exit code is 2 if something waits, is stuck, or is unknown.`,
		Example: `  kubectl gpu explain llm-0
  kubectl gpu explain claim/training -n team-a
  kubectl gpu explain deploy/web
  kubectl gpu explain -A -w
  kubectl gpu explain -f job.yaml`,
		Args: cobra.MaximumNArgs(2),
		RunE: o.Run(c.run),
	}
	o.AddOutputFlag(cmd)
	o.AddWatchFlags(cmd)
	o.AddAllNamespacesFlag(cmd, "Explain the pods of all namespaces that wait or are stuck")
	cmd.Flags().StringVarP(&c.file, "filename", "f", "", "File with objects that are not applied yet, - for the standard input")
	return cmd
}

func (c *command) run(ctx context.Context, client kubernetes.Interface, args []string) error {
	if len(args) > 0 && (c.file != "" || c.AllNamespaces) {
		return errors.New("name one object, or a file with -f, or all with -A")
	}
	namespace, err := c.Namespace()
	if err != nil {
		return err
	}
	// With -w, too, the standard input is read once.
	if c.file != "" && c.manifest == nil {
		data, err := document.ReadFile(c.In, c.file)
		if err != nil {
			return err
		}
		if c.manifest, err = Parse(data, namespace); err != nil {
			return fmt.Errorf("%s: %w", c.file, err)
		}
	}
	all, err := c.explain(ctx, client, namespace, strings.Join(args, "/"))
	if err != nil {
		return err
	}
	var object any = &List{TypeMeta: printer.TypeMeta(Kind + "List"), Items: all}
	if len(all) == 1 {
		object = all[0]
	}
	if err := printer.Print(c.Options, object, View(all...)); err != nil {
		return err
	}
	if slices.ContainsFunc(all, (*Explanation).Found) {
		return options.ErrFound
	}
	return nil
}

// explain explains the file, what an argument names or, if that is empty, what waits.
func (c *command) explain(ctx context.Context, client kubernetes.Interface, namespace, argument string) ([]*Explanation, error) {
	m := c.manifest
	snapshot, err := fleet.Read(ctx, client, namespace)
	if err != nil {
		return nil, err
	}
	var writer dynamic.Interface
	if m != nil {
		if writer, err = c.Dynamic(); err != nil {
			return nil, err
		}
		m.Compare(ctx, writer, snapshot.Pods)
		snapshot = m.Over(snapshot)
		if len(m.Ignored) > 0 {
			// Nobody reads what cannot be written.
			_, _ = fmt.Fprintln(c.ErrOut, "not looked at, because they ask for no devices:", strings.Join(m.Ignored, ", "))
		}
	}
	x := New(fleet.New(snapshot, c.Driver), time.Now())
	x.ReadFrom(ctx, client)
	switch {
	case m == nil && argument == "":
		all := x.Waiting(ctx, namespace)
		if len(all) == 0 && namespace != "" {
			if _, err := client.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{}); apierrors.IsNotFound(err) {
				return nil, fmt.Errorf("there is no namespace %s", namespace)
			}
		}
		return all, nil
	case m == nil:
		return x.Named(ctx, namespace, argument)
	}
	x.Refused = func(object *unstructured.Unstructured) (refused, unseen string) {
		return dryRun(ctx, writer, object)
	}
	all := x.Manifest(ctx, m)
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no pod, claim or claim template, and no workload with pods", c.file)
	}
	return all, nil
}

// kinds are what the argument may begin with. Workloads are as the owners of their pods have it.
var kinds = map[string]string{
	"pod": kindPod, "pods": kindPod, "po": kindPod,
	"claim": kindClaim, "claims": kindClaim, "resourceclaim": kindClaim, "resourceclaims": kindClaim,
	"resourceclaim.resource.k8s.io": kindClaim, "resourceclaims.resource.k8s.io": kindClaim,
	"deploy": "Deployment", "deployment": "Deployment", "deployments": "Deployment", "deployment.apps": "Deployment", "deployments.apps": "Deployment",
	"sts": "StatefulSet", "statefulset": "StatefulSet", "statefulsets": "StatefulSet", "statefulset.apps": "StatefulSet",
	"ds": "DaemonSet", "daemonset": "DaemonSet", "daemonsets": "DaemonSet", "daemonset.apps": "DaemonSet",
	"rs": "ReplicaSet", "replicaset": "ReplicaSet", "replicasets": "ReplicaSet", "replicaset.apps": "ReplicaSet",
	"job": "Job", "jobs": "Job", "job.batch": "Job", "jobs.batch": "Job",
}

const (
	kindPod   = "pod"
	kindClaim = "claim"

	kindConfigMap = "ConfigMap"
	kindSecret    = "Secret"
)

// Named explains KIND/NAME, or a NAME that is a pod's or a claim's.
func (x *Explainer) Named(ctx context.Context, namespace, argument string) ([]*Explanation, error) {
	kind, name, qualified := strings.Cut(argument, "/")
	if !qualified {
		kind, name = "", argument
	} else if kind = kinds[strings.ToLower(kind)]; kind == "" {
		return nil, fmt.Errorf("%s: the kind must be pod, claim, deployment, statefulset, daemonset, replicaset or job", argument)
	}
	var all []*Explanation
	for _, p := range x.model.Pods {
		if p.Namespace == namespace && is(p, kind, name) {
			all = append(all, x.Pod(ctx, p))
		}
	}
	if kind != "" && kind != kindPod && kind != kindClaim {
		all = append(all, x.uncreated(namespace, creates(kind, name))...)
	}
	if len(all) > 0 {
		return all, nil
	}
	if c := x.model.Claim(namespace, name); c != nil && (kind == "" || kind == kindClaim) {
		return []*Explanation{x.Claim(ctx, c)}, nil
	}
	return nil, absent(kind, name, namespace)
}

// creates reports whether an object makes the pods of a workload.
func creates(kind, name string) func(corev1.ObjectReference) (bool, error) {
	return func(o corev1.ObjectReference) (bool, error) {
		hash, isOf := strings.CutPrefix(o.Name, name+"-")
		return o.Kind == kind && o.Name == name || kind == "Deployment" && o.Kind == "ReplicaSet" && isOf && !strings.Contains(hash, "-"), nil
	}
}

// is reports whether a pod is the one of a name, or of the workload of a kind and name.
func is(p *corev1.Pod, kind, name string) bool {
	if kind == "" || kind == kindPod {
		return p.Name == name
	}
	k, n := fleet.OwnerOf(p)
	return k == kind && n == name
}

// absent says that there is nothing to explain of what was named.
func absent(kind, name, namespace string) error {
	switch kind {
	case "":
		kind = "pod or claim"
	case kindPod, kindClaim:
	default:
		return fmt.Errorf("there is no pod of %s %s in namespace %s, or it may not be read: kubectl events -n %[3]s says why none was made",
			strings.ToLower(kind), name, namespace)
	}
	return fmt.Errorf("there is no %s %s in namespace %s, or it may not be read", kind, name, namespace)
}

// Waiting explains the pods of a namespace, or of all, that wait for devices or are stuck with them, or that these cannot be read.
func (x *Explainer) Waiting(ctx context.Context, namespace string) []*Explanation {
	all := []*Explanation{}
	if x.model.Lacks(fleet.ResourcePods, namespace) {
		// The notes say which right is missing.
		s := x.begin(kindNamespace, &metav1.ObjectMeta{Name: namespace})
		s.Verdict = Unknown
		return append(all, s.Explanation)
	}
	for _, p := range x.model.Pods {
		if namespace != "" && p.Namespace != namespace || scheduled(p) && !stuck.Waits(p, x.now) {
			continue
		}
		if e := x.Pod(ctx, p); e.Found() || e.Verdict == Allocatable {
			all = append(all, e)
		}
	}
	return append(all, x.uncreated(namespace, x.asks)...)
}

// lately is how long ago it failed at most to create a pod that is still wanted: controllers try again after 17 minutes or less.
const lately = 20 * time.Minute

// uncreated explains of which of some workloads pods could not be created lately, and none since.
func (x *Explainer) uncreated(namespace string, which func(corev1.ObjectReference) (bool, error)) []*Explanation {
	if x.Failed == nil {
		return nil
	}
	// Without the right to read events, what waits are the pods that there are.
	events, _ := x.Failed(namespace)
	slices.SortFunc(events, func(a, b corev1.Event) int { return fleet.LastSeen(&a).Compare(fleet.LastSeen(&b)) })
	latest := map[string]*corev1.Event{}
	for i := range events {
		o := &events[i].InvolvedObject
		latest[o.Namespace+"/"+o.Kind+"/"+o.Name] = &events[i]
	}
	var out []*Explanation
	for _, key := range slices.Sorted(maps.Keys(latest)) {
		o, seen := latest[key].InvolvedObject, fleet.LastSeen(latest[key])
		since := slices.ContainsFunc(x.model.Pods, func(p *corev1.Pod) bool {
			owner := ptr.Deref(metav1.GetControllerOf(p), metav1.OwnerReference{})
			return p.Namespace == o.Namespace && owner.Kind == o.Kind && owner.Name == o.Name && p.CreationTimestamp.After(seen)
		})
		if since || x.now.Sub(seen) > lately || kinds[strings.ToLower(o.Kind)] != o.Kind {
			continue
		}
		is, err := which(o)
		if !is {
			continue
		}
		s := x.begin(o.Kind, &metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name})
		s.notCreated(PodsNotCreated, fmt.Sprintf("%s (%s ago)", latest[key].Message, printer.Age(x.now.Sub(seen))))
		if err != nil {
			s.note("Whether it asks for devices is unknown: %v", err)
		}
		out = append(out, s.settle())
	}
	return out
}

// asks reports whether the pods of a workload ask for devices, or why that is unknown.
func (x *Explainer) asks(o corev1.ObjectReference) (bool, error) {
	owner, err := x.Owner(o)
	if err != nil {
		return !apierrors.IsNotFound(err), err
	}
	pod := &corev1.Pod{Spec: workloadOf(owner).template.Spec}
	cluster := x.planner.Cluster
	return len(pod.Spec.ResourceClaims) > 0 || cluster.ExtendedClaim(pod, nil) != nil || len(cluster.Unserved(pod)) > 0, nil
}
