package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
	"github.com/cloche-dev/cloche/internal/testenv"
)

// ociFile is a file of a test image; without content it is a directory.
type ociFile struct {
	name    string
	content []byte
	uid     int
}

// ociImage makes an image of one layer.
func ociImage(t *testing.T, config v1.Config, files ...ociFile) v1.Image {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: 0o755, Size: int64(len(f.content)), Typeflag: tar.TypeReg, Uid: f.uid, Gid: f.uid}
		if f.content == nil {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: "amd64", Config: config, RootFS: rootFS(t, img)})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func rootFS(t *testing.T, img v1.Image) v1.RootFS {
	t.Helper()
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	return c.RootFS
}

// probe builds the program of testdata/probe.
func probe(t *testing.T) []byte {
	t.Helper()
	file := filepath.Join(t.TempDir(), "probe")
	c := exec.Command("go", "build", "-o", file, "./testdata/probe")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("build the probe: %v\n%s", err, out)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// probed is what the program of testdata/probe says.
type probed struct {
	UID, GID   int
	Dir, Stdin string
	Env        map[string]string
	Args       []string
}

// probe runs the program in a sandbox.
func (s *server) probe(v client.View, r client.Run) (p probed) {
	s.t.Helper()
	r.Command = "/bin/probe"
	res, err := s.try(v.Session.ID, r)
	if err != nil || res.code != 0 {
		s.t.Fatalf("probe: %+v, %v", res, err)
	}
	if err := json.Unmarshal([]byte(res.stdout), &p); err != nil {
		s.t.Fatalf("%q: %v", res.stdout, err)
	}
	return p
}

// pulled pushes an image to a registry of the test, lets the running server pull
// it, and returns its reference.
func (s *server) pulled(repository string, img v1.Image) string {
	s.t.Helper()
	ref, err := name.ParseReference(repository)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := remote.Write(ref, img, remote.WithContext(s.t.Context())); err != nil {
		s.t.Fatal(err)
	}
	out, err := exec.Command(testenv.Cloche(s.t), "image", "pull", repository, "--data", s.data, "--json").CombinedOutput()
	if err != nil {
		s.t.Fatalf("cloche image pull: %v\n%s", err, out)
	}
	return repository
}

// imageServer is a server that pulls into a directory of its own: the one that
// the other tests share stays as it is.
func imageServer(t *testing.T) (s *server, registryHost string) {
	t.Helper()
	testenv.Root(t)
	t.Setenv("CLOCHE_CACHE", testenv.CacheDir(t))
	s = &server{t: t, data: filepath.Join(t.TempDir(), "data")}
	s.start()
	t.Cleanup(s.finish)
	r := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(r.Close)
	return s, strings.TrimPrefix(r.URL, "http://")
}

// TestPulledImages: images that were not made for Cloche run as they say.
func TestPulledImages(t *testing.T) {
	s, host := imageServer(t)
	bin := ociFile{name: "bin/probe", content: probe(t)}
	t.Run("scratch", func(t *testing.T) { imageScratch(t, s.in(t), host, bin) })
	t.Run("numeric user", func(t *testing.T) { imageNumericUser(t, s.in(t), host, bin) })
	t.Run("small", func(t *testing.T) { imageSmall(t, s.in(t), host, bin) })
	t.Run("no such user", func(t *testing.T) { imageNoSuchUser(t, s.in(t), host, bin) })
	t.Run("not there", func(t *testing.T) {
		out, err := exec.Command(testenv.Cloche(t), "image", "pull", host+"/none:1", "--data", s.data).CombinedOutput()
		if err == nil || !strings.Contains(string(out), host+"/none") {
			t.Errorf("%v: %s", err, out)
		}
	})
}

// imageScratch is one static program and nothing else: no shell, no users, no
// /tmp.
func imageScratch(t *testing.T, s *server, host string, bin ociFile) {
	ref := s.pulled(host+"/scratch:1", ociImage(t, v1.Config{}, bin))
	v := s.create(client.Create{Image: ref, Env: map[string]string{"BASE": "b"}})
	if !strings.HasPrefix(v.Sandbox.Image, ref+"@sha256:") {
		t.Errorf("the sandbox's image is %q", v.Sandbox.Image)
	}
	p := s.probe(v, client.Run{Args: []string{"a", "ü "}, Env: map[string]string{"X": "y"}, Stdin: strings.NewReader("in")})
	if p.UID != 0 || p.GID != 0 || p.Dir != cloche.DefaultWorkDir || p.Stdin != "in" || len(p.Args) != 2 || p.Args[1] != "ü " ||
		p.Env["BASE"] != "b" || p.Env["X"] != "y" || p.Env["HOME"] == "" {
		t.Errorf("%+v", p)
	}
	if p := s.probe(v, client.Run{Sudo: true}); p.UID != 0 {
		t.Errorf("as root: %+v", p)
	}
	for _, missing := range []string{"bash", "sudo", "sh", "test"} {
		if res, err := s.try(v.Session.ID, client.Run{Command: missing}); err != nil || res.code != 127 {
			t.Errorf("%s: %+v, %v", missing, res, err)
		}
	}
	if err := s.c.WriteFiles(t.Context(), v.Session.ID, "/new/dir", tarOf(t, "file", 3, strings.NewReader("abc"))); err != nil {
		t.Error(err)
	}
	if got := s.read(v, "/new/dir/file"); got != "abc" {
		t.Errorf("read %q", got)
	}
	if p := s.probe(v, client.Run{WorkDir: "/new/dir"}); p.Dir != "/new/dir" {
		t.Errorf("in a directory: %+v", p)
	}
	// The image is not what a sandbox made of it.
	again := s.create(client.Create{Image: v.Sandbox.Image})
	if f, err := s.c.ReadFile(t.Context(), again.Session.ID, "/new/dir/file"); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("a file of another sandbox: %v, %v", f, err)
	}
}

