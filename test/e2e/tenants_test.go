//go:build e2e

// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Tests named TestTenant… do in real pods, as root, what docs/reference/security-tests.md says does not help a tenant. `test/e2e/run tenants`
// runs them with the others that do so.

// TestTenantNodes: a container with a part of a GPU opens the nodes of that, and none that it makes itself of other GPUs, of other
// partitions, and of what else a node has.
func TestTenantNodes(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	own := fmt.Sprintf("195:%d", gpus[0].Minor)
	numbers := []string{"1:1", "1:2", "1:4", "1:11", "7:0", "8:0", "10:229", "10:237", "10:238", "195:100", "253:0", "259:0"}
	for _, pattern := range []string{"dev/nvidia[0-9]*", "dev/nvidia-caps/*"} {
		paths, err := filepath.Glob(filepath.Join(machineRoot, pattern))
		if err != nil || len(paths) < 2 {
			t.Fatalf("nodes %s: %v, %v", pattern, paths, err)
		}
		for _, path := range paths {
			var node unix.Stat_t
			if err := unix.Stat(path, &node); err != nil {
				t.Fatal(err)
			}
			numbers = append(numbers, fmt.Sprintf("%d:%d", unix.Major(node.Rdev), unix.Minor(node.Rdev)))
		}
	}
	attack := fmt.Sprintf(`for n in %s; do mknod /tmp/$n c ${n%%:*} ${n#*:}; (: </tmp/$n); done 2>&1; for n in /dev/nvidia-caps/*; do stat -c "own %%t:%%T" $n; done; echo looked; sleep 3600`,
		strings.Join(numbers, " "))
	apply(t, ns, claim("partition", oneSlice.on(gpus...), "")+podRunning("partition", attack, "partition"))
	waitRunning(t, ns, "partition")
	out := waitLog(t, ns, "partition", "main", "looked")
	var opened []string
	for _, n := range numbers {
		if !strings.Contains(out, "/tmp/"+n+": Operation not permitted") {
			opened = append(opened, n)
		}
	}
	// The capabilities of its instance are two.
	for line := range strings.Lines(out) {
		var major, minor int
		if _, err := fmt.Sscanf(line, "own %x:%x", &major, &minor); err == nil {
			opened = slices.DeleteFunc(opened, func(n string) bool { return n == fmt.Sprintf("%d:%d", major, minor) })
		}
	}
	if strings.Count(out, "own ") != 2 || !slices.Equal(opened, []string{own}) {
		t.Errorf("of %d nodes that a container makes it may open %v, want %s and those of its partition:\n%s", len(numbers), opened, own, out)
	}
}

// TestTenantPassesNode: a pod passes the node of its GPU to one without a claim and ends. The GPU is not given out as long as that has it,
// and the next tenant's event says why and names nobody.
func TestTenantPassesNode(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	shared := t.TempDir()
	pods := fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: keeper}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: %[1]s, imagePullPolicy: Never, command: [cuda-client, take, --socket, /shared/s], volumeMounts: [{name: shared, mountPath: /shared}]}]
  volumes: [{name: shared, hostPath: {path: %[2]s}}]
---
apiVersion: v1
kind: Pod
metadata: {name: giver}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - {name: main, image: %[1]s, imagePullPolicy: Never, command: [sh, -c, "until cuda-client pass --socket /shared/s /dev/nvidia%[3]d; do sleep 1; done; sleep 3600"], volumeMounts: [{name: shared, mountPath: /shared}], resources: {claims: [{name: gpu}]}}
  volumes: [{name: shared, hostPath: {path: %[2]s}}]
  resourceClaims: [{name: gpu, resourceClaimName: gpu}]
`, demoImage, shared, gpus[0].Minor)
	apply(t, ns, claim("gpu", wholeGPU.on(gpus...), "")+pods)
	waitLog(t, ns, "keeper", "main", "taken")
	deletePod(t, ns, "giver")
	waitTaint(t, gpus[0].UUID, "gpu", driverName+"/release-pending", true)

	other := makeNamespace(t)
	t.Cleanup(func() {
		removeNamespace(t, other)
		untilDeallocated(t, other)
	})
	tolerant := strings.Replace(wholeGPU.on(gpus...).String(), "{", "{tolerations: [{operator: Exists}], ", 1)
	next := claimFor("next", "{name: gpu, exactly: "+tolerant+"}", "") + podUsing("next", "next")
	apply(t, other, next)
	waitEvent(t, other, "next", "FailedPrepareDynamicResources", "in use")
	if all := strings.Join(events(t.Context(), other, "next"), " | "); strings.Contains(all, ns) || strings.Contains(all, "cuda-client") || strings.Contains(all, "keeper") {
		t.Errorf("the event of the next tenant's pod names the one that keeps the GPU: %s", all)
	}
	deletePod(t, other, "next")
	deletePod(t, ns, "keeper")
	waitTaint(t, gpus[0].UUID, "gpu", driverName+"/release-pending", false)
	apply(t, other, podUsing("later", "next")) // the name of a pod is that of its events
	waitRunning(t, other, "later")
}

// TestTenantMPSPipe: root in a container with an MPS share cannot put anything beside, in front of, or in place of the daemon's socket, nor
// command the daemon, and its neighbour on the GPU stays a client. What it tries it can do to a daemon of its own, in a folder of its own.
func TestTenantMPSPipe(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	runningClient(t, ns, "victim", mpsShare("20Gi", 50).on(gpus...))
	const attack = `
