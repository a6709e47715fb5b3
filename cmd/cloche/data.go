package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"

	"github.com/cloche-dev/cloche/auth"
	"github.com/cloche-dev/cloche/image"
	"github.com/cloche-dev/cloche/internal/cleanup"
	"github.com/cloche-dev/cloche/store"
)

// dataDir is the server's directory. Its layout is fixed: see DESIGN in
// ARCHITECTURE.md, "The data directory".
type dataDir string

func (d dataDir) path(parts ...string) string {
	return filepath.Join(append([]string{string(d)}, parts...)...)
}

// open makes the directory with mode 0700 if need be: guests' files are below
// it, and no other user of the host may reach their setuid programs.
func openDataDir(dir string) (dataDir, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(abs, 0o700); err != nil {
		return "", fmt.Errorf("data directory: %w", err)
	}
	if err := checkOurs(abs); err != nil {
		return "", err
	}
	if err := os.Chmod(abs, 0o700); err != nil {
		return "", fmt.Errorf("data directory: %w", err)
	}
	// The real path: mounts are found again by it.
	real, err := filepath.EvalSymlinks(abs)
	return dataDir(real), err
}

// checkOurs fails for a directory with files of others. A mistyped --data would
// close it to everybody else: think of /tmp.
func checkOurs(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	foreign := ""
	for _, e := range entries {
		switch e.Name() {
		case "cloche.db", "lock":
			return nil
		case "lost+found": // of a file system of its own
		default:
			foreign = e.Name()
		}
	}
	if foreign != "" {
		return fmt.Errorf("%s is no data directory of Cloche, and not empty (it has %q): choose another --data", dir, foreign)
	}
	return nil
}

// errLocked is that another process has the data directory.
var errLocked = errors.New("another cloche process uses this data directory")

// lock takes the lock of the data directory for the life of this process, or
// fails with errLocked at once.
func (d dataDir) lock() (unlock func() error, err error) {
	f, err := os.OpenFile(d.path("lock"), os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(errLocked, f.Close())
	}
	return f.Close, nil
}

// base is what the server and the commands that work without one share.
type base struct {
	dir    dataDir
	store  *store.Store
	auth   *auth.Auth
	images *image.Library
	close  func() error
}

// openBase takes the lock and opens the records and the images.
func openBase(ctx context.Context, dir dataDir, log *slog.Logger) (_ *base, err error) {
	var undo cleanup.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, undo.Unwind(ctx))
		}
	}()
	unlock, err := dir.lock()
	if err != nil {
		return nil, err
	}
	undo.Push("lock", func(context.Context) error { return unlock() })
	key, err := auth.OpenKey(dir.path("secrets"))
	if err != nil {
		return nil, fmt.Errorf("secrets: %w", err)
	}
	db, err := store.Open(ctx, dir.path("cloche.db"), key)
	if err != nil {
		return nil, err
	}
	undo.Push("store", func(context.Context) error { return db.Close() })
	images, err := image.Open(dir.path("images"), db, log)
	if err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	b := &base{dir: dir, store: db, auth: auth.New(db), images: images}
	steps := undo
	b.close = func() error { return steps.Unwind(context.Background()) }
	undo.Release()
	return b, nil
}

// disk gives the free and the total bytes of the data directory's file system.
func (d dataDir) disk() (free, total int64, err error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(string(d), &s); err != nil {
		return 0, 0, fmt.Errorf("free disk space: %w", err)
	}
	return int64(s.Bavail) * s.Bsize, int64(s.Blocks) * s.Bsize, nil
}
