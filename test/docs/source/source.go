// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package source reads what the documentation needs of Go's own sources: constants and the
// fields of structs, with their comments.
package source

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// Constant is a string constant.
type Constant struct{ Name, Value, Doc string }

// Field is a field of a struct.
type Field struct {
	// Name is that in JSON, or empty for an embedded struct.
	Name string
	// Optional says that it may be left out.
	Optional bool
	// Type is the Go type, Doc the comment in one paragraph.
	Type, Doc string
}

// Files parses the Go files of a folder, without its tests.
func Files(t *testing.T, folder string) []*ast.File {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, e := range entries {
		if e.IsDir() || !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(folder, e.Name()), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	if len(files) == 0 {
		t.Fatalf("%s has no Go files", folder)
	}
	return files
}

// Constants are the string constants that the files declare with a type, in order. An empty
// type stands for constants without one.
func Constants(files []*ast.File, typeName string) []Constant {
	var all []Constant
	for _, s := range specs[*ast.ValueSpec](files, token.CONST) {
		if typeOf(s.Type) != typeName {
			continue
		}
		for i, name := range s.Names {
			if i >= len(s.Values) {
				continue
			}
			if value, is := text(s.Values[i]); is {
				all = append(all, Constant{name.Name, value, sentence(s.Doc)})
			}
		}
	}
	return all
}

// Fields are the fields of a struct of the files, in order.
func Fields(t *testing.T, files []*ast.File, typeName string) []Field {
	t.Helper()
	var all []Field
	for _, s := range specs[*ast.TypeSpec](files, token.TYPE) {
		structure, is := s.Type.(*ast.StructType)
		if s.Name.Name != typeName || !is {
			continue
		}
		for _, f := range structure.Fields.List {
			var tag string
			if f.Tag != nil {
				tag, _ = text(f.Tag)
			}
			name, options, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
			all = append(all, Field{Name: name, Optional: strings.Contains(options, "omitempty"), Type: typeOf(f.Type), Doc: sentence(f.Doc)})
		}
	}
	if len(all) == 0 {
		t.Fatalf("there is no struct %s", typeName)
	}
	return all
}

// Names are those that a list consists of, or the values of a map, which is the value of a variable.
func Names(files []*ast.File, variable string) []string {
	var names []string
	for _, s := range specs[*ast.ValueSpec](files, token.VAR) {
		if s.Names[0].Name != variable || len(s.Values) == 0 {
			continue
		}
		list, is := s.Values[0].(*ast.CompositeLit)
		if !is {
			continue
		}
		for _, e := range list.Elts {
			if pair, is := e.(*ast.KeyValueExpr); is {
				e = pair.Value
			}
			names = append(names, typeOf(e))
		}
	}
	return names
}

// specs are the declarations of a kind.
func specs[T ast.Spec](files []*ast.File, kind token.Token) []T {
	var all []T
	for _, file := range files {
		for _, d := range file.Decls {
			general, is := d.(*ast.GenDecl)
			if !is || general.Tok != kind {
				continue
			}
			for _, s := range general.Specs {
				one, is := s.(T)
				if !is {
					continue
				}
				// The comment of a declaration without parentheses is not its spec's.
				if v, is := any(one).(*ast.ValueSpec); is && v.Doc == nil && !general.Lparen.IsValid() {
					v.Doc = general.Doc
				}
				all = append(all, one)
			}
		}
	}
	return all
}

// typeOf is a type, or another name, as Go writes it, without the packages of names.
func typeOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.StarExpr:
		return "*" + typeOf(e.X)
	case *ast.MapType:
		return "map[" + typeOf(e.Key) + "]" + typeOf(e.Value)
	case *ast.ArrayType:
		return "[]" + typeOf(e.Elt)
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

func text(e ast.Expr) (string, bool) {
	literal, is := e.(*ast.BasicLit)
	if !is || literal.Kind != token.STRING {
		return "", false
	}
	value, err := strconv.Unquote(literal.Value)
	return value, err == nil
}

// sentence is a comment without its line breaks.
func sentence(group *ast.CommentGroup) string { return strings.Join(strings.Fields(group.Text()), " ") }
