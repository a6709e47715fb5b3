package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// DefaultCacheDir is where builds and pulls keep what they downloaded:
// ~/.cache/cloche, or /var/cache/cloche for a process without a home.
func DefaultCacheDir() string {
	if dir, err := os.UserCacheDir(); err == nil {
		return filepath.Join(dir, "cloche")
	}
	return "/var/cache/cloche"
}

// cache is a directory of downloads, owned by one build or pull at a time.
type cache struct {
	dir  string
	lock *os.File
}

// openCache makes the directory if it is missing and waits until no other
// process uses it. Close it.
func openCache(ctx context.Context, dir string, p Progress) (*cache, error) {
	if dir == "" {
		dir = DefaultCacheDir()
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("cache directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, hostError("cache directory", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, hostError("cache directory", err)
	}
	const poll = 200 * time.Millisecond
	for first := true; ; first = false {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return &cache{dir, f}, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock cache directory: %w", err), f.Close())
		}
		if first {
			p.begin("wait for another build or pull", 0)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), f.Close())
		case <-time.After(poll):
		}
	}
}

// close lets the next one in.
func (c *cache) close() error { return c.lock.Close() }

// sub returns a directory of the cache, made if missing.
func (c *cache) sub(name string) (string, error) {
	dir := filepath.Join(c.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", hostError("cache directory", err)
	}
	return dir, nil
}

// trim removes the files of dir that were used longest ago until the others
// have at most max bytes together.
func trim(dir string, max int64) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("trim cache: %w", err)
	}
	var files []fs.FileInfo
	var total int64
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return fmt.Errorf("trim cache: %w", err)
		}
		if info.Mode().IsRegular() {
			files = append(files, info)
			total += info.Size()
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, f := range files {
		if total <= max {
			break
		}
		if err := os.Remove(filepath.Join(dir, f.Name())); err != nil {
			return fmt.Errorf("trim cache: %w", err)
		}
		total -= f.Size()
	}
	return nil
}

// touch marks a cached file as used now.
func touch(path string) error {
	now := time.Now()
	return os.Chtimes(path, now, now)
}
