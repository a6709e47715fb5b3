package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/cloche-dev/cloche"
)

// testRegistry is a registry on the loopback; wrap, if set, stands before it.
type testRegistry struct {
	host string
	wrap atomic.Pointer[func(http.Handler) http.Handler]
	gets sync.Map // blob path -> *atomic.Int64, bytes sent
}

func newRegistry(t *testing.T) *testRegistry {
	t.Helper()
	r := &testRegistry{}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h := http.Handler(inner)
		if wrap := r.wrap.Load(); wrap != nil {
			h = (*wrap)(inner)
		}
		if req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/") {
			n, _ := r.gets.LoadOrStore(req.URL.Path, new(atomic.Int64))
			w = countingWriter{w, n.(*atomic.Int64)}
		}
		h.ServeHTTP(w, req)
	}))
	t.Cleanup(srv.Close)
	r.host = strings.TrimPrefix(srv.URL, "http://")
	return r
}

type countingWriter struct {
	http.ResponseWriter
	n *atomic.Int64
}

func (c countingWriter) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.n.Add(int64(n))
	return n, err
}

func (c countingWriter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// push puts an image of these layers at the registry and returns its reference.
func (r *testRegistry) push(t *testing.T, repo string, img v1.Image) (ref string, digest v1.Hash) {
	t.Helper()
	ref = r.host + "/" + repo
	parsed, err := name.ParseReference(ref)
	if err == nil {
		err = remote.Write(parsed, img)
	}
	if err == nil {
		digest, err = img.Digest()
	}
	if err != nil {
		t.Fatal(err)
	}
	return ref, digest
}

// imageOf makes an image of uncompressed layers.
func imageOf(t *testing.T, cfg v1.Config, comp compression.Compression, layers ...[]byte) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	for _, b := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil },
			tarball.WithCompression(comp), tarball.WithMediaType(types.OCILayer))
		if err == nil {
			img, err = mutate.AppendLayers(img, l)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	f, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	f = f.DeepCopy()
	f.OS, f.Architecture, f.Config = "linux", "amd64", cfg
	if img, err = mutate.ConfigFile(img, f); err != nil {
		t.Fatal(err)
	}
	return img
}

// quick pulls into a cache of the test's own, without waiting between tries.
func quick(t *testing.T) PullOptions {
	t.Helper()
	return PullOptions{CacheDir: t.TempDir(), Keychain: nil, patience: patience{tries: 4, delay: time.Millisecond, stall: 10 * time.Second}}
}

// random is content that does not compress.
func random(n int) string {
	b := make([]byte, n)
	chacha := rand.NewChaCha8([32]byte{1})
	_, _ = chacha.Read(b) // documented never to fail
	return string(b)
}

func TestPull(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for _, comp := range []compression.Compression{compression.GZip, compression.ZStd, compression.None} {
		t.Run(string(comp), func(t *testing.T) {
			r := newRegistry(t)
			ref, digest := r.push(t, "team/app", imageOf(t,
				v1.Config{User: "node:node", WorkingDir: "srv/../app", Env: []string{"PATH=/bin", "A=b=c", "broken", "=x"}}, comp,
				layerOf{file("etc/one", "1"), file("etc/two", "2"), link("l", "/etc")}.bytes(t),
				layerOf{file("etc/.wh.one", ""), file("l/three", "3"), hard("four", "etc/two")}.bytes(t)))
			l, _ := newLibrary(t)
			img, err := l.Pull(t.Context(), ref, quick(t), nil)
			if err != nil {
				t.Fatal(err)
			}
			if img.Name != ref+":latest" || img.Digest != digest.String() {
				t.Errorf("image is %s; want %s:latest@%s", img.Reference(), ref, digest)
			}
			c := img.Config
			if c.User != "node:node" || c.WorkDir != "/app" || len(c.Env) != 2 || c.Env["PATH"] != "/bin" || c.Env["A"] != "b=c" || len(c.Runtimes) != 0 {
				t.Errorf("configuration is %+v", c)
			}
			got := hostDir{tree: l.treePath(img.ID)}.list(t)
			if want := []string{"etc/", "etc/three", "etc/two", "four", "l -> /etc"}; !slices.Equal(got, want) || img.Files != 5 || img.SizeBytes != 2 {
				t.Errorf("tree has %q, %d files, %d bytes; want %q, 5, 2", got, img.Files, img.SizeBytes, want)
			}
			if err := l.Verify(t.Context(), img.ID); err != nil {
				t.Error(err)
			}
			for _, name := range []string{ref, ref + ":latest", ref + "@" + digest.String()} {
				if found, err := l.Image(t.Context(), name); err != nil || found.ID != img.ID {
					t.Errorf("Image(%s) = %s, %v", name, found.ID, err)
				}
			}
			again, err := l.Pull(t.Context(), ref, quick(t), nil)
			if err != nil || again.ID != img.ID {
				t.Errorf("second pull: %s, %v; want the same image", again.ID, err)
			}
		})
	}
}

