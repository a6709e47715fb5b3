package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/cloche-dev/cloche"
)

const (
	blobCacheBytes = 10 << 30 // layers kept for the next pull
	maxConfigLen   = 4 << 20  // bytes of an image's configuration
)

// PullOptions say how to pull. The zero value is usable.
type PullOptions struct {
	CacheDir  string            // "" = DefaultCacheDir()
	Transport http.RoundTripper // everything that is dialed; nil = http.DefaultTransport
	Keychain  authn.Keychain    // nil = the Docker configuration file
	Limits    Limits

	patience patience
}

// Pull gets a linux/amd64 image from its registry, which is spoken to with TLS
// unless it is on this host's loopback. The image is named as ref is, with
// ":latest" if it has no tag; its digest is the one that ref has at the
// registry. If that digest is here already, that image is returned. A pull that
// broke off continues where it was.
//
// Errors: CodeInvalid for a reference or an archive that is wrong, CodeNotFound
// and CodeForbidden as the registry says, CodeTooLarge for a passed limit,
// CodeExhausted for a full disk, CodeUnavailable if the network does not work.
func (l *Library) Pull(ctx context.Context, ref string, o PullOptions, p Progress) (_ cloche.Image, err error) {
	if err := needRoot(); err != nil {
		return cloche.Image{}, err
	}
	parsed, err := name.ParseReference(ref)
	if err != nil || len(ref) > maxReferenceLen {
		return cloche.Image{}, cloche.Errorf(cloche.CodeInvalid, "%.100q is not an image reference", ref)
	}
	o.Limits = o.Limits.withDefaults()
	r, err := newRemote(parsed, o)
	if err != nil {
		return cloche.Image{}, err
	}
	m := p.begin("resolve "+ref, 0)
	if err := r.resolve(ctx, o.Limits); err != nil {
		return cloche.Image{}, err
	}
	m.end()
	listed := listedName(ref, parsed)
	if have, ok, err := l.same(ctx, listed, r.digest); ok || err != nil {
		return have, err
	}
	c, err := openCache(ctx, o.CacheDir, p)
	if err != nil {
		return cloche.Image{}, err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	blobs, err := r.fetch(ctx, c, o.patience, p)
	if err != nil {
		return cloche.Image{}, err
	}
	return l.add(ctx, p, func(ctx context.Context, tree string) (draft, error) {
		notes, err := r.unpack(ctx, blobs, tree, o.Limits, p)
		if err != nil {
			return draft{}, err
		}
		cfg, err := imageConfig(r.config.Config)
		return draft{name: listed, digest: r.digest, source: r.pinned(), config: cfg, notes: notes}, err
	})
}

func needRoot() error {
	if os.Geteuid() != 0 {
		return cloche.Errorf(cloche.CodeForbidden, "making an image sets the owners of its files: run this as root")
	}
	return nil
}

// listedName is what an image is listed as: ref with its tag and without its
// digest. It always has a '/' or a ':', which the names of built images have not.
func listedName(ref string, parsed name.Reference) string {
	if _, ok := parsed.(name.Digest); ok {
		return parsed.Context().Name()
	}
	if strings.HasSuffix(ref, ":"+parsed.Identifier()) {
		return ref
	}
	return ref + ":" + parsed.Identifier()
}

// remoteImage is one image at its registry.
type remoteImage struct {
	ref    name.Reference
	rt     http.RoundTripper
	auth   authn.Authenticator
	digest string // of what ref names, an index perhaps

	layers []v1.Descriptor
	config *v1.ConfigFile
}

func newRemote(ref name.Reference, o PullOptions) (*remoteImage, error) {
	rt := o.Transport
	if rt == nil {
		rt = http.DefaultTransport
	}
	keychain := o.Keychain
	if keychain == nil {
		keychain = authn.DefaultKeychain
	}
	auth, err := keychain.Resolve(ref.Context())
	if err != nil {
		return nil, &cloche.Error{Code: cloche.CodeForbidden, Op: "read registry credentials",
			Message: "the credentials of the Docker configuration file cannot be read", Err: err}
	}
	return &remoteImage{ref: ref, auth: auth, rt: tlsOnly{rt, loopback(ref.Context().RegistryStr())}}, nil
}

// tlsOnly refuses plain HTTP, wherever a redirect or a token service leads,
// unless the registry itself is on the loopback.
type tlsOnly struct {
	next  http.RoundTripper
	local bool
}

func (t tlsOnly) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !(t.local && loopback(req.URL.Host)) {
		return nil, cloche.Errorf(cloche.CodeInvalid, "%s does not speak TLS: only a registry on this host may go without", req.URL.Host)
	}
	return t.next.RoundTrip(req)
}

