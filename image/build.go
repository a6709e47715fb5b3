package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/atomicfile"
)

// BuildOptions say how to build. The zero value is usable.
type BuildOptions struct {
	CacheDir string // "" = DefaultCacheDir()
	// Transport is what npm's registry is reached through; nil =
	// http.DefaultTransport. Debian's packages come through the host's apt.
	Transport http.RoundTripper
	// Refresh makes a new product, with today's packages, although the cache
	// has one of this recipe.
	Refresh bool
	// Suite is the Debian release; "" = the first of the recipe's that the
	// host's mirror has.
	Suite string
	// Mirror is the base of Debian's archive; "" = as in the host's apt sources.
	Mirror string
	// NPMRegistry ends in "/"; "" = as npm on the host is set.
	NPMRegistry string

	patience patience
}

// product is a finished root file system in the cache: a .tar.zst, and this
// beside it as .json.
type product struct {
	SHA256   string            `json:"sha256"` // of the .tar.zst
	MadeAt   time.Time         `json:"madeAt"`
	Suite    string            `json:"suite"`
	Versions map[string]string `json:"versions"` // of npm packages, by where they are
}

// Build makes the image of that name by its recipe. The product of a recipe is
// kept in the cache directory, so that only the first build on a host installs
// packages; what an interrupted one has downloaded is used by the next. If the
// library has the product already, that image is returned.
//
// Errors: CodeNotFound for an unknown recipe, CodeForbidden unless root,
// CodeUnavailable for a missing tool or a network that does not work, with a
// message that says what to do.
func (l *Library) Build(ctx context.Context, name string, o BuildOptions, p Progress) (_ cloche.Image, err error) {
	r, err := loadRecipe(name)
	if err != nil {
		return cloche.Image{}, err
	}
	if err := needRoot(); err != nil {
		return cloche.Image{}, err
	}
	c, err := openCache(ctx, o.CacheDir, p)
	if err != nil {
		return cloche.Image{}, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	products, err := c.sub("products")
	if err != nil {
		return cloche.Image{}, err
	}
	path := filepath.Join(products, r.product(o.Suite))
	prod, ok, err := readProduct(path)
	if err != nil {
		return cloche.Image{}, err
	}
	if !ok || o.Refresh {
		if prod, err = l.makeProduct(ctx, c, r, path, o, p); err != nil {
			return cloche.Image{}, err
		}
	}
	source := "recipe " + r.name + ", product " + prod.SHA256
	if have, ok, err := l.bySource(ctx, r.name, source); ok || err != nil {
		return have, err
	}
	return l.add(ctx, p, func(ctx context.Context, tree string) (draft, error) {
		if err := unpackProduct(ctx, path, prod, tree, p); err != nil {
			return draft{}, err
		}
		cfg, err := r.config(tree)
		return draft{name: r.name, source: source, config: cfg}, err
	})
}

// bySource finds the newest image of that name if it came from source.
func (l *Library) bySource(ctx context.Context, name, source string) (cloche.Image, bool, error) {
	all, err := l.List(ctx)
	if err != nil {
		return cloche.Image{}, false, err
	}
	img, ok := find(all, name, "")
	if !ok {
		return cloche.Image{}, false, nil
	}
	m, err := l.meta(img.ID)
	return img, err == nil && m.Source == source, err
}

// readProduct returns what the cache says of a product; ok is false if it has
// none that is whole.
func readProduct(path string) (prod product, ok bool, err error) {
	b, err := os.ReadFile(path + ".json")
	if errors.Is(err, fs.ErrNotExist) {
		return prod, false, nil
	}
	if err != nil {
		return prod, false, fmt.Errorf("cached image: %w", err)
	}
	if json.Unmarshal(b, &prod) != nil || prod.SHA256 == "" {
		return product{}, false, nil // made again
	}
	_, err = os.Stat(path + ".tar.zst")
	return prod, err == nil, nil
}

// makeProduct builds the root file system and puts it into the cache.
func (l *Library) makeProduct(ctx context.Context, c *cache, r *recipe, path string, o BuildOptions, p Progress) (_ product, err error) {
	if err := needTools(); err != nil {
		return product{}, err
	}
	// Leftovers of a build that was killed. The cache is ours alone.
	if err := removeLeftovers(c.dir); err != nil {
		return product{}, err
	}
	dir, err := os.MkdirTemp(c.dir, buildDir)
	if err != nil {
		return product{}, hostError("build directory", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if strings.ContainsAny(dir, "\"'$`\\\n") {
		return product{}, cloche.Errorf(cloche.CodeInvalid, "the path of the cache directory has quotes or dollar signs")
	}
	d, err := newDebian(ctx, c, dir, r, o, p)
	if err != nil {
		return product{}, err
	}
	prod := product{MadeAt: time.Now().UTC(), Suite: d.suite}
	stage := filepath.Join(dir, "stage")
	if prod.Versions, err = stageFiles(ctx, c, r, stage, d.suite, o, p); err != nil {
		return product{}, err
	}
	files, err := d.fetchPackages(ctx, r.Packages)
	if err != nil {
		return product{}, err
	}
	setup, err := fs.ReadFile(r.files, "setup.sh")
	if err != nil {
		return product{}, fmt.Errorf("recipe %s: %w", r.name, err)
	}
	out, err := os.OpenFile(filepath.Join(dir, "product"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return product{}, hostError("write image to cache", err)
	}
	h := sha256.New()
	err = d.bootstrap(ctx, r, files, stage, setup, io.MultiWriter(out, h))
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return product{}, hostError("write image to cache", err)
	}
	prod.SHA256 = hex.EncodeToString(h.Sum(nil))
	if err := publishProduct(filepath.Join(dir, "product"), path, prod); err != nil {
		return product{}, hostError("write image to cache", err)
	}
	if err := trim(filepath.Dir(path), productCacheBytes); err != nil {
		return product{}, err
	}
	l.log.InfoContext(ctx, "image product is in the cache", "recipe", r.name, "suite", d.suite, "versions", prod.Versions)
	return prod, nil
}

// productCacheBytes bounds the products of recipes that are not used any more.
const productCacheBytes = 2 << 30

// buildDir begins the names of scratch directories in the cache.
const buildDir = ".build-"

func removeLeftovers(dir string) error {
	old, err := filepath.Glob(filepath.Join(dir, buildDir+"*"))
	if err != nil {
		return fmt.Errorf("cache directory: %w", err)
	}
	for _, o := range old {
		if err := os.RemoveAll(o); err != nil {
			return hostError("remove old build", err)
		}
	}
	return nil
}

// publishProduct replaces the product at path. Between the two renames the
// record does not fit the file, which unpacking finds.
func publishProduct(file, path string, prod product) error {
	b, err := json.MarshalIndent(prod, "", "  ")
	if err != nil {
		return err
	}
	if err := os.Rename(file, path+".tar.zst"); err != nil {
		return err
	}
	return atomicfile.Write(path+".json", append(b, '\n'), 0o600)
}

func newDebian(ctx context.Context, c *cache, dir string, r *recipe, o BuildOptions, p Progress) (*debian, error) {
	fallback, err := fs.ReadFile(r.files, "overlay/"+imageSources)
	if err != nil {
		return nil, fmt.Errorf("recipe %s: %w", r.name, err)
	}
	// The public archive, as the image's own apt will use it.
	public := pickMirrors(parseSources(string(bytes.ReplaceAll(fallback, []byte(suiteMark), []byte("stable")))))
	d := &debian{dir: dir, p: p, lock: c.lock}
	if d.debs, err = c.sub("apt"); err != nil {
		return nil, err
	}
	if d.mirrors, err = hostMirrors("/etc/apt", public); err != nil {
		return nil, err
	}
	if o.Mirror != "" {
		d.mirrors.main = strings.TrimSuffix(o.Mirror, "/")
	}
	if d.acquire, err = hostAcquire(ctx); err != nil {
		return nil, err
	}
	suites := r.Suites
	if o.Suite != "" {
		suites = []string{o.Suite}
	}
	return d, d.pickSuite(ctx, suites)
}

// stageFiles makes the directory that is copied over the installed packages: the
// overlay, and npm's packages. It returns the versions of these.
func stageFiles(ctx context.Context, c *cache, r *recipe, stage, suite string, o BuildOptions, p Progress) (map[string]string, error) {
	if err := makeDir(stage); err != nil {
		return nil, hostError("stage directory", err)
	}
	if err := r.writeOverlay(stage, suite); err != nil {
		return nil, hostError("stage overlay", err)
	}
	dir, err := c.sub("npm")
	if err != nil {
		return nil, err
	}
	registry := o.NPMRegistry
	if registry == "" {
		registry = npmRegistry(ctx)
	}
	client := &http.Client{Transport: o.Transport}
	m := p.begin("download Node", 0)
	versions := map[string]string{}
	for _, n := range r.NPM {
		tarball, version, err := fetchNPM(ctx, client, registry, dir, n, o.patience, m)
		if err != nil {
			return nil, err
		}
		if err := unpackNPM(ctx, tarball, stage, n); err != nil {
			return nil, fmt.Errorf("npm package %s: %w", n.Package, err)
		}
		versions[n.Into] = version
	}
	m.end()
	return versions, trim(dir, 1<<30)
}

// unpackProduct unpacks a product of the cache and compares its digest. One that
// is damaged is removed, and the next build makes a new one.
func unpackProduct(ctx context.Context, path string, prod product, tree string, p Progress) (err error) {
	f, err := os.Open(path + ".tar.zst")
	if err != nil {
		return hostError("open cached image", err)
	}
	defer f.Close() // opened for reading
	info, err := f.Stat()
	if err != nil {
		return hostError("open cached image", err)
	}
	m := p.begin("unpack image", info.Size())
	u, err := newUnpacker(tree, Limits{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.close()) }()
	h := sha256.New()
	in := io.TeeReader(f, io.MultiWriter(h, meterWriter{m}))
	plain, err := decompress(in)
	if err != nil {
		return err
	}
	defer plain.Close() // frees memory
	aerr := u.apply(ctx, archive{r: plain})
	if _, err := io.Copy(io.Discard, in); err != nil {
		return hostError("read cached image", err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != prod.SHA256 && ctx.Err() == nil {
		return errors.Join(
			cloche.Errorf(cloche.CodeUnavailable, "the cached image was damaged and has been removed: run the same command again"),
			os.Remove(path+".json"), aerr)
	}
	if aerr != nil {
		return aerr
	}
	m.end()
	return nil
}
