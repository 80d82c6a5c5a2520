// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
)

// asProgram is the variable with which the test binary is the program.
const asProgram = "KUBECTL_GPU_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// program runs the program under a name, with the kubeconfig of a cluster.
func program(t *testing.T, name, kubeconfig string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Args = append([]string{name}, args...)
	cmd.Env = append(os.Environ(), asProgram+"=1", "KUBECONFIG="+kubeconfig, "HOME="+t.TempDir())
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errOut.String()
}

// cluster starts an API server of which one can only read, with two nodes without GPUs and a driver that has lost its pods, and
// returns a kubeconfig for it.
func cluster(t *testing.T) (kubeconfig string) {
	t.Helper()
	named := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name, Namespace: "default"} }
	v1 := func(kind string) metav1.TypeMeta { return metav1.TypeMeta{APIVersion: "v1", Kind: kind} }
	resource := func(kind string) metav1.TypeMeta {
		return metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: kind}
	}
	installed := metav1.ObjectMeta{Name: "gpu.nvidia.com", Annotations: map[string]string{fleet.NamespaceAnnotation: "partage"}}
	lists := map[string]runtime.Object{
		"nodes":                  &corev1.NodeList{TypeMeta: v1("NodeList"), Items: []corev1.Node{{ObjectMeta: named("gpu-1")}, {ObjectMeta: named("gpu-2")}}},
		"namespaces":             &corev1.NamespaceList{TypeMeta: v1("NamespaceList"), Items: []corev1.Namespace{{ObjectMeta: named("default")}, {ObjectMeta: named("team")}}},
		"pods":                   &corev1.PodList{TypeMeta: v1("PodList"), Items: []corev1.Pod{{ObjectMeta: named("trainer")}}},
		"daemonsets":             &appsv1.DaemonSetList{TypeMeta: metav1.TypeMeta{APIVersion: "apps/v1", Kind: "DaemonSetList"}},
		"events":                 &corev1.EventList{TypeMeta: v1("EventList")},
		"resourceclaims":         &resourceapi.ResourceClaimList{TypeMeta: resource("ResourceClaimList"), Items: []resourceapi.ResourceClaim{{ObjectMeta: named("weights")}}},
		"resourceclaimtemplates": &resourceapi.ResourceClaimTemplateList{TypeMeta: resource("ResourceClaimTemplateList")},
		"resourceslices": &resourceapi.ResourceSliceList{TypeMeta: resource("ResourceSliceList"), Items: []resourceapi.ResourceSlice{{Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: new("gpu-3"), Pool: resourceapi.ResourcePool{Name: "gpu-3", ResourceSliceCount: 1}, Devices: []resourceapi.Device{{Name: "gpu-0000-1b-00-0"}},
		}}}},
		"deviceclasses":    &resourceapi.DeviceClassList{TypeMeta: resource("DeviceClassList"), Items: []resourceapi.DeviceClass{{ObjectMeta: installed}}},
		"devicetaintrules": &resourceapi.DeviceTaintRuleList{TypeMeta: resource("DeviceTaintRuleList")},
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var answer any = version.Info{GitVersion: "v1.37.0", Major: "1", Minor: "37"}
		if r.URL.Path != "/version" {
			list, has := lists[filepath.Base(r.URL.Path)]
			if !has {
				http.NotFound(w, r)
				return
			}
			answer = list
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(answer)
	}))
	t.Cleanup(server.Close)
	config := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: here, contexts: [{name: here, context: {cluster: c}}, {name: there, context: {cluster: c}}],
