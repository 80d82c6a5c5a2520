// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/partage-dev/partage/pkg/util/panics"
)

// Of two claims, and of the kernel.
const (
	own   = "0b6f4f5e-0000-4000-8000-000000000001"
	other = "0b6f4f5e-0000-4000-8000-000000000002"
	boot  = "5e0c3f5e-0000-4000-8000-000000000003"
)

// TestErrorsForTenants: the event of a pod names claims, pods and processes of its own namespace only, and has no UID but the claim's.
func TestErrorsForTenants(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"device gpu-1 overlaps with gpu-1-mps, which is prepared for claim team/a (" + other[:8] + ")": "device gpu-1 overlaps with gpu-1-mps, which is prepared for claim team/a (0b6f4f5e)",
		"device gpu-1 overlaps with gpu-1-mps, which is prepared for claim team/a (" + other + ")":     "device gpu-1 overlaps with gpu-1-mps, which is prepared for claim team/a ((another UID))",
		"device gpu-1 overlaps with gpu-1-mps, which is prepared for claim victim/a (" + other + ")":   "device gpu-1 overlaps with gpu-1-mps, which is prepared for a claim of another namespace",
		"device gpu-1 overlaps with gpu-1-mps, which is prepared for claim victim/a (0b6f4f5e-0000-4…": "device gpu-1 overlaps with gpu-1-mps, which is prepared for a claim of another namespace",
		"has 4 shares and all are taken, one of them by claim victim/a.b (" + other + ")":              "has 4 shares and all are taken, one of them by a claim of another namespace",
		"in use: process 1 (a, pod team/x, container 01), process 2 (b, pod victim/y, container 02, has /dev/nvidia0 open), process 3 (has ended, its memory is still held), process 4 (nginx)": "in use: " +
			"process 1 (a, pod team/x, container 01), a process of a pod that is not named here, process 3 (has ended, its memory is still held), process 4 (nginx)",
		"in use: process 5 (c, pod with UID 4711, container 01)":                                                       "in use: a process of a pod that is not named here",
		"in use: process 5 (c, pod victim/secret, contai… (cut)":                                                       "in use: a process of a pod that is not named here",
		`in use: process 5 ("a) pod team/", pod victim/y, container 02), process 6 ("pod \"team/", pod with UID 4711)`: "in use: a process of a pod that is not named here, a process of a pod that is not named here",
		"claim victim/a (pods x-0, x-1) has device gpu-0 of another driver":                                            "a claim of another namespace has device gpu-0 of another driver",
		"claim victim/a: no":                         "a claim of another namespace: no",
		"claim " + other + " has no record any more": "claim (another UID) has no record any more",
		"claim " + own + " has no record any more":   "claim " + own + " has no record any more",
		"may be in use by a claim whose record cannot be read (/data/records/" + other + "." + boot + "): drain the node": "may be in use by a claim whose record cannot be read (what the driver's log names): drain the node",
		"record of claim " + own + ": /data/records/" + own + "." + boot + " cannot be read":                              "record of claim " + own + ": /data/records/" + own + "." + boot + " cannot be read",
		"CDI spec /var/run/cdi/k8s.gpu.nvidia.com-claim_" + other + ".json: open: no space left on device":                "CDI spec what the driver's log names: open: no space left on device",
		"remove /var/lib/kubelet/plugins/gpu.nvidia.com/claims/" + other + ".json":                                        "remove what the driver's log names",
		"k8s.gpu.nvidia.com/claim=" + other + "-gpu-0 is named twice":                                                     "what the driver's log names is named twice",
		"GPU-" + other + " and MIG-" + other + " at 0000:1b:00.0 of gpu-0000-1b-00-0 do not answer":                       "GPU-" + other + " and MIG-" + other + " at 0000:1b:00.0 of gpu-0000-1b-00-0 do not answer",
		"mount \x1b[31m\u202e\nall": `mount \x1b[31m\u202e; all`,
	} {
		err := Error(errors.Join(errors.New(text)), "team", own)
		if got := err.Error(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		for _, secret := range []string{"victim", "secret"} {
			if got := Text(text, "", "", 1000); strings.Contains(got, secret) || strings.Contains(got, own) {
				t.Errorf("for users of several claims: %s", got)
			}
		}
	}
	if err := Error(nil, "team", own); err != nil {
		t.Error(err)
	}
}

