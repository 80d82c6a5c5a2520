// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

// kinds are the objects that pages name, as kubectl takes them.
var kinds = strings.Fields(`
	all cm configmap configmaps clusterrolebinding clusterrole controllerrevisions crd daemonset daemonsets deployment deployments deviceclass
	deviceclasses devicetaintrule devicetaintrules event events ingress job jobs limitrange namespace namespaces networkpolicies
	node nodes pod pods resourceclaim resourceclaims resourceclaimtemplate resourceclaimtemplates resourcequota resourcequotas
	resourceslice resourceslices role rolebinding secret secrets service services serviceaccount statefulset statefulsets
	validatingadmissionpolicies validatingadmissionpolicy validatingadmissionpolicybinding validatingadmissionpolicybindings
	clusterpolicy clusterpolicies rayclusters raycluster rayservice workloads nodepool nodepools nodeclaims`)

// verbs are commands of kubectl, and whether a kind follows.
var verbs = map[string]bool{
	"annotate": true, "delete": true, "describe": true, "edit": true, "get": true, "label": true, "patch": true, "wait": true,
	"api-resources": false, "apply": false, "auth": false, "cordon": false, "create": false, "debug": false, "drain": false, "events": false,
	"exec": false, "explain": false, "gpu": false, "krew": false, "logs": false, "options": false, "partage": false, "port-forward": false,
	"replace": false, "rollout": false, "scale": false, "taint": false, "top": false, "uncordon": false, "version": false,
}