func loopback(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = hostport
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// resolve finds the digest, the layers and the configuration.
func (r *remoteImage) resolve(ctx context.Context, lim Limits) error {
	platform := v1.Platform{OS: "linux", Architecture: "amd64"}
	desc, err := remote.Get(r.ref, remote.WithContext(ctx), remote.WithTransport(r.rt),
		remote.WithAuth(r.auth), remote.WithPlatform(platform), remote.WithUserAgent("cloche"))
	if err != nil {
		return registryError(err)
	}
	r.digest = desc.Digest.String()
	img, err := desc.Image()
	if err != nil {
		if desc.MediaType.IsIndex() && transientStatus(err) == 0 {
			return &cloche.Error{Code: cloche.CodeInvalid, Op: "resolve image", Message: "the image does not exist for linux/amd64", Err: err}
		}
		return registryError(err)
	}
	manifest, err := img.Manifest()
	if err != nil {
		return registryError(err)
	}
	if err := checkManifest(manifest, lim); err != nil {
		return err
	}
	if r.config, err = img.ConfigFile(); err != nil {
		return registryError(err)
	}
	if r.config.OS != "linux" || r.config.Architecture != "amd64" {
		return cloche.Errorf(cloche.CodeInvalid, "the image is for %.20q/%.20q, not linux/amd64", r.config.OS, r.config.Architecture)
	}
	if len(r.config.RootFS.DiffIDs) != len(manifest.Layers) {
		return cloche.Errorf(cloche.CodeInvalid, "the image's configuration does not fit its layers")
	}
	r.layers = manifest.Layers
	return nil
}

func checkManifest(m *v1.Manifest, lim Limits) error {
	if m.Config.Size < 0 || m.Config.Size > maxConfigLen {
		return cloche.Errorf(cloche.CodeTooLarge, "the image's configuration has more than %d bytes", maxConfigLen)
	}
	if len(m.Layers) > lim.Layers {
		return cloche.Errorf(cloche.CodeTooLarge, "the image has %d layers; at most %d are allowed", len(m.Layers), lim.Layers)
	}
	var total int64
	for _, d := range m.Layers {
		if d.Digest.Algorithm != "sha256" || d.Size < 0 {
			return cloche.Errorf(cloche.CodeInvalid, "the image's manifest has a layer without size or SHA-256")
		}
		if d.Size > lim.Blob || d.Size > lim.Bytes-total {
			return cloche.Errorf(cloche.CodeTooLarge, "a layer of the image has %d bytes; at most %d are allowed, and %d in all", d.Size, lim.Blob, lim.Bytes)
		}
		total += d.Size
	}
	return nil
}

// pinned is where the image came from, for people.
func (r *remoteImage) pinned() string { return r.ref.Context().Name() + "@" + r.digest }

// transientStatus is the HTTP status in an error of the registry library, 0 if
// it is none.
func transientStatus(err error) int {
	var t *transport.Error
	if errors.As(err, &t) {
		return t.StatusCode
	}
	return 0
}

func registryError(err error) error {
	var have *cloche.Error
	if errors.As(err, &have) {
		return have
	}
	if status := transientStatus(err); status != 0 {
		e := statusError(status)
		if errors.As(e, &have) {
			have.Op, have.Err = "ask registry", err
		}
		return e
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &cloche.Error{Code: cloche.CodeUnavailable, Op: "ask registry", Message: "the registry cannot be used", Err: err}
}

// fetch brings all layers into the cache and returns their paths.
func (r *remoteImage) fetch(ctx context.Context, c *cache, pat patience, p Progress) ([]string, error) {
	dir, err := c.sub("blobs")
	if err != nil {
		return nil, err
	}
	var total int64
	for _, d := range r.layers {
		total += d.Size
	}
	repo := r.ref.Context()
	rt, err := transport.NewWithContext(ctx, repo.Registry, r.auth, r.rt, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		return nil, registryError(err)
	}
	m := p.begin("download layers", total)
	client := &http.Client{Transport: rt}
	paths := make([]string, 0, len(r.layers))
	for _, d := range r.layers {
		sum, err := hex.DecodeString(d.Digest.Hex)
		if err != nil {
			return nil, cloche.Errorf(cloche.CodeInvalid, "the image's manifest has a malformed digest")
		}
		dl := download{client: client, size: d.Size, hash: sha256.New, sum: sum, meter: m, patience: pat,
			url:  fmt.Sprintf("%s://%s/v2/%s/blobs/%s", r.scheme(), repo.RegistryStr(), repo.RepositoryStr(), d.Digest),
			dest: filepath.Join(dir, "sha256-"+d.Digest.Hex)}
		if err := dl.run(ctx); err != nil {
			return nil, fmt.Errorf("layer %s: %w", d.Digest, err)
		}
		paths = append(paths, dl.dest)
	}
	m.end()
	return paths, trim(dir, max(blobCacheBytes, total))
}

func (r *remoteImage) scheme() string {
	if w, ok := r.rt.(tlsOnly); ok && w.local {
		return r.ref.Context().Scheme()
	}
	return "https"
}

// unpack applies the layers to the tree, lowest first, and compares each one's
// uncompressed digest.
func (r *remoteImage) unpack(ctx context.Context, blobs []string, tree string, lim Limits, p Progress) (_ []string, err error) {
	var total int64
	for _, d := range r.layers {
		total += d.Size
	}
	m := p.begin("unpack layers", total)
	u, err := newUnpacker(tree, lim)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, u.close()) }()
	for i, blob := range blobs {
		if err := u.layerFile(ctx, blob, r.config.RootFS.DiffIDs[i], m); err != nil {
			return nil, fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	m.end()
	return u.noteLines(), nil
}

// layerFile applies the compressed archive in a file.
func (u *unpacker) layerFile(ctx context.Context, blob string, want v1.Hash, m *meter) error {
	f, err := os.Open(blob)
	if err != nil {
		return hostError("open layer", err)
	}
	defer f.Close() // opened for reading
	plain, err := decompress(io.TeeReader(f, meterWriter{m}))
	if err != nil {
		return err
	}
	defer plain.Close() // frees memory
	h := sha256.New()
	if err := u.apply(ctx, archive{r: io.TeeReader(plain, h), whiteouts: true}); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); want.Algorithm != "sha256" || got != want.Hex {
		return cloche.Errorf(cloche.CodeInvalid, "the layer's content does not have the digest of the image's configuration")
	}
	return nil
}

// imageConfig keeps what a sandbox needs of an image's configuration.
func imageConfig(c v1.Config) (cloche.ImageConfig, error) {
	// "user", "uid", "user:group" or "uid:gid", which is also what the agent
	// takes.
	if len(c.User) > 256 || strings.ContainsAny(c.User, "\x00\n/") {
		return cloche.ImageConfig{}, cloche.Errorf(cloche.CodeInvalid, "the image's user is not a name or a number")
	}
	if len(c.WorkingDir) > cloche.MaxPathLen || strings.ContainsRune(c.WorkingDir, 0) {
		return cloche.ImageConfig{}, cloche.Errorf(cloche.CodeInvalid, "the image's working directory is not a path")
	}
	env := map[string]string{}
	for _, kv := range c.Env {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" {
			env[k] = v
		}
	}
	if err := cloche.CheckEnv(env); err != nil {
		return cloche.ImageConfig{}, fmt.Errorf("image configuration: %w", err)
	}
	return cloche.ImageConfig{User: c.User, WorkDir: path.Clean("/" + c.WorkingDir), Env: env}, nil
}