func TestPullByDigestPicksThePlatform(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := newRegistry(t)
	ours := imageOf(t, v1.Config{}, compression.GZip, layerOf{file("amd64", "")}.bytes(t))
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: empty.Image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64"}}},
		mutate.IndexAddendum{Add: ours, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "amd64"}}})
	tag, err := name.ParseReference(r.host + "/multi:1")
	if err == nil {
		err = remote.WriteIndex(tag, index)
	}
	if err != nil {
		t.Fatal(err)
	}
	digest, err := index.Digest()
	if err != nil {
		t.Fatal(err)
	}
	l, _ := newLibrary(t)
	ref := r.host + "/multi@" + digest.String()
	img, err := l.Pull(t.Context(), ref, quick(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	if img.Reference() != ref {
		t.Errorf("image is %s; want %s", img.Reference(), ref)
	}
	if got := (hostDir{tree: l.treePath(img.ID)}).list(t); !slices.Equal(got, []string{"amd64"}) {
		t.Errorf("tree has %q", got)
	}
	if found, err := l.Image(t.Context(), ref); err != nil || found.ID != img.ID {
		t.Errorf("Image(%s) = %s, %v", ref, found.ID, err)
	}
}

func TestPullOtherPlatform(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := newRegistry(t)
	f := &v1.ConfigFile{OS: "linux", Architecture: "arm64"}
	arm, err := mutate.ConfigFile(empty.Image, f)
	if err != nil {
		t.Fatal(err)
	}
	ref, _ := r.push(t, "arm:1", arm)
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: arm, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "arm64"}}})
	tag, err := name.ParseReference(r.host + "/armindex:1")
	if err == nil {
		err = remote.WriteIndex(tag, index)
	}
	if err != nil {
		t.Fatal(err)
	}
	l, _ := newLibrary(t)
	for _, ref := range []string{ref, r.host + "/armindex:1"} {
		if _, err := l.Pull(t.Context(), ref, quick(t), nil); cloche.ErrorCode(err) != cloche.CodeInvalid || !strings.Contains(err.Error(), "linux/amd64") {
			t.Errorf("pull %s: %v; want bad_request that names linux/amd64", ref, err)
		}
	}
}

// TestPullResumes cuts each connection that carries a layer after a part of it:
// the pull goes on where it was, and no byte is fetched twice but for what was
// in flight.
func TestPullResumes(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	const size, part = 8 << 20, 2 << 20
	r := newRegistry(t)
	ref, _ := r.push(t, "big:1", imageOf(t, v1.Config{}, compression.None, layerOf{file("big", random(size))}.bytes(t)))
	var cuts atomic.Int64
	cut := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			next.ServeHTTP(cuttingWriter{w, new(int64), part, &cuts}, req)
		})
	}
	r.wrap.Store(&cut)
	l, _ := newLibrary(t)
	o := quick(t)
	img, err := l.Pull(t.Context(), ref, o, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(l.treePath(img.ID), "big"))
	if err != nil || string(b) != random(size) {
		t.Errorf("content differs after a resumed pull: %d bytes, %v", len(b), err)
	}
	if cuts.Load() < 3 {
		t.Errorf("%d cuts; the test wants at least 3", cuts.Load())
	}
	var sent int64
	r.gets.Range(func(_, n any) bool { sent += n.(*atomic.Int64).Load(); return true })
	if sent > size+size/2 {
		t.Errorf("%d bytes were sent for %d", sent, size)
	}
}

// cuttingWriter breaks the connection after limit bytes.
type cuttingWriter struct {
	http.ResponseWriter
	n     *int64
	limit int64
	cuts  *atomic.Int64
}