// read returns a file of a sandbox.
func (s *server) read(v client.View, path string) string {
	s.t.Helper()
	f, err := s.c.ReadFile(s.t.Context(), v.Session.ID, path)
	if err != nil {
		s.t.Fatalf("read %s: %v", path, err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		s.t.Fatalf("read %s: %v", path, err)
	}
	return string(b)
}

// imageNumericUser has a user that no file of the image knows.
func imageNumericUser(t *testing.T, s *server, host string, bin ociFile) {
	ref := s.pulled(host+"/numeric:1", ociImage(t, v1.Config{User: "1234:5678", WorkingDir: "/data"}, bin, ociFile{name: "data", uid: 1234}))
	v := s.create(client.Create{Image: ref})
	if p := s.probe(v, client.Run{}); p.UID != 1234 || p.GID != 5678 || p.Dir != "/data" {
		t.Errorf("%+v", p)
	}
	if p := s.probe(v, client.Run{Sudo: true}); p.UID != 0 || p.GID != 0 || p.Env["HOME"] != "/root" {
		t.Errorf("as root: %+v", p)
	}
	if err := s.c.WriteFiles(t.Context(), v.Session.ID, "", tarOf(t, "own", 2, strings.NewReader("ok"))); err != nil {
		t.Error(err)
	}
	if got := s.read(v, "own"); got != "ok" {
		t.Errorf("read %q", got)
	}
	if err := s.c.WriteFiles(t.Context(), v.Session.ID, "/bin", tarOf(t, "probe", 1, strings.NewReader("x"))); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("a write over root's file: %v", err)
	}
}

// imageSmall has a shell and a user, but neither bash nor sudo nor tar nor what
// makes users.
func imageSmall(t *testing.T, s *server, host string, bin ociFile) {
	files := []ociFile{bin, {name: "etc/passwd", content: []byte("root:x:0:0::/root:/bin/sh\napp:x:77:78::/srv/app:/bin/sh\n")},
		{name: "etc/group", content: []byte("root:x:0:\napp:x:78:\nextra:x:79:app\n")}, {name: "srv/app", uid: 77}}
	trees, err := filepath.Glob(filepath.Join(templateData(t), "images", "*", "tree"))
	if err != nil || len(trees) == 0 { // earlier recipes' may be there too
		t.Fatalf("%v, %v", trees, err)
	}
	for target, source := range map[string]string{
		"bin/sh": "usr/bin/dash", "bin/cat": "usr/bin/cat", "bin/sleep": "usr/bin/sleep",
		"lib/x86_64-linux-gnu/libc.so.6": "usr/lib/x86_64-linux-gnu/libc.so.6", "lib64/ld-linux-x86-64.so.2": "usr/lib64/ld-linux-x86-64.so.2",
	} {
		b, err := os.ReadFile(filepath.Join(trees[0], source))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, ociFile{name: target, content: b})
	}
	config := v1.Config{User: "app", WorkingDir: "/srv/app", Env: []string{"PATH=/bin", "GREETING=hi there", "EMPTY="},
		Entrypoint: []string{"/bin/false"}, Cmd: []string{"nothing"}}
	v := s.create(client.Create{Image: s.pulled(host+"/deep/small:tag", ociImage(t, config, files...)), Env: map[string]string{"EMPTY": "not"}})
	res, err := s.try(v.Session.ID, client.Run{Command: "sh", Args: []string{"-c", `echo "$GREETING|$EMPTY|$HOME|$PATH"; cat; exit 4`}, Stdin: strings.NewReader("in\n")})
	if err != nil || res.stdout != "hi there|not|/srv/app|/bin\nin\n" || res.code != 4 {
		t.Errorf("%+v, %v", res, err)
	}
	if p := s.probe(v, client.Run{}); p.UID != 77 || p.GID != 78 || p.Dir != "/srv/app" || p.Env["USER"] != "app" {
		t.Errorf("%+v", p)
	}
	if p := s.probe(v, client.Run{Sudo: true}); p.UID != 0 || p.Env["HOME"] != "/root" || p.Env["SUDO_USER"] != "app" || p.Env["GREETING"] != "hi there" {
		t.Errorf("as root: %+v", p)
	}
	if res, err := s.try(v.Session.ID, client.Run{Command: "bash"}); err != nil || res.code != 127 {
		t.Errorf("bash: %+v, %v", res, err)
	}
	res, err = s.try(v.Session.ID, client.Run{Command: "sh", Args: []string{"-c", "kill -9 $$"}})
	if err != nil || res.code != 137 {
		t.Errorf("a signal: %+v, %v", res, err)
	}
}

// imageNoSuchUser cannot run, and the error says why.
func imageNoSuchUser(t *testing.T, s *server, host string, bin ociFile) {
	ref := s.pulled(host+"/nouser:1", ociImage(t, v1.Config{User: "phantom"}, bin))
	_, err := s.c.Create(t.Context(), client.Create{Image: ref, Name: "phantom-box"})
	if cloche.ErrorCode(err) != cloche.CodeInvalid || !strings.Contains(err.Error(), "phantom") {
		t.Errorf("create: %v", err)
	}
	if _, err := s.c.GetSandbox(t.Context(), "phantom-box", false); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("get after a failed create: %v", err)
	}
}
