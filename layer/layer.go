// Package layer keeps what sessions write. A session writes into its top, a
// directory of its own over the image; a discarded top goes to the trash at once
// and is deleted in the background. The package gives out paths and never
// mounts; it walks trees that guests made, so it follows no symbolic link and
// trusts no name, depth or count in them.
package layer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// Pool is the directory of tops: DIR/tops/SESSION and DIR/trash. Its methods may
// be called concurrently.
type Pool struct {
	dir string
	log *slog.Logger

	kick chan struct{} // the trash may have something
	stop context.CancelFunc
	wg   sync.WaitGroup
}

// Open makes the pool's directories if need be and begins to delete what is in
// the trash from before.
func Open(dir string, log *slog.Logger) (*Pool, error) {
	for _, d := range []string{"tops", "trash"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("layer pool: %w", err)
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	p := &Pool{dir: dir, log: log, kick: make(chan struct{}, 1), stop: stop}
	p.wg.Go(func() { p.empty(ctx) })
	p.wake()
	return p, nil
}

// Close stops deleting; the trash waits for the next Open.
func (p *Pool) Close() error {
	p.stop()
	p.wg.Wait()
	return nil
}

func (p *Pool) top(id cloche.SessionID) string { return filepath.Join(p.dir, "tops", string(id)) }

// Make makes an empty top and returns its absolute path. One that exists is
// CodeConflict.
func (p *Pool) Make(_ context.Context, id cloche.SessionID) (string, error) {
	if !id.Valid() {
		return "", cloche.Errorf(cloche.CodeInvalid, "%q is not a session id", id)
	}
	err := os.Mkdir(p.top(id), 0o700)
	if errors.Is(err, fs.ErrExist) {
		return "", cloche.Errorf(cloche.CodeConflict, "session %s has files already", id)
	}
	return p.top(id), err
}

// Remove discards a top, however large, in constant time. None is success.
func (p *Pool) Remove(_ context.Context, id cloche.SessionID) error {
	if !id.Valid() {
		return cloche.Errorf(cloche.CodeInvalid, "%q is not a session id", id)
	}
	failpoint.Here("layer/remove/before-rename")
	err := os.Rename(p.top(id), filepath.Join(p.dir, "trash", string(id)))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("discard top: %w", err)
	}
	failpoint.Here("layer/remove/after-rename")
	p.wake()
	return nil
}

// List gives the id of every top.
func (p *Pool) List(context.Context) ([]cloche.SessionID, error) {
	entries, err := os.ReadDir(filepath.Join(p.dir, "tops"))
	if err != nil {
		return nil, fmt.Errorf("tops: %w", err)
	}
	var ids []cloche.SessionID
	for _, e := range entries {
		if id := cloche.SessionID(e.Name()); id.Valid() {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

func (p *Pool) wake() {
	select {
	case p.kick <- struct{}{}:
	default: // one look at the trash is pending already
	}
}

// empty deletes what is in the trash whenever there is something.
func (p *Pool) empty(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.kick:
		}
		if err := emptyDir(ctx, filepath.Join(p.dir, "trash")); err != nil && ctx.Err() == nil {
			p.log.Error("deleting discarded files", "error", err)
		}
	}
}

// maxDepth is how deep emptyDir descends before it lifts a directory up to the
// trash itself. It bounds the descriptors and the stack that a tree of any depth
// can cost: a guest can make one far deeper than PATH_MAX.
const maxDepth = 64

// emptyDir deletes everything in dir, which only this process writes to. It
// follows no link and crosses no mount.
func emptyDir(ctx context.Context, dir string) error {
	root, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer root.Close() // opened for reading: nothing to lose
	e := emptier{root: root}
	for ctx.Err() == nil {
		lifted := e.lifted
		if err := e.dir(ctx, int(root.Fd()), 0); err != nil {
			return err
		}
		if e.lifted == lifted {
			return nil
		}
	}
	return ctx.Err()
}

type emptier struct {
	root   *os.File
	lifted int
}

// dir deletes the entries of the open directory fd.
func (e *emptier) dir(ctx context.Context, fd, depth int) error {
	own, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open directory: %w", err)
	}
	f := os.NewFile(uintptr(own), "trash")
	defer f.Close() // opened for reading: nothing to lose
	for {
		names, err := f.Readdirnames(1024)
		for _, name := range names {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err := e.entry(ctx, fd, name, depth); err != nil {
				return err
			}
		}
		if err != nil || len(names) == 0 {
			break // io.EOF, or an error that the removal of the directory repeats
		}
	}
	return nil
}

func (e *emptier) entry(ctx context.Context, fd int, name string, depth int) error {
	err := unix.Unlinkat(fd, name, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.EISDIR {
		return fmt.Errorf("delete file: %w", err)
	}
	if depth >= maxDepth {
		e.lifted++
		return unix.Renameat(fd, name, int(e.root.Fd()), "deep-"+rand.Text())
	}
	how := &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	}
	sub, err := unix.Openat2(fd, name, how)
	if err != nil {
		return fmt.Errorf("open directory: %w", err)
	}
	defer unix.Close(sub)
	for {
		if err := e.dir(ctx, sub, depth+1); err != nil {
			return err
		}
		switch err := unix.Unlinkat(fd, name, unix.AT_REMOVEDIR); err {
		case nil, unix.ENOENT:
			return nil
		case unix.ENOTEMPTY: // entries were removed while they were listed: look again
		default:
			return fmt.Errorf("delete directory: %w", err)
		}
	}
}
