package image

import (
	"archive/tar"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// digestOf is the digest of a tree that the layers make.
func digestOf(t *testing.T, layers ...layerOf) string {
	t.Helper()
	h := newHostDir(t)
	for _, l := range layers {
		if _, err := h.unpack(t, Limits{}, l.bytes(t)); err != nil {
			t.Fatal(err)
		}
	}
	m, err := measure(t.Context(), h.tree)
	if err != nil {
		t.Fatal(err)
	}
	return m.digest
}

func TestDigestIsOfTheContentAlone(t *testing.T) {
	asRoot(t)
	base := layerOf{dir("d"), file("d/a", "1"), file("b", "2"), link("l", "b"), hard("h", "b")}
	want := digestOf(t, base)
	for what, same := range map[string][]layerOf{
		"order":      {{link("l", "b"), file("h", "2"), hard("b", "h"), dir("d"), file("d/a", "1")}},
		"time":       {{dir("d"), file("d/a", "1").with(func(h *tar.Header) { h.ModTime = h.ModTime.AddDate(9, 0, 0) }), file("b", "2"), link("l", "b"), hard("h", "b")}},
		"two layers": {{file("d/a", "old"), file("x", ""), dir("d")}, {file("d/a", "1"), file("b", "2"), link("l", "b"), hard("h", "b"), file(".wh.x", "")}},
	} {
		if got := digestOf(t, same...); got != want {
			t.Errorf("%s: digest %s; want %s", what, got, want)
		}
	}
	seen := map[string]string{want: "base"}
	attr := func(h *tar.Header) { h.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "b"} }
	for what, other := range map[string]layerOf{
		"content":                  {file("b", "3")},
		"name":                     {file("c", "2")},
		"mode":                     {file("b", "2").with(func(h *tar.Header) { h.Mode = 0o4644 })},
		"uid":                      {file("b", "2").with(func(h *tar.Header) { h.Uid = 1 })},
		"gid":                      {file("b", "2").with(func(h *tar.Header) { h.Gid = 1 })},
		"link target":              {link("l", "a")},
		"no link":                  {file("h", "2")},
		"type":                     {dir("l")},
		"attribute":                {file("b", "2").with(attr), hard("h", "b")},
		"attribute of a directory": {dir("d").with(attr)},
		"root":                     {dir("./").with(func(h *tar.Header) { h.Mode = 0o700 })},
		"strange name":             {file("x\ny\xff", "")},
	} {
		got := digestOf(t, base, other)
		if twin, ok := seen[got]; ok {
			t.Errorf("%s has the digest of %s", what, twin)
		}
		seen[got] = what
	}
}

// TestVerifyFindsAChange is case P11: an image that a run has changed is noticed.
func TestVerifyFindsAChange(t *testing.T) {
	l, _ := newLibrary(t)
	for what, change := range map[string]func(tree string) error{
		"content": func(tree string) error { return os.WriteFile(filepath.Join(tree, "file"), []byte("y"), 0o644) },
		"mode":    func(tree string) error { return os.Chmod(filepath.Join(tree, "file"), 0o600) },
		"added":   func(tree string) error { return os.Mkdir(filepath.Join(tree, "new"), 0o755) },
		"removed": func(tree string) error { return os.Remove(filepath.Join(tree, "file")) },
	} {
		img := addFile(t, l, what, "x")
		if err := l.Verify(t.Context(), img.ID); err != nil {
			t.Errorf("%s: before: %v", what, err)
		}
		if err := change(l.treePath(img.ID)); err != nil {
			t.Fatal(err)
		}
		if err := l.Verify(t.Context(), img.ID); cloche.ErrorCode(err) != cloche.CodeInternal || !strings.Contains(err.Error(), "was changed") {
			t.Errorf("%s: %v; want an error that says so", what, err)
		}
	}
}

func TestMeasureDoesNotFollowOrHang(t *testing.T) {
	h := newHostDir(t)
	for name, make := range map[string]func(path string) error{
		"out":  func(p string) error { return os.Symlink(h.outside, p) },
		"up":   func(p string) error { return os.Symlink("../outside/canary", p) },
		"fifo": func(p string) error { return unix.Mkfifo(p, 0o600) },
	} {
		if err := make(filepath.Join(h.tree, name)); err != nil {
			t.Fatal(err)
		}
	}
	m, err := measure(t.Context(), h.tree)
	if err != nil || m.bytes != 0 || m.files != 3 {
		t.Errorf("measure: %+v, %v; want 3 entries without content", m, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := measure(ctx, h.tree); err == nil {
		t.Error("measure ignores its context")
	}
}