try() { name=$1; shift; if "$@" 2>&1; then echo "$did $name"; fi; };
attack() { did=$1; export CUDA_MPS_PIPE_DIRECTORY=$2; cd $2;
try limits sh -c "echo set_default_active_thread_percentage 100 | timeout 5 nvidia-cuda-mps-control";
try quit sh -c "echo quit | timeout 5 nvidia-cuda-mps-control";
try write touch x; try folder mkdir y; try open chmod 777 .; try own chown 1000 .; touch control;
try link ln control other; try rename mv control another; touch control; try replace ln -sf /dev/null control; try remove rm control;
try remount unshare -r -m sh -c "$3 mount -o remount,rw $2 && touch $2/z"; cd /; };
mkdir /tmp/own /tmp/own-log;
CUDA_MPS_PIPE_DIRECTORY=/tmp/own CUDA_MPS_LOG_DIRECTORY=/tmp/own-log nvidia-cuda-mps-control -d;
attack control /tmp/own "mount -t tmpfs none /tmp/own && mount -o remount,ro /tmp/own &&"; attack did /tmp/nvidia-mps;
if ls /tmp/nvidia-log /var/log/nvidia-mps; then echo did log; fi;
ls -A /tmp/nvidia-mps; echo tried; unset CUDA_MPS_PIPE_DIRECTORY; `
	apply(t, ns, claim("attacker", mpsShare("10Gi", 25).on(gpus...), "")+podRunning("attacker", strings.ReplaceAll(attack, "\n", " ")+holding("1Gi"), "attacker"))
	out := waitLog(t, ns, "attacker", "main", "tried")
	if strings.Contains(out, "did ") {
		t.Fatalf("a tenant can do something to the MPS daemon of its GPU:\n%s", out)
	}
	for _, attempt := range []string{"limits", "quit", "write", "folder", "open", "own", "link", "rename", "replace", "remove", "remount"} {
		wantAll(t, "a daemon of its own", out, "control "+attempt+"\n")
	}
	wantAll(t, "the attacker", waitLog(t, ns, "attacker", "main", "ready"), throughMPS, "limit 10240 MiB", "(25 %)")
	wantClient(t, ns, "victim")
	runningClient(t, ns, "later", mpsShare("10Gi", 25).on(gpus...))
}

// TestTenantHooks: links in a container do not have the hooks of its claim, which run as root of the node, do anything else than what they are
// for, and its environment does not lead its programs elsewhere. What hooks get of that environment depends on the runtime, so
// TestHooksInOldRunc tries that.
func TestTenantHooks(t *testing.T) {
	t.Parallel()
	ns, gpus := reserve(t, 1)
	outside := t.TempDir()
	const hostile = `
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  restartPolicy: Never
  initContainers:
  - {name: links, image: %[2]s, imagePullPolicy: Never, volumeMounts: [{name: x, mountPath: /x}], command: [sh, -c, "cp -a /etc/passwd /x; %[3]s"]}
  containers:
  - name: main
    image: %[2]s
    imagePullPolicy: Never
    command: [sh, -c, "echo started; cuda-client info --timeout 10s; echo elsewhere; CUDA_MPS_PIPE_DIRECTORY=%[4]s cuda-client info --timeout 10s; echo tried"]
    env:
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    - {name: CUDA_MPS_PIPE_DIRECTORY, value: %[4]s}
    volumeMounts: [{name: x, mountPath: %[5]s}]
    resources: {claims: [{name: %[1]s}]}
  volumes: [{name: x, emptyDir: {}}]
  resourceClaims: [{name: %[1]s, resourceClaimName: %[1]s}]
