// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package printer

import (
	"bytes"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

type list struct {
	metav1.TypeMeta `json:",inline"`

	Items []string `json:"items"`
	Ratio float64  `json:"ratio"`
}

func example() (list, *Table) {
	return list{TypeMeta: TypeMeta("ExampleList"), Items: []string{"a<b"}, Ratio: 0.5}, &Table{
		Columns: append(Columns("name", "state"), Column{Name: "node", Wide: true}),
		Rows: []Row{
			{Cells: []string{"one", "ok", "n1"}, Name: "example/one"},
			{Cells: []string{"another", "bad\x1b[2J\nsecond line", "n2"}, Style: Bad},
		},
		Empty: "No examples found.",
	}
}

func TestPrint(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ output, want string }{
		{"", "NAME      STATE\none       ok\nanother   bad^[[2J...\n"},
		{"wide", "NAME      STATE         NODE\none       ok            n1\nanother   bad^[[2J...   n2\n"},
		{"name", "example/one\n"},
		{"json", "{\n    \"kind\": \"ExampleList\",\n    \"apiVersion\": \"kubectl.partage.dev/v1alpha1\",\n    \"items\": [\n        \"a<b\"\n    ],\n    \"ratio\": 0.5\n}\n"},
		{"jsonpath={.items[0]} {.ratio}", "a<b 0.5"},
		{"go-template={{.kind}}", "ExampleList"},
		{"custom-columns=NAME:{.name},HELD BY:pods[*].name", "NAME   HELD BY\nx      a,b^[[2J\ny      <none>\n"},
		{"yaml", "apiVersion: kubectl.partage.dev/v1alpha1\nitems:\n- a<b\nkind: ExampleList\nratio: 0.5\n"},
	} {
		t.Run(c.output, func(t *testing.T) {
			t.Parallel()
			streams, _, out, _ := genericiooptions.NewTestIOStreams()
			o := options.New(streams)
			o.Output = c.output
			example, table := example()
			var object any = example
			if strings.HasPrefix(c.output, "custom-columns") {
				object = map[string]any{"items": []any{map[string]any{"name": "x", "pods": []any{map[string]any{"name": "a"}, map[string]any{"name": "b\x1b[2J"}}}, map[string]any{"name": "y"}}}
			}
			if err := Print(o, object, table); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, out.String()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestPrintFails(t *testing.T) {
	t.Parallel()
	object, table := example()
	notANumber := object
	notANumber.Ratio = math.NaN()
	for _, c := range []struct {
		name, output, want string
		object             list
	}{
		{"format", "xml", "-o xml: the output format must be one of json, yaml, wide, name, jsonpath=, ", object},
		{"template", "jsonpath={.x", "-o jsonpath={.x: ", object},
		{"columns", "custom-columns=NAME", `"NAME" must be NAME:.field`, object},
		{"a column", "custom-columns=NAME:.a[", `"NAME:.a[" must be NAME:.field`, object},
		{"json", "json", "encode a printer.list: json: unsupported value: NaN", notANumber},
		{"yaml", "yaml", "encode a printer.list", notANumber},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			o := options.New(genericiooptions.NewTestIOStreamsDiscard())
			o.Output = c.output
			if err := Print(o, c.object, table); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestFlag: a format that does not exist is refused before the command does anything.
func TestFlag(t *testing.T) {
	t.Parallel()
	o := options.New(genericiooptions.NewTestIOStreamsDiscard())
	ran := false
	c := &cobra.Command{Use: "x", SilenceErrors: true, SilenceUsage: true, Run: func(*cobra.Command, []string) { ran = true }}
	o.AddOutputFlag(c)
	c.SetArgs([]string{"-o", "xml"})
	const want = `invalid argument "xml" for "-o, --output" flag: it must be one of json, yaml, wide, name, jsonpath=, jsonpath-file=, go-template=, custom-columns=`
	if err := c.Execute(); err == nil || err.Error() != want || ran {
		t.Errorf("%v, ran %v", err, ran)
	}
	c.SetArgs([]string{"-o", "yaml"})
	if err := c.Execute(); err != nil || !ran || o.Output != options.OutputYAML {
		t.Errorf("%v, ran %v, output %q", err, ran, o.Output)
	}
}

// TestNoHeaders: scripts read the rows only, and colours stay with theirs.
func TestNoHeaders(t *testing.T) {
	t.Parallel()
	_, table := example()
	var out bytes.Buffer
	if err := table.Write(&out, Format{Color: true, NoHeaders: true}); err != nil {
		t.Fatal(err)
	}
	if want := "one       ok\n\x1b[31manother   bad^[[2J...\x1b[0m\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}

func TestTableWithColors(t *testing.T) {
	t.Parallel()
	_, table := example()
	var out bytes.Buffer
	if err := table.Write(&out, Format{Color: true}); err != nil {
		t.Fatal(err)
	}
	want := "NAME      STATE\none       ok\n\x1b[31manother   bad^[[2J...\x1b[0m\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestEmptyTable(t *testing.T) {
	t.Parallel()
	_, table := example()
	table.Rows = nil
	var out bytes.Buffer
	if err := table.Write(&out, Format{}); err != nil || out.String() != "No examples found.\n" {
		t.Errorf("%v, %q", err, out.String())
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	failure := errors.New("the pipe is closed")
	text := &Text{Named: []string{"node/a"}, Render: func(*bytes.Buffer, Format) error { return failure }}
	o := options.New(genericiooptions.NewTestIOStreamsDiscard())
	if err := Print(o, nil, text); !errors.Is(err, failure) {
		t.Error(err)
	}
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	o = options.New(streams)
	o.Output = options.OutputName
	if err := Print(o, nil, text); err != nil || out.String() != "node/a\n" {
		t.Errorf("%v, %q", err, out.String())
	}
}

func TestBytes(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{1: "1Mi", 1 << 20: "1Mi", 5952 << 20: "5.8Gi", 80 << 30: "80Gi", 900 << 20: "900Mi"} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}

func TestUnknown(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]string{
		"---": BytesOrUnknown(nil) + PercentOrUnknown(nil) + SecondsOrUnknown(nil), "0": BytesOrUnknown(new(int64(0))), "50%": PercentOrUnknown(new(0.5)), "90s": SecondsOrUnknown(new(90.0)),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestProgramsGetWhatIsThere: JSON and YAML say what others wrote, such that no terminal obeys it.
func TestProgramsGetWhatIsThere(t *testing.T) {
	t.Parallel()
	hostile := "a\x1b[31m\u202e\u009b2J\x7f\u2066 é"
	for _, format := range []string{options.OutputJSON, options.OutputYAML} {
		streams, _, out, _ := genericiooptions.NewTestIOStreams()
		o := options.New(streams)
		o.Output = format
		if err := Print(o, map[string]string{"message": hostile}, nil); err != nil {
			t.Fatal(err)
		}
		if strings.ContainsAny(out.String(), "\x1b\u202e\u009b\x7f\u2066\ufffd") || !strings.Contains(out.String(), "é") {
			t.Errorf("-o %s: %q", format, out.String())
		}
		var got map[string]string
		if err := yaml.Unmarshal(out.Bytes(), &got); err != nil || got["message"] != hostile {
			t.Errorf("-o %s: %q, %v", format, got, err)
		}
	}
}

// TestViewsAreSafe: what others wrote is no style, on whatever it is written.
func TestViewsAreSafe(t *testing.T) {
	t.Parallel()
	const hostile = "\x1b[31mred\u202e"
	for _, view := range []View{
		&Table{Columns: Columns("name"), Rows: []Row{{Cells: []string{hostile}}}},
		&Text{Render: func(w *bytes.Buffer, f Format) error {
			_, err := io.WriteString(w, f.Paint(Good, hostile))
			return err
		}},
	} {
		var out bytes.Buffer
		if err := view.Write(&out, Format{Color: true}); err != nil || strings.Contains(out.String(), "\x1b[31m") || strings.Contains(out.String(), "\u202e") {
			t.Errorf("%q, %v", out.String(), err)
		}
	}
}

// TestStylesAreWritten: what commands write goes through options.Safe, which leaves the styles.
func TestStylesAreWritten(t *testing.T) {
	t.Parallel()
	for _, style := range []Style{Good, Warn, Bad, Faint, Bold, "96"} {
		want := "\x1b[" + string(style) + "mtext\x1b[0m"
		var out bytes.Buffer
		if _, err := options.Safe(&out).Write([]byte(Format{Color: true}.Paint(style, "text"))); err != nil || out.String() != want {
			t.Errorf("%q, want %q, %v", out.String(), want, err)
		}
	}
}

// TestNumbers: columns and templates print numbers of bytes as they are, and not as 8.589934592e+10.
func TestNumbers(t *testing.T) {
	t.Parallel()
	for output, want := range map[string]string{
		"custom-columns=B:.b,R:.r": "B             R\n85899345920   0.5\n", "jsonpath={.b} {.r}": "85899345920 0.5", "go-template={{.b}} {{.r}}": "85899345920 0.5",
	} {
		streams, _, out, _ := genericiooptions.NewTestIOStreams()
		o := options.New(streams)
		o.Output = output
		if err := Print(o, map[string]any{"b": int64(80) << 30, "r": 0.5}, nil); err != nil || out.String() != want {
			t.Errorf("%s: %q, %v", output, out.String(), err)
		}
	}
}

// TestAge: an event that a tenant, or a clock that is ahead, has dated later than now.
func TestAge(t *testing.T) {
	for age, want := range map[time.Duration]string{-time.Hour: "0s", 0: "0s", 90 * time.Second: "90s", 3 * time.Hour: "3h"} {
		if got := Age(age); got != want {
			t.Errorf("%s: got %s, want %s", age, got, want)
		}
	}
}
