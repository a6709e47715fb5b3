package image

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cloche-dev/cloche"
)

// memRecords is the list of images in memory.
type memRecords struct {
	mu   sync.Mutex
	list []cloche.Image
	fail error // of PutImage
}

func (m *memRecords) PutImage(_ context.Context, img cloche.Image) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail == nil {
		m.list = append(m.list, img)
	}
	return m.fail
}

func (m *memRecords) Images(context.Context) ([]cloche.Image, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.list), nil
}

func (m *memRecords) DeleteImage(_ context.Context, id cloche.ImageID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !slices.ContainsFunc(m.list, func(i cloche.Image) bool { return i.ID == id }) {
		return cloche.Errorf(cloche.CodeNotFound, "no image %s", id)
	}
	m.list = slices.DeleteFunc(m.list, func(i cloche.Image) bool { return i.ID == id })
	return nil
}

func newLibrary(t *testing.T) (*Library, *memRecords) {
	t.Helper()
	records := &memRecords{}
	l, err := Open(t.TempDir()+"/images", records, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return l, records
}

// asRoot skips a test that sets owners, and says so on standard error.
func asRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		fmt.Fprintf(os.Stderr, "SKIPPED %s: it needs root, to set the owners of files\n", t.Name())
		t.Skip("needs root")
	}
}

// addFile puts an image with one file into the library.
func addFile(t *testing.T, l *Library, name, content string) cloche.Image {
	t.Helper()
	img, err := l.add(t.Context(), nil, func(_ context.Context, tree string) (draft, error) {
		return draft{name: name, source: "a test"}, os.WriteFile(filepath.Join(tree, "file"), []byte(content), 0o644)
	})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func TestImageByName(t *testing.T) {
	l, _ := newLibrary(t)
	old := addFile(t, l, "universal", "old")
	universal := addFile(t, l, "universal", "new")
	hub := addFile(t, l, "universal:latest", "a stranger's")
	node := addFile(t, l, "docker.io/library/node:22", "node")
	for ref, want := range map[string]cloche.ImageID{
		"":                                      universal.ID,
		"universal":                             universal.ID,
		"universal@" + old.Digest:               old.ID,
		"@" + old.Digest:                        old.ID,
		"vercel/sandbox/universal":              universal.ID,
		"vercel/sandbox/universal:latest":       universal.ID,
		"universal:latest":                      hub.ID,
		"node:22":                               node.ID,
		"docker.io/library/node:22":             node.ID,
		"index.docker.io/library/node:22":       node.ID,
		"node@" + node.Digest:                   node.ID,
		"node:22@" + node.Digest:                node.ID,
		"docker.io/library/node@" + node.Digest: node.ID,
	} {
		if got, err := l.Image(t.Context(), ref); err != nil || got.ID != want {
			t.Errorf("Image(%q) = %s, %v; want %s", ref, got.ID, err, want)
		}
	}
}

func TestUnknownImageSaysHowToGetIt(t *testing.T) {
	l, _ := newLibrary(t)
	addFile(t, l, "universal:latest", "a stranger's")
	zero := "sha256:" + strings.Repeat("0", 64)
	for ref, want := range map[string]string{
		"":                  "cloche image build universal",
		"universal":         "cloche image build universal",
		"universal@" + zero: "cloche image build universal",
		"node:22":           "cloche image pull node:22",
		"node@" + zero:      "cloche image pull node@" + zero,
		"gcr.io/a/b:c":      "cloche image pull gcr.io/a/b:c",
	} {
		_, err := l.Image(t.Context(), ref)
		if cloche.ErrorCode(err) != cloche.CodeNotFound || !strings.Contains(err.Error(), want) {
			t.Errorf("Image(%q): %v; want not_found with %q", ref, err, want)
		}
	}
	for _, ref := range []string{"UPPER/case", "a b", strings.Repeat("x", 600), "\xff"} {
		if _, err := l.Image(t.Context(), ref); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("Image(%q): %v; want bad_request", ref, err)
		}
	}
}

