// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package snippet finds the blocks of code in the documentation, and the commands in them.
// The tests of each program compare the commands with the program's own definition.
package snippet

import (
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strings"
)

// fence is a block of code, most with a language. It may be indented, as within a list.
var fence = regexp.MustCompile("(?ms)^( *)```([a-z]*)\n(.*?)^ *```$")

// span is code within text. It may go on in the next line.
var span = regexp.MustCompile("`([^`\n]+(?:\n[^`\n]+)?)`")

// Block is a block of code.
type Block struct {
	// Page is the path from the root of the repository.
	Page string
	Line int
	// Before is the line before the block, without spaces around it.
	Before   string
	Language string
	Text     string
}

func (b Block) String() string { return fmt.Sprintf("%s:%d", b.Page, b.Line) }

// Pages returns the documentation by path from the root of the repository, without what was built.
func Pages(root string) (map[string]string, error) {
	pages := map[string]string{}
	err := Files(root, ".md", func(path, content string) { pages[path] = content })
	return pages, err
}

// Files calls do with the path, from the root, and the content of each file with an ending.
// What was built, test data, and what git and CI keep is left out.
func Files(root, ending string, do func(path, content string)) error {
	tree := os.DirFS(root)
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() {
			if name == "_output" || name == "testdata" || strings.HasPrefix(name, ".") && len(name) > 2 {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ending) {
			return nil
		}
		content, err := fs.ReadFile(tree, path)
		if err != nil {
			return err
		}
		do(path, string(content))
		return nil
	})
	if err != nil {
		return fmt.Errorf("read the files *%s below %s: %w", ending, root, err)
	}
	return nil
}

// Blocks returns the blocks of a page that have one of the languages.
func Blocks(page, content string, languages ...string) []Block {
	var blocks []Block
	for _, at := range fence.FindAllStringSubmatchIndex(content, -1) {
		indent, language := content[at[2]:at[3]], content[at[4]:at[5]]
		for _, wanted := range languages {
			if language != wanted {
				continue
			}
			before := strings.TrimRight(content[:at[0]], "\n")
			blocks = append(blocks, Block{
				Page: page, Line: strings.Count(content[:at[0]], "\n") + 1, Language: language,
				Before: strings.TrimSpace(before[strings.LastIndex(before, "\n")+1:]),
				Text:   unindent(content[at[6]:at[7]], indent),
			})
		}
	}
	return blocks
}

func unindent(text, indent string) string {
	if indent == "" {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(strings.TrimPrefix(line, indent))
	}
	return b.String()
}
