package cloche_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/cloche-dev/cloche"

// layer is a floor of the house. The order is the order of the table in
// ARCHITECTURE.md.
type layer string

const (
	noun     layer = "noun"     // imports the standard library alone
	contract layer = "contract" // imports nouns and contracts
	adapter  layer = "adapter"  // imports nouns and contracts
	engine   layer = "engine"   // imports nouns and contracts
	surface  layer = "surface"  // imports nouns and contracts
	wiring   layer = "wiring"   // imports everything
)

// layers gives every package its floor; "" is the root package.
var layers = map[string]layer{
	"":                    noun,
	"driver":              contract,
	"guest":               contract,
	"internal/atomicfile": contract,
	"internal/cleanup":    contract,
	"internal/failpoint":  contract,
	"internal/frames":     contract,
	"internal/overlay":    contract,
	"internal/process":    contract,
	"internal/sdktest":    contract,
	"internal/testenv":    contract,
	"internal/trace":      contract,
	"store":               adapter,
	"image":               adapter,
	"layer":               adapter,
	"auth":                adapter,
	"client":              adapter,
	"driver/drivertest":   adapter,
	"driver/fake":         adapter,
	"driver/gvisor":       adapter,
	"guest/agent":         adapter,
	"guest/dial":          adapter,
	"node":                engine,
	"control":             engine,
	"api/vercel":          surface,
	"cli":                 surface,
	"cmd/cloche":          wiring,
	"cmd/cloche-agent":    wiring,
}

// exceptions are edges that the floors would forbid. One that no file uses any
// more is a failure too.
var exceptions = map[[2]string]string{
	{"cli", "client"}: "the command line is a client like any other",
}

// stdlibOnly are packages that import nothing but the standard library and, the
// contract, the nouns.
var stdlibOnly = []string{"", "guest"}

// source is one non-test Go file.
type source struct {
	path    string // from the root, with slashes
	pkg     string // its directory; "" for the root
	imports []string
}

func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	walkGo(t, func(name string) {
		if strings.HasSuffix(name, "_test.go") {
			return
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		s := source{path: filepath.ToSlash(name), pkg: path.Dir(filepath.ToSlash(name))}
		if s.pkg == "." {
			s.pkg = ""
		}
		for _, i := range f.Imports {
			p, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			s.imports = append(s.imports, p)
		}
		all = append(all, s)
	})
	return all
}

// walkGo calls f with the path of every Go file of the module.
func walkGo(t *testing.T, f func(name string)) {
	t.Helper()
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "node_modules" || d.Name() == "testdata" || d.Name() == ".git" || d.Name() == "bin"):
			return fs.SkipDir
		case !d.IsDir() && strings.HasSuffix(name, ".go"):
			f(name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestImports holds the house to its floors: an edge outside the table, a
// package without a row, a row without a package and an exception that nobody
// needs all fail.
func TestImports(t *testing.T) {
	unused := map[[2]string]bool{}
	for e := range exceptions {
		unused[e] = true
	}
	seen := map[string]bool{}
	for _, s := range sources(t) {
		from, ok := layers[s.pkg]
		if !ok {
			t.Errorf("%s: package %q has no row in the table of imports_test.go", s.path, s.pkg)
			continue
		}
		seen[s.pkg] = true
		for _, imp := range s.imports {
			to, ours := strings.CutPrefix(imp, module)
			if !ours {
				if slices.Contains(stdlibOnly, s.pkg) && strings.Contains(strings.Split(imp, "/")[0], ".") {
					t.Errorf("%s: package %q imports the standard library alone, not %s", s.path, s.pkg, imp)
				}
				continue
			}
			to = strings.TrimPrefix(to, "/")
			edge := [2]string{s.pkg, to}
			if _, ok := exceptions[edge]; ok {
				delete(unused, edge)
				continue
			}
			if !allowed(from, layers[to]) {
				t.Errorf("%s: %s %q may not import %s %q", s.path, from, s.pkg, layers[to], to)
			}
		}
	}
	for e := range unused {
		t.Errorf("the exception %s -> %s is not needed any more: delete it", e[0], e[1])
	}
	for pkg := range layers {
		if !seen[pkg] {
			t.Errorf("the table has a row for %q, which is no package", pkg)
		}
	}
}

func allowed(from, to layer) bool {
	switch from {
	case noun:
		return false
	case wiring:
		return true
	default:
		return to == noun || to == contract
	}
}
