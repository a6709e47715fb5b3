package image

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/atomicfile"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// fileRecords is the list of images in a file, which outlives a killed process.
type fileRecords struct{ path string }

func (f fileRecords) Images(context.Context) (list []cloche.Image, err error) {
	b, err := os.ReadFile(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return list, errors.Join(err, json.Unmarshal(b, &list))
}

func (f fileRecords) change(change func([]cloche.Image) []cloche.Image) error {
	list, err := f.Images(context.Background())
	if err != nil {
		return err
	}
	b, err := json.Marshal(change(list))
	return errors.Join(err, atomicfile.Write(f.path, b, 0o600))
}

func (f fileRecords) PutImage(_ context.Context, img cloche.Image) error {
	return f.change(func(l []cloche.Image) []cloche.Image { return append(l, img) })
}

func (f fileRecords) DeleteImage(_ context.Context, id cloche.ImageID) error {
	return f.change(func(l []cloche.Image) []cloche.Image {
		return slices.DeleteFunc(l, func(i cloche.Image) bool { return i.ID == id })
	})
}

const crashDir = "CLOCHE_TEST_CRASH_DIR"

// TestCrashChild is the process that TestCrash kills: it makes an image, and
// removes the one that was there.
func TestCrashChild(t *testing.T) {
	dir := os.Getenv(crashDir)
	if dir == "" {
		t.Skip("part of TestCrash")
	}
	l, err := Open(filepath.Join(dir, "images"), fileRecords{filepath.Join(dir, "records")}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	addFile(t, l, "new", "content")
	old, err := l.Image(t.Context(), "@")
	if err == nil {
		err = l.Remove(t.Context(), old.ID)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestCrash kills a process at every failpoint of this package and recovers:
// each image that is listed is whole, and nothing else is left.
func TestCrash(t *testing.T) {
	for _, mark := range failpoints(t) {
		t.Run(filepath.Base(filepath.Dir(mark))+" "+filepath.Base(mark), func(t *testing.T) {
			dir := t.TempDir()
			l, err := Open(filepath.Join(dir, "images"), fileRecords{filepath.Join(dir, "records")}, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			addFile(t, l, cloche.DefaultImage, "old")
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCrashChild$")
			cmd.Env = append(os.Environ(), crashDir+"="+dir, failpoint.EnvVar+"="+mark)
			if out, err := cmd.CombinedOutput(); err == nil || err.Error() != "signal: killed" {
				t.Fatalf("the process was not killed at %s: %v\n%s", mark, err, out)
			}
			if err := l.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			list, err := l.List(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var ids []string
			for _, img := range list {
				ids = append(ids, string(img.ID))
				if err := l.Verify(t.Context(), img.ID); err != nil {
					t.Error(err)
				}
			}
			assertEntries(t, l.dir, ids...)
		})
	}
}

// failpoints reads the marks of this package from its sources.
func failpoints(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var marks []string
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`failpoint\.Here\("([^"]+)"\)`).FindAllSubmatch(b, -1) {
			marks = append(marks, string(m[1]))
		}
	}
	if len(marks) < 9 {
		t.Fatalf("found the failpoints %q alone", marks)
	}
	return marks
}
