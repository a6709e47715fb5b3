package image

import (
	"archive/tar"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cloche-dev/cloche"
)

const (
	// npmDefault is npm's own default (npm config "registry").
	npmDefault = "https://registry.npmjs.org/"

	maxPackument = 64 << 20  // bytes of a package's metadata; npm's own has 3 MB
	maxTarball   = 512 << 20 // bytes; Node's has 53 MB
)

// npmRegistry is the registry that npm on this host is set to.
func npmRegistry(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "npm", "config", "get", "registry").Output()
	url := strings.TrimSpace(string(out))
	if err != nil || !strings.HasPrefix(url, "http") { // no npm, or one without an opinion
		return npmDefault
	}
	return strings.TrimSuffix(url, "/") + "/"
}

// npmVersion is one published version of a package.
type npmVersion struct {
	Version string
	Dist    struct {
		Tarball   string
		Integrity string
	}
}

// sum is the SHA-512 of the tarball.
func (v npmVersion) sum() ([]byte, error) {
	for alternative := range strings.FieldsSeq(v.Dist.Integrity) { // Subresource Integrity
		if b64, ok := strings.CutPrefix(alternative, "sha512-"); ok {
			if b, err := base64.StdEncoding.DecodeString(b64); err == nil && len(b) == sha512.Size {
				return b, nil
			}
		}
	}
	return nil, cloche.Errorf(cloche.CodeUnavailable, "the npm registry gives no SHA-512 for version %s of a package", v.Version)
}

// resolveNPM finds the highest version of the package's major.
func resolveNPM(ctx context.Context, client *http.Client, registry string, p npmPackage) (npmVersion, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, registry+p.Package, nil)
	if err != nil {
		return npmVersion{}, fmt.Errorf("npm package %s: %w", p.Package, err)
	}
	// The abbreviated form; the full one of npm itself has 30 MB.
	req.Header.Set("Accept", "application/vnd.npm.install-v1+json")
	resp, err := client.Do(req)
	if err != nil {
		return npmVersion{}, &cloche.Error{Code: cloche.CodeUnavailable, Op: "ask npm registry", Message: "the npm registry cannot be reached", Err: err}
	}
	defer resp.Body.Close() // read as far as needed
	if resp.StatusCode != http.StatusOK {
		return npmVersion{}, cloche.Errorf(cloche.CodeUnavailable, "the npm registry answered %s for package %s", resp.Status, p.Package)
	}
	var doc struct {
		Versions map[string]npmVersion
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxPackument)).Decode(&doc); err != nil {
		return npmVersion{}, &cloche.Error{Code: cloche.CodeUnavailable, Op: "ask npm registry", Message: "the npm registry's answer cannot be read", Err: err}
	}
	var best npmVersion
	var bestKey [3]int
	for _, v := range doc.Versions {
		key, ok := release(v.Version)
		if ok && key[0] == p.Major && (best.Version == "" || newer(key, bestKey)) {
			best, bestKey = v, key
		}
	}
	if best.Version == "" {
		return npmVersion{}, cloche.Errorf(cloche.CodeUnavailable, "the npm registry has no version %d of package %s", p.Major, p.Package)
	}
	return best, nil
}

// release splits a version of three numbers; pre-releases are not wanted.
func release(v string) (key [3]int, ok bool) {
	parts := strings.Split(v, ".")
	if len(parts) != 3 {
		return key, false
	}
	for i, s := range parts {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 {
			return key, false
		}
		key[i] = n
	}
	return key, true
}

func newer(a, b [3]int) bool {
	for i := range a {
		if a[i] != b[i] {
			return a[i] > b[i]
		}
	}
	return false
}

// fetchNPM brings the package's tarball into the cache directory dir and returns
// its path and version.
func fetchNPM(ctx context.Context, client *http.Client, registry, dir string, p npmPackage, pat patience, m *meter) (path, version string, err error) {
	m.detail(p.Package + " " + strconv.Itoa(p.Major))
	v, err := resolveNPM(ctx, client, registry, p)
	if err != nil {
		return "", "", err
	}
	sum, err := v.sum()
	if err != nil {
		return "", "", err
	}
	d := download{client: client, url: v.Dist.Tarball, dest: filepath.Join(dir, "sha512-"+hex.EncodeToString(sum)),
		size: -1, max: maxTarball, hash: sha512.New, sum: sum, meter: m, patience: pat}
	if err := d.run(ctx); err != nil {
		return "", "", fmt.Errorf("npm package %s %s: %w", p.Package, v.Version, err)
	}
	return d.dest, v.Version, nil
}

// unpackNPM puts the wanted files of a tarball under root, owned by root, with
// the modes that npm itself would give them.
func unpackNPM(ctx context.Context, tarball, root string, p npmPackage) (err error) {
	into := root
	for c := range strings.SplitSeq(strings.Trim(p.Into, "/"), "/") {
		into = filepath.Join(into, c)
		if err := makeDir(into); err != nil {
			return hostError("npm package directory", err)
		}
	}
	u, err := newUnpacker(into, Limits{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.close()) }()
	f, err := os.Open(tarball)
	if err != nil {
		return hostError("open npm package", err)
	}
	defer f.Close() // opened for reading
	plain, err := decompress(f)
	if err != nil {
		return err
	}
	defer plain.Close() // frees memory
	return u.apply(ctx, archive{r: plain, edit: func(h *tar.Header) bool {
		_, name, ok := strings.Cut(h.Name, "/") // all is in one directory, "package" mostly
		if !ok || h.Typeflag != tar.TypeReg || !p.keeps(name) {
			return false
		}
		h.Name, h.Uid, h.Gid, h.PAXRecords = name, 0, 0, nil
		h.Mode = 0o644 | h.Mode&0o111
		return true
	}})
}
