// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package options

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// TestColor: a buffer and a file are no terminals.
func TestColor(t *testing.T) {
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	o := New(genericiooptions.NewTestIOStreamsDiscard())
	if o.Color() {
		t.Error("a buffer is coloured")
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if o.Out = file; o.Color() {
		t.Error("a file is coloured")
	}
}

const kubeconfig = `apiVersion: v1
kind: Config
current-context: here
contexts:
- name: here
  context: {cluster: c, namespace: team}
clusters:
- name: c
  cluster: {server: "http://127.0.0.1:1"}
`

func TestNamespace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(path, []byte(kubeconfig), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", path)
	for _, c := range []struct {
		args []string
		all  bool
		want string
	}{{nil, false, "team"}, {[]string{"-n", "other"}, false, "other"}, {nil, true, ""}} {
		o := New(genericiooptions.NewTestIOStreamsDiscard())
		flags := pflag.NewFlagSet("x", pflag.ContinueOnError)
		o.AddFlags(flags)
		if err := flags.Parse(c.args); err != nil {
			t.Fatal(err)
		}
		o.AllNamespaces = c.all
		if got, err := o.Namespace(); err != nil || got != c.want {
			t.Errorf("%v: %q, %v", c.args, got, err)
		}
		if _, err := o.Client(); err != nil {
			t.Errorf("%v: %v", c.args, err)
		}
	}
}

// TestKubeconfigThatIsMissing: the error says what could not be read.
func TestKubeconfigThatIsMissing(t *testing.T) {
	o := New(genericiooptions.NewTestIOStreamsDiscard())
	path := filepath.Join(t.TempDir(), "nothing")
	o.Config.KubeConfig = &path
	if _, err := o.Client(); err == nil {
		t.Error("there is a client")
	}
}

// TestRepeat: with -w until the context ends, and then it succeeds. What a command finds ends nothing.
func TestRepeat(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	o := New(genericiooptions.NewTestIOStreamsDiscard())
	o.Watch, o.Interval = true, time.Millisecond
	shown := 0
	err := o.Repeat(ctx, func() error {
		if shown++; shown == 3 {
			cancel()
			return ctx.Err()
		}
		return ErrFound
	})
	if err != nil || shown != 3 {
		t.Errorf("%v, shown %d times", err, shown)
	}
	o.Interval = 0
	if err := o.Repeat(t.Context(), nil); err == nil || !strings.HasPrefix(err.Error(), "--interval 0s: ") {
		t.Error(err)
	}
}
