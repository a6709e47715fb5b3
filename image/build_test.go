package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/cloche-dev/cloche"
)

// aptDir is an /etc/apt with these files.
func aptDir(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestHostMirrors(t *testing.T) {
	list := filepath.Join(t.TempDir(), "mirrors.list")
	if err := os.WriteFile(list, []byte("# ours\nhttps://first.example/debian/\tpriority:1\nhttps://second.example/debian\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	fallback := mirrors{"http://public.example/debian", "http://public.example/debian-security"}
	for name, test := range map[string]struct {
		files map[string]string
		want  mirrors
	}{
		"nothing": {nil, fallback},
		"one line": {map[string]string{"sources.list": "# deb http://no.example/debian bookworm main\n" +
			"deb-src http://src.example/debian bookworm main\ndeb cdrom:[Debian]/ bookworm main\n" +
			"deb [arch=amd64 signed-by=/k.gpg]  http://in.example/debian/ bookworm main contrib # ours\n" +
			"deb http://in.example/sec bookworm-security main\ndeb http://up.example/debian bookworm-updates main\n"},
			mirrors{"http://in.example/debian", "http://in.example/sec"}},
		"old security": {map[string]string{"sources.list": "deb http://a.example/debian bullseye main\ndeb http://a.example/s bullseye/updates main\n"},
			mirrors{"http://a.example/debian", fallback.security}},
		"deb822": {map[string]string{"sources.list.d/debian.sources": "Types: deb deb-src\n# a comment\nURIs: https://in.example/debian/\nSuites: bookworm\n bookworm-updates\nComponents: main\n\n\n" +
			"Types: deb\nURIs: https://in.example/sec\nSuites: bookworm-security\nComponents: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n x\n"},
			mirrors{"https://in.example/debian", "https://in.example/sec"}},
		"disabled":    {map[string]string{"sources.list.d/a.sources": "Enabled: no\nTypes: deb\nURIs: https://off.example/debian\nSuites: trixie\nComponents: main\n"}, fallback},
		"source only": {map[string]string{"sources.list.d/a.sources": "Types: deb-src\nURIs: https://off.example/debian\nSuites: trixie\nComponents: main\n"}, fallback},
		"of others": {map[string]string{"sources.list.d/x.list": "deb https://d.example/linux/debian bookworm stable\ndeb https://c.example/apt cloud-sdk main\n" +
			"deb http://archive.example/ubuntu noble main\n", "sources.list.d/y.sources": "Types: deb\nURIs: https://n.example/\nSuites: nodistro\nComponents: main\n"}, fallback},
		"mirror list": {map[string]string{"sources.list": "deb mirror+file:" + list + " trixie main\ndeb mirror+file:/none trixie-security main\n"},
			mirrors{"https://first.example/debian", fallback.security}},
		"other endings": {map[string]string{"sources.list.d/a.list.save": "deb http://saved.example/debian trixie main\n"}, fallback},
	} {
		got, err := hostMirrors(aptDir(t, test.files), fallback)
		if err != nil || got != test.want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, test.want)
		}
	}
}

func FuzzAptSources(f *testing.F) {
	f.Add("deb [a=b] http://x.example/debian trixie main\n")
	f.Add("Types: deb\nURIs: http://x.example\nSuites: trixie\n sid\nComponents: main\n\n: \n x")
	f.Fuzz(func(t *testing.T, text string) {
		for _, s := range append(parseList(text), parseSources(text)...) {
			if strings.ContainsAny(s.uri+s.suite, " \n") {
				t.Errorf("source with blanks: %+v", s)
			}
		}
	})
}

func TestAcquireSettings(t *testing.T) {
	for line, want := range map[string]bool{
		`Acquire::http::Proxy "http://proxy.example:3128/";`:  true,
		`Acquire::http::Proxy::deb.example "DIRECT";`:         true,
		`Acquire::https::CaInfo "/etc/ca.pem";`:               true,
		`Acquire::Retries "5";`:                               true,
		`Acquire::Check-Valid-Until "false";`:                 true,
		`Acquire::AllowInsecureRepositories "1";`:             false,
		`Acquire::Languages:: "none";`:                        false,
		`APT::Update::Post-Invoke:: "rm -rf /var/cache/apt";`: false,
		`Acquire::http "";`:                                   false,
	} {
		if got := acquireKeep.MatchString(line); got != want {
			t.Errorf("%s is kept: %v; want %v", line, got, want)
		}
	}
}

func TestRecipes(t *testing.T) {
	names, err := recipeNames()
	if err != nil || !slices.Contains(names, cloche.DefaultImage) {
		t.Fatalf("recipes are %q, %v", names, err)
	}
	for _, name := range names {
		r, err := loadRecipe(name)
		if err != nil {
			t.Fatal(err)
		}
		for rt, c := range r.Config.Runtimes {
			if !filepath.IsAbs(c.Path) || c.User == "" {
				t.Errorf("%s: runtime %s is %+v", name, rt, c)
			}
		}
		if err := r.writeOverlay(t.TempDir(), "trixie"); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"", ".", "..", "none", "universal/overlay"} {
		if _, err := loadRecipe(name); cloche.ErrorCode(err) != cloche.CodeNotFound || !strings.Contains(err.Error(), "universal") {
			t.Errorf("recipe %q: %v; want not_found that says which there are", name, err)
		}
	}
}

func TestRecipeHash(t *testing.T) {
	base := fstest.MapFS{"recipe.toml": {Data: []byte("a")}, "setup.sh": {Data: []byte("b")}}
	want, err := hashFiles(base)
	if err != nil {
		t.Fatal(err)
	}
	for what, files := range map[string]fstest.MapFS{
		"content": {"recipe.toml": {Data: []byte("a")}, "setup.sh": {Data: []byte("c")}},
		"name":    {"recipe.toml": {Data: []byte("a")}, "setup.py": {Data: []byte("b")}},
		"more":    {"recipe.toml": {Data: []byte("a")}, "setup.sh": {Data: []byte("b")}, "overlay/x": {}},
	} {
		if got, err := hashFiles(files); err != nil || got == want {
			t.Errorf("%s: hash %s, %v; want another", what, got, err)
		}
	}
	a, b := recipe{name: "x", hash: "1"}, recipe{name: "x", hash: "2"}
	if a.product("") == b.product("") || a.product("") == a.product("trixie") {
		t.Error("products of different recipes or releases have one name")
	}
}

func TestRuntimeNeedsItsFile(t *testing.T) {
	r := &recipe{Config: cloche.ImageConfig{Runtimes: map[string]cloche.Runtime{"a": {Path: "/a"}, "b": {Path: "/b"}, "c": {Path: "/c"}}},
		Needs: map[string]string{"a": "/have", "b": "/have-not"}}
	tree := t.TempDir()
	if err := os.WriteFile(filepath.Join(tree, "have"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	cfg, err := r.config(tree)
	if _, a := cfg.Runtimes["a"]; err != nil || len(cfg.Runtimes) != 2 || !a {
		t.Errorf("runtimes are %v, %v; want a and c", cfg.Runtimes, err)
	}
}

// npmServer is a registry with one package.
func npmServer(t *testing.T, tarball []byte, integrity string) (url string) {
	t.Helper()
	mux := http.NewServeMux()
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	mux.HandleFunc("GET /tool", func(w http.ResponseWriter, _ *http.Request) {
		var versions []string
		for _, v := range []string{"24.9.0", "24.10.1", "24.11.0-rc.1", "24.2.9", "25.0.0", "2.4.1"} {
			versions = append(versions, fmt.Sprintf(`%q:{"version":%q,"dist":{"tarball":"%s/tool-%s.tgz","integrity":%q}}`, v, v, srv.URL, v, integrity))
		}
		fmt.Fprintf(w, `{"name":"tool","versions":{%s}}`, strings.Join(versions, ","))
	})
	mux.HandleFunc("GET /tool-24.10.1.tgz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(tarball) // a client that hung up sees it
	})
	return srv.URL + "/"
}

func TestNPM(t *testing.T) {
	asRoot(t)
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write(layerOf{
		file("package/bin/tool", "x").with(func(h *tar.Header) { h.Mode, h.Uid = 0o777, 70000 }), file("package/LICENSE", "l"),
		file("package/docs/x", "d"), file("package/../../escape", "e"), link("package/l", "/etc"),
	}.bytes(t))
	if cerr := z.Close(); err != nil || cerr != nil {
		t.Fatal(err, cerr)
	}
	sum := sha512.Sum512(b.Bytes())
	good := "sha512-" + base64.StdEncoding.EncodeToString(sum[:])
	p := npmPackage{Package: "tool", Major: 24, Into: "/opt/tool", Only: []string{"bin", "LICENSE"}}
	m := Progress(nil).begin("x", 0)
	path, version, err := fetchNPM(t.Context(), http.DefaultClient, npmServer(t, b.Bytes(), "sha1-xx "+good), t.TempDir(), p, patience{}, m)
	if err != nil || version != "24.10.1" {
		t.Fatalf("fetch: version %q, %v; want 24.10.1", version, err)
	}
	h := newHostDir(t)
	if err := unpackNPM(t.Context(), path, h.tree, p); err != nil {
		t.Fatal(err)
	}
	h.assertIntact(t)
	if got := h.list(t); !slices.Equal(got, []string{"opt/", "opt/tool/", "opt/tool/LICENSE", "opt/tool/bin/", "opt/tool/bin/tool"}) {
		t.Errorf("tree has %q", got)
	}
	info, err := os.Stat(filepath.Join(h.tree, "opt/tool/bin/tool"))
	if err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode of a program: %v, %v; want 755", info.Mode(), err)
	}
	for what, integrity := range map[string]string{"other": "sha512-" + base64.StdEncoding.EncodeToString(make([]byte, 64)), "weak": "sha1-xx", "none": ""} {
		if _, _, err := fetchNPM(t.Context(), http.DefaultClient, npmServer(t, b.Bytes(), integrity), t.TempDir(), p, patience{}, m); err == nil {
			t.Errorf("a tarball with %s integrity was taken", what)
		}
	}
	p.Major = 7
	if _, _, err := fetchNPM(t.Context(), http.DefaultClient, npmServer(t, b.Bytes(), good), t.TempDir(), p, patience{}, m); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("a major that does not exist: %v; want unavailable", err)
	}
}

func TestMissingToolSaysWhatToInstall(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if err := needTools(); cloche.ErrorCode(err) != cloche.CodeUnavailable || !strings.Contains(err.Error(), "apt-get install mmdebstrap") {
		t.Errorf("without mmdebstrap: %v", err)
	}
}

func TestParseURIs(t *testing.T) {
	files, total := parseURIs("Reading package lists...\n'http://x.example/a_1%3a2.deb' a_1%3a2.deb 100 SHA256:00\n'http://x.example/b.deb' b.deb 23 \n'x' ../evil 7 \n")
	if total != 123 || !slices.Equal(files, []string{"a_1%3a2.deb", "b.deb"}) {
		t.Errorf("parsed %q, %d", files, total)
	}
}