func (c cuttingWriter) Write(p []byte) (int, error) {
	if *c.n+int64(len(p)) > c.limit {
		// Errors are of a client that is gone already.
		_, _ = c.ResponseWriter.Write(p[:c.limit-*c.n])
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		c.cuts.Add(1)
		panic(http.ErrAbortHandler)
	}
	n, err := c.ResponseWriter.Write(p)
	*c.n += int64(n)
	return n, err
}

// TestPullContinuesInAnotherProcess gives up in the middle and finishes with
// another library and the same cache.
func TestPullContinuesInAnotherProcess(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	const size, part = 4 << 20, 3 << 20
	r := newRegistry(t)
	ref, _ := r.push(t, "big:1", imageOf(t, v1.Config{}, compression.None, layerOf{file("big", random(size))}.bytes(t)))
	var cuts atomic.Int64
	dead := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if cuts.Load() > 0 && strings.Contains(req.URL.Path, "/blobs/") {
				panic(http.ErrAbortHandler)
			}
			next.ServeHTTP(cuttingWriter{w, new(int64), part, &cuts}, req)
		})
	}
	r.wrap.Store(&dead)
	o := quick(t)
	l, records := newLibrary(t)
	if _, err := l.Pull(t.Context(), ref, o, nil); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Fatalf("pull from a dead registry: %v; want unavailable", err)
	}
	if len(records.list) != 0 {
		t.Errorf("a broken pull is listed: %v", records.list)
	}
	assertEntries(t, l.dir)
	r.wrap.Store(nil)
	r.gets.Clear()
	other, _ := newLibrary(t)
	if _, err := other.Pull(t.Context(), ref, o, nil); err != nil {
		t.Fatal(err)
	}
	var sent int64
	r.gets.Range(func(_, n any) bool { sent += n.(*atomic.Int64).Load(); return true })
	if sent > size-part+1<<20 {
		t.Errorf("%d bytes were sent to finish %d of %d", sent, size-part, size)
	}
	r.gets.Clear()
	third, _ := newLibrary(t)
	if _, err := third.Pull(t.Context(), ref, o, nil); err != nil {
		t.Fatal(err)
	}
	r.gets.Range(func(path, n any) bool {
		if sent := n.(*atomic.Int64).Load(); sent > 4096 { // the configuration
			t.Errorf("%v was fetched again with the cache full", path)
		}
		return true
	})
}

func TestPullDamagedPart(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := newRegistry(t)
	img := imageOf(t, v1.Config{}, compression.None, layerOf{file("big", random(1<<20))}.bytes(t))
	ref, _ := r.push(t, "big:1", img)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	o := quick(t)
	blobs := filepath.Join(o.CacheDir, "blobs")
	if err := os.MkdirAll(blobs, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(blobs, "sha256-"+digest.Hex+".partial"), make([]byte, 1<<19), 0o600); err != nil {
		t.Fatal(err)
	}
	l, _ := newLibrary(t)
	if _, err := l.Pull(t.Context(), ref, o, nil); err != nil {
		t.Errorf("pull over a part that a crash filled with zeros: %v", err)
	}
}

// TestPullLies has a registry send other bytes than it promised.
func TestPullLies(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	layer := layerOf{file("f", random(1<<20))}.bytes(t)
	for what, change := range map[string]func(b []byte) []byte{
		"other bytes": func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"more bytes":  func(b []byte) []byte { return append(b, 'x') },
	} {
		r := newRegistry(t)
		ref, _ := r.push(t, "liar:1", imageOf(t, v1.Config{}, compression.None, layer))
		lie := func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, req)
				body := rec.Body.Bytes()
				if strings.Contains(req.URL.Path, "/blobs/") && len(body) > 1<<19 {
					body = change(body)
				}
				for k, v := range rec.Header() {
					if k != "Content-Length" {
						w.Header()[k] = v
					}
				}
				w.WriteHeader(rec.Code)
				_, _ = w.Write(body) // the client hangs up on too many
			})
		}
		r.wrap.Store(&lie)
		l, _ := newLibrary(t)
		if img, err := l.Pull(t.Context(), ref, quick(t), nil); err == nil {
			t.Errorf("%s: pull succeeded with %s", what, img.Reference())
		}
		assertEntries(t, l.dir)
	}
}

