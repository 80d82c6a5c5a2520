// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"slices"
	"strings"
	"sync"

	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
)

// attributes are those whose values decide what an expression is.
type attributes struct {
	// all means that every value may: the expression looks at attributes by computed names.
	all bool
	// ids are names without their domains.
	ids sets.Set[string]
}

func (a attributes) needs(name resourceapi.QualifiedName) bool {
	return a.all || a.ids.Has(identifier(string(name)))
}

// identifier returns a qualified name without its domain.
func identifier(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// selectorCache knows which attributes expressions look at.
type selectorCache struct {
	cel   *cel.Cache
	mu    sync.Mutex
	known map[string]attributes
}

func newSelectorCache(c *cel.Cache) *selectorCache {
	return &selectorCache{cel: c, known: map[string]attributes{}}
}

func (c *selectorCache) attributesOf(expression string) attributes {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a, has := c.known[expression]; has {
		return a
	}
	a := attributesOf(c.cel.GetOrCompile(expression))
	c.known[expression] = a
	return a
}

// takeMaps are functions that use nothing of a map but the entry that is asked for, or the keys
// that all devices of equal content have in common.
var takeMaps = []string{operators.Index, operators.OptIndex, operators.OptSelect, operators.In, "size"}

// attributesOf finds the attributes of an expression in its syntax tree. What it cannot follow,
// such as a loop over attributes, makes all of them needed.
func attributesOf(compiled cel.CompilationResult) attributes {
	if compiled.Error != nil {
		return attributes{all: true}
	}
	checked, issues := compiled.Environment.Compile(compiled.Expression)
	if issues.Err() != nil {
		return attributes{all: true}
	}
	tree := checked.NativeRep()
	needed := attributes{ids: sets.New[string]()}
	isMap := func(e ast.Expr) bool { return tree.GetType(e.ID()).Kind() == types.MapKind }
	ast.PreOrderVisit(tree.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		switch e.Kind() {
		case ast.SelectKind:
			needed.ids.Insert(e.AsSelect().FieldName())
		case ast.LiteralKind:
			if text, is := e.AsLiteral().Value().(string); is {
				needed.ids.Insert(text)
			}
		case ast.ComprehensionKind, ast.MapKind:
			needed.all = true
		case ast.CallKind:
			needed.all = needed.all || computes(e.AsCall(), isMap)
		}
	}))
	return needed
}

// computes reports whether a call may depend on attributes that the expression does not name.
func computes(c ast.CallExpr, isMap func(ast.Expr) bool) bool {
	arguments := c.Args()
	if c.IsMemberFunction() {
		arguments = append(slices.Clip(arguments), c.Target())
	}
	indexes := c.FunctionName() == operators.Index || c.FunctionName() == operators.OptIndex || c.FunctionName() == operators.OptSelect
	for i, a := range arguments {
		if isMap(a) && !slices.Contains(takeMaps, c.FunctionName()) {
			return true
		}
		if indexes && i == 1 && a.Kind() != ast.LiteralKind {
			return true
		}
	}
	return false
}