// kubectlFlags are those of kubectl that pages use, of whichever command.
func kubectlFlags() *pflag.FlagSet {
	f := pflag.NewFlagSet("kubectl", pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	for _, name := range []string{
		"as", "clusterrole", "context", "field-selector", "filename:f", "for", "from-file", "grace-period", "group", "image", "kubeconfig",
		"manifest-url", "namespace:n", "output:o", "patch:p", "profile", "replicas", "selector:l", "serviceaccount", "since", "tail", "target", "timeout",
		"type", "container:c", "sort-by", "label-columns:L", "subresource",
	} {
		long, short, _ := strings.Cut(name, ":")
		f.StringArrayP(long, short, nil, "")
	}
	for _, name := range []string{
		"all", "all-containers", "all-namespaces:A", "delete-emptydir-data", "follow", "force", "ignore-daemonsets", "no-headers", "overwrite",
		"prefix", "previous", "show-labels", "show-managed-fields", "stdin:i", "tty:t", "watch:w", "server-side", "dry-run", "ignore-not-found", "now", "wait",
	} {
		long, short, _ := strings.Cut(name, ":")
		f.BoolP(long, short, false, "")
	}
	f.Lookup("dry-run").NoOptDefVal = "true"
	return f
}

// checkKubectl: the command, its flags and kinds of objects exist. kubectl itself is no
// dependency of this module, so what pages use is listed above.
func checkKubectl(args []string) []string {
	if len(args) > 0 && args[0] == "gpu" {
		return nil
	}
	f := kubectlFlags()
	if err := f.Parse(args); err != nil && !strings.Contains(err.Error(), "flag needs an argument") {
		return []string{err.Error()}
	}
	rest := f.Args()
	if len(rest) == 0 {
		return nil
	}
	takesKind, known := verbs[rest[0]]
	if !known {
		return []string{"kubectl has no command " + rest[0]}
	}
	if !takesKind || len(rest) < 2 {
		return nil
	}
	var wrong []string
	for name := range strings.SplitSeq(rest[1], ",") {
		name, _, _ = strings.Cut(name, "/")
		if !slices.Contains(kinds, name) && strings.ToUpper(name) != name {
			wrong = append(wrong, name+" is no kind of object that is known here")
		}
	}
	return wrong
}

// checkHelm: the command and its flags exist, and values that are set are the chart's.
func (r repository) checkHelm(args []string) []string {
	f := pflag.NewFlagSet("helm", pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	set := f.StringArray("set", nil, "")
	asString := f.StringArray("set-string", nil, "")
	for _, name := range []string{"namespace:n", "values:f", "version", "set-file", "kube-version", "api-versions", "output:o", "wait", "timeout", "revision"} {
		long, short, _ := strings.Cut(name, ":")
		f.StringArrayP(long, short, nil, "")
	}
	f.Lookup("wait").NoOptDefVal = "watcher"
	for _, name := range []string{"create-namespace", "install", "no-hooks", "reuse-values", "reset-values", "reset-then-reuse-values", "all", "dry-run"} {
		f.Bool(name, false, "")
	}
	f.Lookup("dry-run").NoOptDefVal = "true"
	if err := f.Parse(args); err != nil && !strings.Contains(err.Error(), "flag needs an argument") {
		return []string{err.Error()}
	}
	rest := f.Args()
	if len(rest) == 0 {
		return nil
	}
	if !slices.Contains(strings.Fields("get history install list pull repo rollback show status template uninstall upgrade"), rest[0]) {
		return []string{"helm has no command " + rest[0]}
	}
	if !slices.ContainsFunc(rest, func(arg string) bool { return strings.HasSuffix(arg, "/partage") }) {
		return nil // another chart, or none
	}
	var wrong []string
	values := map[string]any{}
	for _, assignments := range slices.Concat(*set, *asString) {
		for assignment := range strings.SplitSeq(assignments, ",") {
			name, value, _ := strings.Cut(assignment, "=")
			if !hasValue(r.values, name) {
				wrong = append(wrong, "the chart has no value "+name)
				continue
			}
			setValue(values, name, value, slices.Contains(*asString, assignments))
		}
	}
	if err := checkValues(r, values); err != nil && len(wrong) == 0 {
		wrong = append(wrong, err.Error())
	}
	return wrong
}

// setValue puts what follows --set into values, as helm does: numbers and booleans are what they look like.
func setValue(values map[string]any, name, text string, isString bool) {
	section, keys := values, strings.Split(name, ".")
	for _, key := range keys[:len(keys)-1] {
		inner, has := section[key].(map[string]any)
		if !has {
			inner = map[string]any{}
			section[key] = inner
		}
		section = inner
	}
	var value any
	if err := yaml.Unmarshal([]byte(text), &value); err != nil || isString {
		value = text
	}
	section[keys[len(keys)-1]] = value
}

// clusterWords returns the sub-commands of bin/cluster and the flags of all of them. Its module
// is not this one's, so they are read from the source.
func clusterWords(t *testing.T) (commands, flags map[string]bool) {
	t.Helper()
	commands, flags = map[string]bool{"help": true}, map[string]bool{"help": true}
	constants, names := map[string]string{}, map[string][]ast.Expr{}
	for _, folder := range []string{"app", "boot"} {
		paths, err := filepath.Glob(filepath.Join(root, "test/cluster/internal", folder, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(file, func(node ast.Node) bool {
				gather(node, constants, names)
				return true
			})
		}
	}
	for kind, expressions := range names {
		for _, e := range expressions {
			into := flags
			if kind == "Command" {
				into = commands
			}
			switch e := e.(type) {
			case *ast.BasicLit:
				into[unquote(e.Value)] = true
			case *ast.Ident:
				into[constants[e.Name]] = true
			}
		}
	}
	// powerCommand has its names from the package boot.
	for _, turn := range []string{"Off", "On", "Reboot"} {
		commands[constants[turn]] = true
	}
	return commands, flags
}

// gather collects constants, and the names in literals of a type such as cli.Command.
func gather(node ast.Node, constants map[string]string, names map[string][]ast.Expr) {
	switch n := node.(type) {
	case *ast.ValueSpec:
		for i, name := range n.Names {
			if i < len(n.Values) {
				if literal, is := n.Values[i].(*ast.BasicLit); is && literal.Kind == token.STRING {
					constants[name.Name] = unquote(literal.Value)
				}
			}
		}
	case *ast.CompositeLit:
		typ, is := n.Type.(*ast.SelectorExpr)
		if !is {
			return
		}
		for _, element := range n.Elts {
			pair, is := element.(*ast.KeyValueExpr)
			if !is {
				continue
			}
			if key, is := pair.Key.(*ast.Ident); is && key.Name == "Name" {
				names[typ.Sel.Name] = append(names[typ.Sel.Name], pair.Value)
			}
		}
	}
}

func unquote(literal string) string {
	text, err := strconv.Unquote(literal)
	if err != nil {
		return literal
	}
	return text
}