// TestPullWrongDiffID has a configuration that promises other content than its
// layers have.
func TestPullWrongDiffID(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := newRegistry(t)
	img := imageOf(t, v1.Config{}, compression.GZip, layerOf{file("f", "x")}.bytes(t))
	f, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	f = f.DeepCopy()
	f.RootFS.DiffIDs[0] = v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("0", 64)}
	if img, err = mutate.ConfigFile(img, f); err != nil {
		t.Fatal(err)
	}
	ref, _ := r.push(t, "wrong:1", img)
	l, _ := newLibrary(t)
	if _, err := l.Pull(t.Context(), ref, quick(t), nil); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("pull: %v; want bad_request", err)
	}
	assertEntries(t, l.dir)
}

func TestPullCredentials(t *testing.T) {
	asRoot(t)
	r := newRegistry(t)
	ref, _ := r.push(t, "private:1", imageOf(t, v1.Config{}, compression.GZip, layerOf{file("f", "x")}.bytes(t)))
	closed := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if user, pass, ok := req.BasicAuth(); !ok || user != "ada" || pass != "secret" {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, req)
		})
	}
	r.wrap.Store(&closed)
	config := func(password string) string {
		dir := t.TempDir()
		text := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host, base64.StdEncoding.EncodeToString([]byte("ada:"+password)))
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	l, _ := newLibrary(t)
	for _, dir := range []string{t.TempDir(), config("wrong")} {
		t.Setenv("DOCKER_CONFIG", dir)
		if _, err := l.Pull(t.Context(), ref, quick(t), nil); cloche.ErrorCode(err) != cloche.CodeForbidden || !strings.Contains(err.Error(), "docker login") {
			t.Errorf("pull without the password: %v; want forbidden that says how to log in", err)
		}
	}
	t.Setenv("DOCKER_CONFIG", config("secret"))
	if _, err := l.Pull(t.Context(), ref, quick(t), nil); err != nil {
		t.Errorf("pull with the password of the Docker configuration: %v", err)
	}
}

func TestPullLimits(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := newRegistry(t)
	ref, _ := r.push(t, "large:1", imageOf(t, v1.Config{}, compression.GZip,
		layerOf{file("a", strings.Repeat("x", 1<<20)), file("b", "")}.bytes(t), layerOf{file("c", random(1<<16))}.bytes(t)))
	for what, lim := range map[string]Limits{
		"bytes": {Bytes: 1 << 19}, "files": {Files: 2}, "layers": {Layers: 1}, "blob": {Blob: 1 << 15},
	} {
		l, _ := newLibrary(t)
		o := quick(t)
		o.Limits = lim
		if _, err := l.Pull(t.Context(), ref, o, nil); cloche.ErrorCode(err) != cloche.CodeTooLarge {
			t.Errorf("%s: %v; want too_large", what, err)
		}
		assertEntries(t, l.dir)
	}
}

func TestPullUnknown(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := newRegistry(t)
	l, _ := newLibrary(t)
	for ref, want := range map[string]cloche.Code{
		r.host + "/missing:1": cloche.CodeNotFound, "not a reference": cloche.CodeInvalid, "127.0.0.1:1/x": cloche.CodeUnavailable,
	} {
		if _, err := l.Pull(t.Context(), ref, quick(t), nil); cloche.ErrorCode(err) != want {
			t.Errorf("pull %s: %v; want %s", ref, err, want)
		}
	}
}

