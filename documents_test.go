package cloche_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// reference is a `path/file.go:Func` or `path/file.go:Type.Method` in a document.
var reference = regexp.MustCompile("`([a-z0-9_/.-]+\\.go):([A-Za-z_][A-Za-z0-9_.]*)`")

// TestDocumentsNameWhatExists: every function that a document names is there.
func TestDocumentsNameWhatExists(t *testing.T) {
	docs, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("docs/*/*.md")
	if err != nil {
		t.Fatal(err)
	}
	top, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, doc := range append(append(docs, more...), top...) {
		text, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range reference.FindAllStringSubmatch(string(text), -1) {
			n++
			if !declared(t, m[1], m[2]) {
				t.Errorf("%s names %s:%s, which does not exist", doc, m[1], m[2])
			}
		}
	}
	if n == 0 {
		t.Error("no document names any function: ARCHITECTURE.md walks the main path by name")
	}
}

// TestThreatModelNamesTests: every test that the threat model calls a proof is
// there.
func TestThreatModelNamesTests(t *testing.T) {
	text, err := os.ReadFile("THREAT-MODEL.md")
	if err != nil {
		t.Fatal(err)
	}
	declared := map[string]bool{}
	walkGo(t, func(name string) {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				declared[fn.Name.Name] = true
			}
		}
	})
	names := regexp.MustCompile("`((?:[Tt]est|Fuzz)[A-Za-z0-9_]+)`").FindAllStringSubmatch(string(text), -1)
	if len(names) < 10 {
		t.Errorf("only %d tests are named", len(names))
	}
	for _, m := range names {
		if !declared[m[1]] {
			t.Errorf("THREAT-MODEL.md names %s, which is no test", m[1])
		}
	}
}

// TestArchitectureIsShort: at most 300 lines, or nobody reads it.
func TestArchitectureIsShort(t *testing.T) {
	text, err := os.ReadFile("ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(text), "\n"); n > 300 {
		t.Errorf("ARCHITECTURE.md has %d lines; at most 300", n)
	}
}

// declared reports whether the file declares name, "Func" or "Type.Method".
func declared(t *testing.T, file, name string) bool {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if os.IsNotExist(err) {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range f.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			full := d.Name.Name
			if d.Recv != nil {
				full = receiver(d.Recv.List[0].Type) + "." + full
			}
			if full == name {
				return true
			}
		case *ast.GenDecl:
			for _, s := range d.Specs {
				if ts, ok := s.(*ast.TypeSpec); ok && ts.Name.Name == name {
					return true
				}
			}
		}
	}
	return false
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	default:
		return ""
	}
}