---`
	manifest := ""
	for name, attack := range map[string]struct{ at, links string }{
		"environment":       {"/x", "true"},
		"loader":            {"/etc", "cd /x; for f in ld.so.cache ld.so.cache~ ld.so.conf ld.so.preload; do ln -s " + outside + "/$f $f; done; ln -s " + outside + " ld.so.conf.d"},
		"compat":            {"/usr/local/cuda", "mkdir /x/compat; ln -s " + outside + "/libcuda.so.1 /x/compat/libcuda.so.999.9"},
		"daemon":            {"/tmp/nvidia-mps", "ln -s " + outside + " /x/control"},
		"folder-of-daemons": {"/tmp", "ln -s " + outside + " /x/nvidia-mps"},
	} {
		manifest += claim(name, mpsShare("4Gi", 10).on(gpus...), "") + fmt.Sprintf(hostile, name, demoImage, attack.links, outside, attack.at)
	}
	apply(t, ns, manifest)
	for _, name := range []string{"environment", "loader", "compat", "daemon", "folder-of-daemons"} {
		eventually(t, "the container of pod "+name+" to run or be refused", func(ctx context.Context) (bool, string) {
			p, err := client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
			if err != nil || len(p.Status.ContainerStatuses) == 0 {
				return false, fmt.Sprint(err)
			}
			s := p.Status.ContainerStatuses[0].State
			return s.Terminated != nil, fmt.Sprintf("%+v", s)
		})
	}
	asSet, elsewhere, _ := strings.Cut(logs(t, ns, "environment", "main"), "elsewhere\n")
	wantAll(t, "a container with a hostile environment", asSet, "started", throughMPS, "limit 4096 MiB", "(10 %)")
	if strings.Contains(elsewhere, throughMPS) || !strings.Contains(elsewhere, "tried") {
		t.Errorf("the variable leads no program elsewhere, so that nothing was tried:\n%s", elsewhere)
	}
	for _, name := range []string{"loader", "compat", "daemon", "folder-of-daemons"} {
		if out, err := tryLogs(t.Context(), ns, name, "main"); err == nil && strings.Contains(out, "started") && !strings.Contains(out, throughMPS) {
			t.Errorf("pod %s runs without MPS:\n%s", name, out)
		}
	}
	if made, err := os.ReadDir(outside); err != nil || len(made) > 0 {
		t.Errorf("links in a container have led its hooks to a folder of the node: %v, %v", made, err)
	}
}

// TestTenantTokens: what a plugin's token may not do, beside what TestOwnNodeOnly, TestOwnEventsOnly and test/cluster/admission try; and that
// the chart gives nothing to pods of others. The tokens are real ones, so that each right of a group that their users are in would show.
func TestTenantTokens(t *testing.T) {
	t.Parallel()
	spec := driverPod(t, pluginComponent).Spec
	ns := makeNamespace(t)
	t.Cleanup(func() { removeNamespace(t, ns) })
	may := func(as kubernetes.Interface, verb, group, resource, namespace string) bool {
		t.Helper()
		resource, subresource, _ := strings.Cut(resource, "/")
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Group: group, Resource: resource, Subresource: subresource, Namespace: namespace},
		}}
		answer, err := as.AuthorizationV1().SelfSubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return answer.Status.Allowed
	}
	ask := func(as kubernetes.Interface, verb, group, resource, namespace string) {
		t.Helper()
		if may(as, verb, group, resource, namespace) {
			t.Errorf("a token may %s %s in namespace %q", verb, resource, namespace)
		}
	}
	const resources = "resource.k8s.io"
	tenant, plugin := withToken(t, ns, "default"), withToken(t, driverNamespace, spec.ServiceAccountName)
	for _, as := range []kubernetes.Interface{tenant, plugin} {
		for _, verb := range []string{"list", "watch", "create", "delete"} {
			ask(as, verb, resources, "resourceclaims", "")
		}
		for _, resource := range []string{"secrets", "configmaps", "pods", "pods/proxy", "pods/exec", "pods/log", "serviceaccounts/token"} {
			for _, verb := range []string{"get", "list", "create"} {
				ask(as, verb, "", resource, "")
				ask(as, verb, "", resource, driverNamespace)
			}
		}
		ask(as, "delete", "", "events", metav1.NamespaceDefault)
		ask(as, "update", "", "nodes", "")
		ask(as, "create", resources, "deviceclasses", "")
		ask(as, "update", resources, "deviceclasses", "")
		ask(as, "update", "admissionregistration.k8s.io", "validatingadmissionpolicies", "")
		ask(as, "escalate", "rbac.authorization.k8s.io", "clusterroles", "")
		ask(as, "impersonate", "", "users", "")
	}
	for _, verb := range []string{"create", "update", "delete"} {
		ask(tenant, verb, resources, "resourceslices", "")
	}
	ask(tenant, "update", resources, "resourceclaims/status", ns)
	ask(tenant, "create", "", "events", metav1.NamespaceDefault)

	// Such a right would have shown.
	if !may(plugin, "create", resources, "resourceslices", "") {
		t.Error("the plugin's token may not write slices: it is another one")
	}
	apply(t, ns, fmt.Sprintf(`
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: group}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: Group, name: "system:serviceaccounts:%s"}]
`, ns))
	eventually(t, "a right of the tenant's group", func(context.Context) (bool, string) {
		return may(tenant, "list", "", "pods", ns), "the token may not list pods"
	})
}

// withToken is a client with a token of a ServiceAccount, and nothing else.
func withToken(t *testing.T, namespace, account string) kubernetes.Interface {
	t.Helper()
	token, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(restConfig)
	config.BearerToken = token.Status.Token
	as, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return as
}