// TestPlainHTTPOnlyOnLoopback: neither an address of a private network nor a
// redirect gets requests, and credentials, without TLS.
func TestPlainHTTPOnlyOnLoopback(t *testing.T) {
	for _, test := range []struct {
		registry, url string
		allowed       bool
	}{
		{"127.0.0.1:5000", "http://127.0.0.1:5000/v2/", true},
		{"localhost:5000", "http://localhost:5000/v2/", true},
		{"127.0.0.1:5000", "http://192.168.1.2/v2/", false},
		{"192.168.1.2:5000", "http://192.168.1.2:5000/v2/", false},
		{"registry.example", "http://127.0.0.1/v2/", false},
		{"registry.example", "http://registry.example/v2/", false},
		{"registry.example", "https://registry.example/v2/", true},
	} {
		sent := false
		rt := tlsOnly{next: roundTrip(func(*http.Request) (*http.Response, error) {
			sent = true
			return &http.Response{StatusCode: 200, Body: http.NoBody}, nil
		}), local: loopback(test.registry)}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, test.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := rt.RoundTrip(req)
		if err == nil {
			err = resp.Body.Close()
		}
		if sent != test.allowed || (err == nil) != test.allowed {
			t.Errorf("registry %s, request to %s: sent %v, %v; want %v", test.registry, test.url, sent, err, test.allowed)
		}
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func TestPullDialsThroughTransport(t *testing.T) {
	asRoot(t)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	r := newRegistry(t)
	ref, _ := r.push(t, "app:1", imageOf(t, v1.Config{}, compression.GZip, layerOf{file("f", "x")}.bytes(t)))
	refused := cloche.Errorf(cloche.CodeForbidden, "this address is closed")
	o := quick(t)
	o.Transport = roundTrip(func(*http.Request) (*http.Response, error) { return nil, refused })
	l, _ := newLibrary(t)
	if _, err := l.Pull(t.Context(), ref, o, nil); cloche.ErrorCode(err) != cloche.CodeForbidden {
		t.Errorf("pull through a closed dialer: %v; want its forbidden", err)
	}
	o = quick(t)
	o.Transport = roundTrip(func(req *http.Request) (*http.Response, error) {
		if strings.Contains(req.URL.Path, "/blobs/") {
			return nil, refused
		}
		return http.DefaultTransport.RoundTrip(req)
	})
	if _, err := l.Pull(t.Context(), ref, o, nil); cloche.ErrorCode(err) != cloche.CodeForbidden {
		t.Errorf("pull of layers through a closed dialer: %v; want its forbidden", err)
	}
}

func TestDownloadWithoutRange(t *testing.T) {
	content := random(1 << 20)
	sum := sha256.Sum256([]byte(content))
	var tries atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		if tries.Add(1) == 1 {
			_, _ = io.WriteString(w, content[:1<<19])
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, content) // a client that hung up is found below
	}))
	defer srv.Close()
	var last Step
	d := download{client: srv.Client(), url: srv.URL, dest: filepath.Join(t.TempDir(), hex.EncodeToString(sum[:])), size: -1, max: 2 << 20,
		hash: sha256.New, sum: sum[:], meter: Progress(func(s Step) { last = s }).begin("x", 0), patience: quick(t).patience}
	if err := d.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(d.dest)
	if err != nil || string(b) != content {
		t.Errorf("downloaded %d bytes, %v", len(b), err)
	}
	if last.Done != 1<<20 || last.Total != 1<<20 {
		t.Errorf("progress ends at %d of %d; want all of %d", last.Done, last.Total, 1<<20)
	}
}

func TestDownloadBounds(t *testing.T) {
	endless := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		for req.Context().Err() == nil {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				return
			}
		}
	}))
	defer endless.Close()
	silent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush() // what follows is silence either way
		<-req.Context().Done()
	}))
	defer silent.Close()
	for _, test := range []struct {
		srv  *httptest.Server
		want cloche.Code
	}{{endless, cloche.CodeTooLarge}, {silent, cloche.CodeUnavailable}} {
		d := download{client: test.srv.Client(), url: test.srv.URL, dest: filepath.Join(t.TempDir(), "x"), size: -1, max: 1 << 20,
			hash: sha256.New, meter: Progress(nil).begin("x", 0), patience: patience{tries: 2, delay: time.Millisecond, stall: 50 * time.Millisecond}}
		if err := d.run(t.Context()); cloche.ErrorCode(err) != test.want {
			t.Errorf("download: %v; want %s", err, test.want)
		}
	}
}

func TestTrim(t *testing.T) {
	dir := t.TempDir()
	for i, name := range []string{"newest", "middle", "oldest"} {
		path := filepath.Join(dir, name)
		err := os.WriteFile(path, make([]byte, 100), 0o600)
		if err == nil {
			err = os.Chtimes(path, time.Time{}, time.Unix(int64(1e9-1000*i), 0))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := trim(dir, 250); err != nil {
		t.Fatal(err)
	}
	assertEntries(t, dir, "middle", "newest")
}