clusters: [{name: c, cluster: {server: %q}}]}`, server.URL)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

func TestExitCodes(t *testing.T) {
	kubeconfig := cluster(t)
	for name, test := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string // parts
	}{
		"help":            {nil, 0, "See what GPUs are used for:", ""},
		"version flag":    {[]string{"--version"}, 0, "kubectl gpu version ", ""},
		"version":         {[]string{"version"}, 0, "\n", ""},
		"template":        {[]string{"tree", "-o", "jsonpath={.nodes[0].name}"}, 0, "gpu-3", ""},
		"nothing wrong":   {[]string{"tree"}, 0, "", ""},
		"found":           {[]string{"doctor"}, 2, "not installed", ""},
		"found, as JSON":  {[]string{"doctor", "-o", "json"}, 2, `"apiVersion": "kubectl.partage.dev/v1alpha1"`, ""},
		"unknown command": {[]string{"tre"}, 1, "", "Did you mean this?\n\ttree\n\ttop"},
		"unknown flag":    {[]string{"tree", "--al"}, 1, "", "unknown flag: --al; see kubectl gpu tree --help"},
		"unknown output":  {[]string{"tree", "-o", "xml"}, 1, "", "xml"},
		"unknown context": {[]string{"tree", "--context", "nowhere"}, 1, "", `context "nowhere" does not exist`},
		"no such GPU":     {[]string{"cordon", "gpu-1/0"}, 1, "", "has no devices of driver"},
		"no server":       {[]string{"tree", "--server", "http://127.0.0.1:1"}, 1, "", "error: list "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := program(t, "kubectl-gpu", kubeconfig, test.args...)
			if code != test.code || !strings.Contains(stdout, test.stdout) || !strings.Contains(stderr, test.stderr) {
				t.Errorf("exit code %d, want %d with %q and %q; stdout:\n%s\nstderr:\n%s", code, test.code, test.stdout, test.stderr, stdout, stderr)
			}
		})
	}
}

// TestCompletion calls the program as kubectl does.
func TestCompletion(t *testing.T) {
	kubeconfig := cluster(t)
	for name, test := range map[string]struct {
		args []string
		want []string
	}{
		"commands":   {[]string{"tr"}, []string{"tree\tShow what every GPU is used for, and what still fits"}},
		"nodes":      {[]string{"tree", ""}, []string{"gpu-1", "gpu-2"}},
		"not twice":  {[]string{"tree", "gpu-1", "gpu"}, []string{"gpu-2"}},
		"none":       {[]string{"tree", "x"}, nil},
		"output":     {[]string{"tree", "-o", ""}, []string{"json", "yaml", "wide", "name", "jsonpath=", "jsonpath-file=", "go-template=", "custom-columns="}},
		"GPUs":       {[]string{"cordon", "gpu-3"}, []string{"gpu-3/1b:00"}},
		"namespaces": {[]string{"tree", "-n", "t"}, []string{"team"}},
		"contexts":   {[]string{"tree", "--context", ""}, []string{"here", "there"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := program(t, "/somewhere/"+completer, kubeconfig, test.args...)
			// :4 says that no names of files are to be proposed.
			if want := strings.Join(append(test.want, ":4\n"), "\n"); code != 0 || stdout != want {
				t.Errorf("exit code %d\n%s\nwant\n%s\n%s", code, stdout, want, stderr)
			}
		})
	}
}

// TestExamples: the commands of all examples exist, with all their flags and arguments.
func TestExamples(t *testing.T) {
	commands, examples := newCommand(genericiooptions.IOStreams{Out: io.Discard, ErrOut: io.Discard}).Commands(), 0
	for _, c := range commands {
		if c.Name() == "help" {
			continue
		}
		text := c.Example
		for _, part := range c.Commands() {
			text += "\n" + part.Example
		}
		if c.Short == "" || c.Long == "" || strings.TrimSpace(text) == "" {
			t.Errorf("%s lacks one of Short, Long and Example", c.Name())
		}
		for line := range strings.Lines(text) {
			call, _, _ := strings.Cut(strings.TrimSpace(line), " #")
			call, _, _ = strings.Cut(call, " |")
			call, _, _ = strings.Cut(call, " >")
			call, is := strings.CutPrefix(strings.TrimSpace(call), "kubectl gpu ")
			if !is {
				continue
			}
			examples++
			if err := parses(strings.Fields(call)); err != nil {
				t.Errorf("kubectl gpu %s: %v", call, err)
			}
		}
	}
	if t.Logf("%d cases", examples); examples < len(commands) {
		t.Errorf("%d examples of %d commands", examples, len(commands))
	}
}

// parses finds the command of a call and gives it flags and arguments, without running it.
func parses(args []string) error {
	root := newCommand(genericiooptions.IOStreams{Out: io.Discard, ErrOut: io.Discard})
	c, rest, err := root.Find(args)
	if err != nil {
		return err
	}
	if c == root {
		return errors.New("names no command")
	}
	if err := c.ParseFlags(rest); err != nil {
		return err
	}
	return errors.Join(c.ValidateArgs(c.Flags().Args()), c.ValidateRequiredFlags(), c.ValidateFlagGroups())
}

// TestHelpIsShort: what all commands have is listed in few lines.
func TestHelpIsShort(t *testing.T) {
	root := newCommand(genericiooptions.IOStreams{Out: io.Discard, ErrOut: io.Discard})
	if got := strings.Count(root.PersistentFlags().FlagUsages(), "\n"); got != len(shownFlags) {
		t.Errorf("%d lines of flags, want %d:\n%s", got, len(shownFlags), root.PersistentFlags().FlagUsages())
	}
	if _, is := root.Annotations[cobra.CommandDisplayNameAnnotation]; !is {
		t.Error("help calls it by the name of the program")
	}
}