// TestHostileNames: no name that a tenant gives a program, a claim or a pod lets a name of another namespace pass beside it.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	owns := []string{
		"claim team/a (" + own + ")", "process 1 (a, pod team/x, container 01)", `process 1 ("process 2 (b", pod team/x, container 01)`, "claim team/process (" + own + ")",
		`process 1 ("\", pod team/", pod team/x)`, `process 1 ("claim team/", pod team/x, has /dev/nvidia0 open)`, "process 1 (team/x, pod team/pod)", `process 1 (")", pod team/x)`,
	}
	victims := []string{
		"claim victim/a (" + other + ")", "claim victim/a.b", "process 3 (c, pod victim/y, container 02)", `process 3 ("c (", pod victim/y)`, "claim victim/a (pods victim-0, victim-1)",
		"/run/x/" + other + ".json", "process 3 (pod, pod victim/y, has /dev/nvidia0 open)", "process 3 (team/x, pod victim/y)", `process 3 (", pod team/x", pod victim/y)`,
	}
	cases := 0
	for _, mine := range owns {
		for _, victim := range victims {
			for _, between := range []string{", ", " ", "; ", ": in use: ", " (", ""} {
				for _, text := range []string{mine + between + victim, victim + between + mine, mine + between + victim + between + mine} {
					cases++
					if got := Text(text, "team", own, 1000); strings.Contains(got, "victim") || strings.Contains(got, other) {
						t.Errorf("%s\nbecomes %s", text, got)
					}
				}
			}
		}
	}
	if cases != len(owns)*len(victims)*18 {
		t.Errorf("%d cases", cases)
	}
}

// TestDefect: a panic may say anything of anybody.
func TestDefect(t *testing.T) {
	t.Parallel()
	fail := func() (err error) {
		defer panics.Recover(t.Context(), &err)
		panic(errors.New("{UID:x Namespace:victim Name:secret}"))
	}
	err := Error(fmt.Errorf("claim team/a: %w", fail()), "team", own)
	if got := err.Error(); got != "internal error in the driver: the log of the driver's pod on this node has it" {
		t.Error(got)
	}
}

// TestFormsOfClaims: every text of the packages whose errors the kubelet gets says "claim" before the name or the UID of a claim, so that
// Text finds it.
func TestFormsOfClaims(t *testing.T) {
	t.Parallel()
	claims, verb := regexp.MustCompile(`\b(Claim|Claim\.UID|uid|of\.Name|first\.Name|c\.Name|Ref\(.*\)|other)$`), regexp.MustCompile(`%[+#]?[svdqwT]`)
	found := 0
	look := func(file *ast.File, at *token.FileSet) {
		ast.Inspect(file, func(n ast.Node) bool {
			call, is := n.(*ast.CallExpr)
			if !is {
				return true
			}
			format := slices.IndexFunc(call.Args, func(arg ast.Expr) bool {
				text, is := arg.(*ast.BasicLit)
				return is && text.Kind == token.STRING && verb.MatchString(text.Value)
			})
			if format < 0 {
				return true
			}
			text := types.ExprString(call.Args[format])
			if text == `"%s %d %+v"` {
				return true // the name of a task, which nobody reads
			}
			for i, place := range verb.FindAllStringIndex(text, -1) {
				if format+1+i >= len(call.Args) || !claims.MatchString(types.ExprString(call.Args[format+1+i])) {
					continue
				}
				if found++; !strings.HasSuffix(text[:place[0]], "claim ") && !strings.HasSuffix(text[:place[0]], "claim UID ") {
					t.Errorf("%s: %q does not say that it is a claim", at.Position(call.Pos()), text)
				}
			}
			return true
		})
	}
	for _, folder := range []string{"../../../claim", "../../../partition", "../../../unclaimed", "../.."} {
		if err := filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			at := token.NewFileSet()
			file, err := parser.ParseFile(at, path, nil, 0)
			if err == nil {
				look(file, at)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	if t.Logf("%d cases", found); found < 12 {
		t.Errorf("only %d texts name claims", found)
	}
}
