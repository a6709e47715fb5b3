package layer_test

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/layer"
)

func open(t *testing.T, dir string) *layer.Pool {
	t.Helper()
	p, err := layer.Open(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// empty waits until the trash of dir is empty.
func empty(t *testing.T, dir string) {
	t.Helper()
	for t.Context().Err() == nil {
		entries, err := os.ReadDir(filepath.Join(dir, "trash"))
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) == 0 {
			return
		}
		// Nothing tells when the background is done; the test's deadline bounds this.
		unix.Poll(nil, 5)
	}
}

func TestMakeListRemove(t *testing.T) {
	dir := t.TempDir()
	p := open(t, dir)
	id := cloche.NewSessionID()
	top, err := p.Make(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Make(t.Context(), id); cloche.ErrorCode(err) != cloche.CodeConflict {
		t.Errorf("second Make: %v", err)
	}
	if err := os.WriteFile(filepath.Join(top, "f"), []byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	if ids, err := p.List(t.Context()); err != nil || len(ids) != 1 || ids[0] != id {
		t.Errorf("List: %v, %v", ids, err)
	}
	for range 2 {
		if err := p.Remove(t.Context(), id); err != nil {
			t.Errorf("Remove: %v", err)
		}
	}
	if ids, err := p.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("List after: %v, %v", ids, err)
	}
	empty(t, dir)
}

func TestIDsThatAreNoIDs(t *testing.T) {
	p := open(t, t.TempDir())
	for _, id := range []cloche.SessionID{"", "..", "sbx_../../../../../../../../ab"} {
		if _, err := p.Make(t.Context(), id); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("Make %q: %v", id, err)
		}
		if err := p.Remove(t.Context(), id); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("Remove %q: %v", id, err)
		}
	}
}

// A guest's tree is hostile: links that lead out are not followed, directories
// far deeper than PATH_MAX and descriptors allow are deleted all the same.
func TestHostileTree(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	treasure := filepath.Join(outside, "treasure")
	if err := os.WriteFile(treasure, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := open(t, dir)
	id := cloche.NewSessionID()
	top, err := p.Make(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"dir": outside, "file": treasure, "loop": "loop", "up": "../../.."} {
		if err := os.Symlink(target, filepath.Join(top, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(top, "fifo"), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(top, "closed"), 0); err != nil {
		t.Fatal(err)
	}
	deep(t, top, 5000)
	if err := p.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	empty(t, dir)
	if _, err := os.Stat(treasure); errors.Is(err, fs.ErrNotExist) {
		t.Error("a symbolic link was followed out of the tree")
	}
}

// deep makes a chain of n directories below top, as a program inside would:
// relative to the directory that it is in.
func deep(t *testing.T, top string, n int) {
	t.Helper()
	fd, err := unix.Open(top, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		if err := unix.Mkdirat(fd, "d", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		fd = next
	}
	unix.Close(fd)
}

// What the process before left in the trash is deleted.
func TestOpenEmptiesTheTrash(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "trash", "old", "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	open(t, dir)
	empty(t, dir)
}
