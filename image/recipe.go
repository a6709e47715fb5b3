package image

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"github.com/cloche-dev/cloche"
)

//go:embed all:universal
var recipes embed.FS

// productVersion is part of every product's name: raise it when the code that
// makes products changes what comes out.
const productVersion = "2"

// suiteMark stands for the Debian release in the overlay's apt sources.
const (
	suiteMark    = "@SUITE@"
	imageSources = "etc/apt/sources.list.d/debian.sources"
)

// recipe is a directory of recipes: recipe.toml, the files of overlay/, and
// setup.sh, which runs inside.
type recipe struct {
	Suites   []string
	Packages []string
	Excludes []string
	Includes []string
	Config   cloche.ImageConfig
	Needs    map[string]string // runtime -> file that an image with it has
	NPM      []npmPackage

	name  string
	files fs.FS
	hash  string // hex, over every file
}

// npmPackage is a package of npm's registry that becomes a directory.
type npmPackage struct {
	Package string
	Major   int
	Into    string   // absolute, in the image
	Only    []string // files and directories to keep; empty = all
	Except  []string // files and directories to leave out
}

// recipeNames lists what Build can build.
func recipeNames() ([]string, error) {
	entries, err := recipes.ReadDir(".")
	if err != nil {
		return nil, fmt.Errorf("recipes: %w", err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// loadRecipe reads the recipe of that name; an unknown one is CodeNotFound.
func loadRecipe(name string) (*recipe, error) {
	names, err := recipeNames()
	if err != nil {
		return nil, err
	}
	files, err := fs.Sub(recipes, name)
	if err != nil || strings.Contains(name, "/") {
		return nil, cloche.Errorf(cloche.CodeNotFound, "there is no recipe %q for `cloche image build`; there is: %s", name, strings.Join(names, ", "))
	}
	b, err := fs.ReadFile(files, "recipe.toml")
	if err != nil {
		return nil, cloche.Errorf(cloche.CodeNotFound, "there is no recipe %q for `cloche image build`; there is: %s", name, strings.Join(names, ", "))
	}
	r := &recipe{name: name, files: files}
	if err := toml.NewDecoder(strings.NewReader(string(b))).DisallowUnknownFields().Decode(r); err != nil {
		return nil, fmt.Errorf("recipe %s: %w", name, err)
	}
	r.hash, err = hashFiles(files)
	return r, err
}

// hashFiles is the digest of the names and contents of all files.
func hashFiles(files fs.FS) (string, error) {
	h := sha256.New()
	err := fs.WalkDir(files, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(files, p)
		fmt.Fprintf(h, "%q %d\n%s", p, len(b), b) // a hash does not fail
		return err
	})
	if err != nil {
		return "", fmt.Errorf("recipe: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// product is the name of the file that the recipe makes for that release ("" =
// the first that there is).
func (r *recipe) product(suite string) string {
	h := sha256.Sum256([]byte(strings.Join([]string{productVersion, r.hash, suite}, "\n")))
	return r.name + "-" + hex.EncodeToString(h[:8])
}

// writeOverlay copies the overlay to dir, with the release put in.
func (r *recipe) writeOverlay(dir, suite string) error {
	overlay, err := fs.Sub(r.files, "overlay")
	if err != nil {
		return fmt.Errorf("recipe overlay: %w", err)
	}
	return fs.WalkDir(overlay, ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(dir, p)
		if d.IsDir() {
			return makeDir(to)
		}
		b, err := fs.ReadFile(overlay, p)
		if err != nil {
			return err
		}
		if p == imageSources {
			b = []byte(strings.ReplaceAll(string(b), suiteMark, suite))
		}
		return errors.Join(os.WriteFile(to, b, 0o644), os.Chmod(to, 0o644))
	})
}

// makeDir makes a directory that everybody may read, whatever the umask.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.Chmod(dir, 0o755)
}

// config is the recipe's, with the runtimes that the tree has.
func (r *recipe) config(tree string) (cloche.ImageConfig, error) {
	root, err := os.OpenRoot(tree)
	if err != nil {
		return cloche.ImageConfig{}, fmt.Errorf("image tree: %w", err)
	}
	defer root.Close() // opened for reading
	cfg := r.Config
	cfg.Runtimes = map[string]cloche.Runtime{}
	for name, rt := range r.Config.Runtimes {
		if need, ok := r.Needs[name]; ok {
			if _, err := root.Stat(strings.TrimPrefix(need, "/")); err != nil {
				continue
			}
		}
		cfg.Runtimes[name] = rt
	}
	return cfg, nil
}

// keeps reports whether a file of the package, by its path, is wanted.
func (n npmPackage) keeps(p string) bool {
	under := func(dirs []string) bool {
		for _, d := range dirs {
			if p == d || strings.HasPrefix(p, d+"/") {
				return true
			}
		}
		return false
	}
	return (len(n.Only) == 0 || under(n.Only)) && !under(n.Except)
}