func TestTreeOfMalformedID(t *testing.T) {
	l, _ := newLibrary(t)
	for _, id := range []cloche.ImageID{"", "..", "img_../../../../etc/passwd.....", "img_"} {
		if _, err := l.Tree(t.Context(), id); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("Tree(%q): %v; want bad_request", id, err)
		}
	}
	if _, err := l.Tree(t.Context(), cloche.NewImageID()); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("Tree of an unknown id: %v; want not_found", err)
	}
}

func TestDirectoryIsClosed(t *testing.T) {
	l, _ := newLibrary(t)
	img := addFile(t, l, "universal", "x")
	for path, want := range map[string]os.FileMode{l.dir: 0o700, filepath.Join(l.dir, string(img.ID)): 0o700, l.treePath(img.ID): 0o755} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want mode %o", path, info.Mode(), err, want)
		}
	}
}

func TestRemove(t *testing.T) {
	l, records := newLibrary(t)
	img := addFile(t, l, "universal", "x")
	other := addFile(t, l, "universal", "y")
	if err := l.Remove(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Tree(t.Context(), img.ID); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("Tree after Remove: %v; want not_found", err)
	}
	if err := l.Remove(t.Context(), img.ID); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("second Remove: %v; want not_found", err)
	}
	if len(records.list) != 1 || records.list[0].ID != other.ID {
		t.Errorf("records after Remove: %v; want %s alone", records.list, other.ID)
	}
	assertEntries(t, l.dir, string(other.ID))
}

func TestSameContentIsOneImage(t *testing.T) {
	l, _ := newLibrary(t)
	a, b := addFile(t, l, "universal", "x"), addFile(t, l, "universal", "x")
	if a.ID != b.ID {
		t.Errorf("two images %s and %s of one name and digest", a.ID, b.ID)
	}
	assertEntries(t, l.dir, string(a.ID))
}

func TestFailedAddLeavesNothing(t *testing.T) {
	l, records := newLibrary(t)
	boom := errors.New("boom")
	_, err := l.add(t.Context(), nil, func(_ context.Context, tree string) (draft, error) {
		return draft{}, errors.Join(boom, os.WriteFile(filepath.Join(tree, "file"), nil, 0o644))
	})
	if !errors.Is(err, boom) {
		t.Errorf("add: %v; want the error of fill", err)
	}
	assertEntries(t, l.dir)
	records.fail = boom
	_, err = l.add(t.Context(), nil, func(context.Context, string) (draft, error) { return draft{name: "n"}, nil })
	if !errors.Is(err, boom) {
		t.Errorf("add: %v; want the error of the records", err)
	}
	assertEntries(t, l.dir)
}

func TestRecoverRemovesHalfMadeImages(t *testing.T) {
	l, _ := newLibrary(t)
	whole := addFile(t, l, "universal", "x")
	busy := cloche.NewImageID()
	defer l.hold(busy)()
	for _, d := range []string{newDir + string(cloche.NewImageID()), goneDir + string(cloche.NewImageID()),
		string(cloche.NewImageID()), newDir + string(busy), "lost+found"} {
		if err := os.MkdirAll(filepath.Join(l.dir, d, treeDir, "deep"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	assertEntries(t, l.dir, newDir+string(busy), string(whole.ID), "lost+found")
}

func TestRecordWithoutTreeIsNotListed(t *testing.T) {
	l, _ := newLibrary(t)
	old := addFile(t, l, "universal", "old")
	lost := addFile(t, l, "universal", "new")
	if err := os.RemoveAll(filepath.Join(l.dir, string(lost.ID))); err != nil {
		t.Fatal(err)
	}
	if img, err := l.Image(t.Context(), ""); err != nil || img.ID != old.ID {
		t.Errorf("Image = %s, %v; want the one that is there, %s", img.ID, err, old.ID)
	}
}

// assertEntries compares the names in dir, in any order.
func assertEntries(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%s has %q; want %q", dir, got, want)
	}
}
