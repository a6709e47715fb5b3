package cloche_test

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Bounds that keep the code readable. There is no list of exceptions.
const (
	maxFileLines     = 700
	maxFunctionLines = 80

	// Comments are 12 to 20 % of the lines of a code base this size; packages
	// of a few lines vary, so that the whole is measured, without tests.
	minComments = 0.12
	maxComments = 0.25
)

// initAllowed are the files that may have an init function.
var initAllowed = map[string]string{
	// gVisor returns to namespaces by /proc/self/ns, which is the main
	// thread's: its goroutine has to be locked to it before main runs.
	"driver/gvisor": "runtime.LockOSThread",
}

// TestStyle is the part of the style guide that a machine can hold.
func TestStyle(t *testing.T) {
	var lines, comments int
	walkGo(t, func(name string) {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		n := fset.File(f.Pos()).LineCount()
		if n > maxFileLines {
			t.Errorf("%s: %d lines; a file has at most %d", name, n, maxFileLines)
		}
		test := strings.HasSuffix(name, "_test.go")
		checkFunctions(t, fset, name, f)
		if test {
			checkTest(t, fset, name, f)
			return
		}
		lines += n
		for _, g := range f.Comments {
			comments += fset.Position(g.End()).Line - fset.Position(g.Pos()).Line + 1
		}
	})
	if share := float64(comments) / float64(lines); share < minComments || share > maxComments {
		t.Errorf("%.1f %% of %d lines are comments; wanted %.0f to %.0f %%", 100*share, lines, 100*minComments, 100*maxComments)
	}
}

func checkFunctions(t *testing.T, fset *token.FileSet, name string, f *ast.File) {
	t.Helper()
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		from, to := fset.Position(fn.Pos()).Line, fset.Position(fn.End()).Line
		if n := to - from + 1; n > maxFunctionLines {
			t.Errorf("%s:%d: %s has %d lines; a function has at most %d", name, from, fn.Name.Name, n, maxFunctionLines)
		}
		if fn.Recv == nil && fn.Name.Name == "init" {
			if _, ok := initAllowed[filepath.ToSlash(filepath.Dir(name))]; !ok {
				t.Errorf("%s:%d: init: wiring is by hand, in cmd", name, from)
			}
		}
	}
}

// checkTest fails a test that sleeps, unless its time is synctest's.
func checkTest(t *testing.T, fset *token.FileSet, name string, f *ast.File) {
	t.Helper()
	for _, i := range f.Imports {
		if i.Path.Value == `"testing/synctest"` {
			return
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if sel, ok := call.Fun.(*ast.SelectorExpr); ok {
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" && sel.Sel.Name == "Sleep" {
				t.Errorf("%s: time.Sleep in a test: wait for the event, or use testing/synctest", fset.Position(call.Pos()))
			}
		}
		return true
	})
}

// TestDirectoryNames keeps out the names that say nothing.
func TestDirectoryNames(t *testing.T) {
	bad := map[string]bool{"util": true, "utils": true, "common": true, "types": true, "manager": true, "helpers": true, "misc": true}
	walkGo(t, func(name string) {
		for _, part := range strings.Split(filepath.ToSlash(filepath.Dir(name)), "/") {
			if bad[part] {
				t.Errorf("%s: the directory name %q says nothing", name, part)
			}
		}
	})
}

// TestPackageComments: each package says what it is at the top of one file.
func TestPackageComments(t *testing.T) {
	has := map[string]bool{}
	walkGo(t, func(name string) {
		if strings.HasSuffix(name, "_test.go") {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.ToSlash(filepath.Dir(name))
		has[dir] = has[dir] || f.Doc != nil
	})
	for dir, ok := range has {
		if !ok {
			t.Errorf("package %s has no comment that says what it is and what it is not", dir)
		}
	}
}

// TestNoForbiddenWords keeps secrets, registry hosts and paths of the machine
// it was written on out of the tree.
func TestNoForbiddenWords(t *testing.T) {
	walkGo(t, func(name string) {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			for _, word := range []string{"/work/" + "main", "/root/" + "go/pkg", "TO" + "DO", "FIX" + "ME"} {
				if strings.Contains(s.Text(), word) {
					t.Errorf("%s: %q: %s", name, word, s.Text())
				}
			}
		}
	})
}
