// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package printer writes what a command found, in the format that the user asked for: a view
// for people, or a versioned object for programs.
package printer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/util/jsonpath"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/kubectl/options"
)

// Width is where lines of sentences end unless the output is wide.
const Width = 80

// APIVersion is that of all objects that commands print.
const APIVersion = "kubectl.partage.dev/v1alpha1"

// TypeMeta returns what an object of the given kind begins with. Embed it with the tag
// `json:",inline"`.
func TypeMeta(kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: APIVersion, Kind: kind}
}

// View is how people see an object: a Table or a Text.
type View interface {
	// Write writes it in the given format.
	Write(w io.Writer, f Format) error
	// Names returns what -o name prints, such as "resourceclaim.resource.k8s.io/training".
	Names() []string
}

// Print writes an object to the output: as JSON or YAML, or its view.
func Print(o *options.Options, object any, view View) error {
	format := Format{Color: o.Color(), Wide: o.Output == options.OutputWide, NoHeaders: o.NoHeaders}
	if !format.Wide {
		format.Width = Width
	}
	switch o.Output {
	case "", options.OutputWide:
		return view.Write(o.Out, format)
	case options.OutputName:
		for _, name := range view.Names() {
			if _, err := fmt.Fprintln(o.Out, name); err != nil {
				return err
			}
		}
		return nil
	case options.OutputJSON, options.OutputYAML:
		data, err := encoded(object)
		if err == nil && o.Output == options.OutputYAML {
			data, err = asYAML(data)
		}
		if err == nil {
			_, err = o.Out.Write(data)
		}
		return err
	default:
		return printTemplate(o, object)
	}
}

// printTemplate prints what a template or columns choose of an object.
func printTemplate(o *options.Options, object any) error {
	data, err := encoded(object)
	if err != nil {
		return err
	}
	var generic unstructured.Unstructured
	// That of encoding/json would make floating-point numbers of sizes in bytes.
	if err := utiljson.Unmarshal(data, &generic.Object); err != nil {
		return fmt.Errorf("decode a %T: %w", object, err)
	}
	if spec, is := strings.CutPrefix(o.Output, options.CustomColumns); is {
		return printColumns(o, spec, generic.Object)
	}
	template, err := genericclioptions.NewKubeTemplatePrintFlags().ToPrinter(o.Output)
	if genericclioptions.IsNoCompatiblePrinterError(err) {
		return fmt.Errorf("-o %s: the output format must be one of %s", o.Output, strings.Join(options.Outputs(), ", "))
	}
	if err == nil {
		err = template.PrintObj(&generic, o.Out)
	}
	if err != nil {
		return fmt.Errorf("-o %s: %w", o.Output, err)
	}
	return nil
}

// printColumns prints columns as kubectl does, of each of the items or, where there are none, of the object. cli-runtime has no printer for them.
func printColumns(o *options.Options, spec string, object map[string]any) error {
	rows, is := object["items"].([]any)
	if !is {
		rows = []any{object}
	}
	table := &Table{Rows: make([]Row, len(rows))}
	for column := range strings.SplitSeq(spec, ",") {
		name, path, has := strings.Cut(column, ":")
		find := jsonpath.New(name).AllowMissingKeys(true)
		if err := find.Parse("{." + strings.TrimLeft(strings.Trim(path, "{}"), ".") + "}"); err != nil || !has {
			return fmt.Errorf("-o %s%s: %q must be NAME:.field: %w", options.CustomColumns, spec, column, cmp.Or(err, errors.New("it has no field")))
		}
		table.Columns = append(table.Columns, Column{Name: name})
		for i, row := range rows {
			results, err := find.FindResults(row)
			if err != nil {
				return fmt.Errorf("-o %s%s: %w", options.CustomColumns, spec, err)
			}
			var texts []string
			for _, list := range results {
				for _, value := range list {
					texts = append(texts, fmt.Sprint(value.Interface()))
				}
			}
			table.Rows[i].Cells = append(table.Rows[i].Cells, cmp.Or(strings.Join(texts, ","), "<none>"))
		}
	}
	return table.Write(o.Out, Format{NoHeaders: o.NoHeaders})
}

// encoded returns an object as JSON in which characters that a terminal may obey are escaped.
func encoded(object any) ([]byte, error) {
	var data, safe bytes.Buffer
	encoder := json.NewEncoder(&data)
	encoder.SetIndent("", "    ")
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(object); err != nil {
		return nil, fmt.Errorf("encode a %T: %w", object, err)
	}
	for _, r := range data.String() {
		if controls(r) {
			fmt.Fprintf(&safe, `\u%04x`, r)
			continue
		}
		safe.WriteRune(r)
	}
	return safe.Bytes(), nil
}

// asYAML returns JSON as YAML. Where YAML would not escape what a terminal may obey it stays JSON, which is YAML, too.
func asYAML(data []byte) ([]byte, error) {
	out, err := yaml.JSONToYAML(data)
	if err != nil || bytes.ContainsFunc(out, controls) {
		return data, err
	}
	return out, nil
}

func controls(r rune) bool { return r != '\n' && options.Controls(r) }
