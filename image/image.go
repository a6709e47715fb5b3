// Package image makes and keeps the read-only root file systems that sandboxes
// start from: the universal image from Debian's and npm's packages, and any
// linux/amd64 image of an OCI registry. An image is a directory tree with its
// records beside it, complete before it is listed and never changed after; the
// package neither mounts nor runs one.
//
// DIR/<image id>/tree is the root, with owners and modes as they are inside;
// DIR/<image id>/image.json is what Verify compares with. DIR must be closed to
// everybody but root, because trees hold set-user-id files of strangers. A name
// that begins with a dot is a leftover, for Recover.
package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/atomicfile"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// Records is where the list of complete images lives. A method that returned
// nil survives a power cut.
type Records interface {
	PutImage(ctx context.Context, img cloche.Image) error
	Images(ctx context.Context) ([]cloche.Image, error)
	// DeleteImage of an image that is not there is CodeNotFound, of one that is
	// in use CodeConflict.
	DeleteImage(ctx context.Context, id cloche.ImageID) error
}

const (
	treeDir  = "tree"
	metaFile = "image.json"
	newDir   = ".new-"  // + image id: being made
	goneDir  = ".gone-" // + image id: being removed

	// managedName is how clients of the hosted service spell the default image
	// (wire spec 9.2).
	managedName = "vercel/sandbox/" + cloche.DefaultImage

	maxReferenceLen = 512 // bytes; a repository has at most 255, a tag 128, a digest 71
)

// Library is the set of images in one directory. Its methods may be called
// concurrently.
type Library struct {
	dir     string
	records Records
	log     *slog.Logger

	// making holds the ids of images on their way into or out of the library,
	// which Recover must not touch. Guarded by mu.
	mu     sync.Mutex
	making map[cloche.ImageID]bool
}

// Open returns the library in dir, which is made with mode 0700 if missing. It
// changes nothing else: call Recover once before the first build or pull.
func Open(dir string, records Records, log *slog.Logger) (*Library, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("image directory: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("image directory: %w", err)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("image directory: %w", err)
	}
	return &Library{dir: dir, records: records, log: log, making: map[cloche.ImageID]bool{}}, nil
}

// Image finds the newest image of that name: "" is the default image, a
// registry's image may be spelled in any of the ways that mean the same
// repository and tag, and "@sha256:…" pins the digest. An unknown one is
// CodeNotFound, and the message says how to get it.
func (l *Library) Image(ctx context.Context, ref string) (cloche.Image, error) {
	if len(ref) > maxReferenceLen {
		return cloche.Image{}, cloche.Errorf(cloche.CodeInvalid, "an image reference has at most %d bytes", maxReferenceLen)
	}
	base, digest, _ := strings.Cut(ref, "@")
	switch base {
	case "", managedName, managedName + ":latest":
		base = cloche.DefaultImage
	}
	all, err := l.List(ctx)
	if err != nil {
		return cloche.Image{}, err
	}
	if img, ok := find(all, base, digest); ok {
		return img, nil
	}
	return cloche.Image{}, unknown(base, ref)
}

// unknown says how to get an image that is not here.
func unknown(base, ref string) error {
	if base == cloche.DefaultImage {
		return cloche.Errorf(cloche.CodeNotFound,
			"this server has no image %q: make it with `cloche image build %s`", cmp.Or(ref, base), base)
	}
	if _, err := name.ParseReference(ref); err != nil {
		return cloche.Errorf(cloche.CodeInvalid, "%q is not an image reference", ref)
	}
	return cloche.Errorf(cloche.CodeNotFound,
		"this server has no image %q: get it with `cloche image pull %s`", ref, ref)
}

// find prefers an exact name, so that a registry's "universal:latest" is never
// taken for the image of that name which was built here.
func find(all []cloche.Image, base, digest string) (cloche.Image, bool) {
	for _, img := range all {
		if img.Name == base && (digest == "" || img.Digest == digest) {
			return img, true
		}
	}
	want, err := name.ParseReference(base)
	if err != nil || base == cloche.DefaultImage {
		return cloche.Image{}, false
	}
	for _, img := range all {
		have, err := name.ParseReference(img.Name)
		if err != nil || !strings.ContainsAny(img.Name, ":/") { // built here
			continue
		}
		same := have.Name() == want.Name() && digest == "" ||
			have.Context().Name() == want.Context().Name() && digest != "" && digest == img.Digest
		if same {
			return img, true
		}
	}
	return cloche.Image{}, false
}

// List returns the images that are complete, newest first. One whose record is
// there and whose tree is not is left out and logged.
func (l *Library) List(ctx context.Context) ([]cloche.Image, error) {
	all, err := l.records.Images(ctx)
	if err != nil {
		return nil, fmt.Errorf("image records: %w", err)
	}
	all = slices.DeleteFunc(slices.Clone(all), func(img cloche.Image) bool {
		_, err := os.Stat(l.treePath(img.ID))
		if err != nil {
			l.log.ErrorContext(ctx, "image has a record but no tree", "image", img.ID, "name", img.Name, "err", err)
		}
		return err != nil
	})
	slices.SortStableFunc(all, func(a, b cloche.Image) int {
		return cmp.Or(b.CreatedAt.Compare(a.CreatedAt), strings.Compare(string(b.ID), string(a.ID)))
	})
	return all, nil
}

// Tree returns the absolute path of the image's root directory on this host. It
// is for mounting read-only: whoever writes to it breaks every sandbox of the
// image, which Verify finds. A missing one is CodeNotFound.
func (l *Library) Tree(_ context.Context, id cloche.ImageID) (string, error) {
	if !id.Valid() {
		return "", cloche.Errorf(cloche.CodeInvalid, "%q is not an image id", id)
	}
	path := l.treePath(id)
	if _, err := os.Stat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "", cloche.Errorf(cloche.CodeNotFound, "image %s is not on this host", id)
		}
		return "", fmt.Errorf("image tree: %w", err)
	}
	return path, nil
}

// Remove takes an image away: the record, which the store refuses with
// CodeConflict while a sandbox uses it, then the tree. An image that is not
// there is CodeNotFound.
func (l *Library) Remove(ctx context.Context, id cloche.ImageID) error {
	if !id.Valid() {
		return cloche.Errorf(cloche.CodeInvalid, "%q is not an image id", id)
	}
	defer l.hold(id)()
	failpoint.Here("image/remove/before-record")
	if err := l.records.DeleteImage(ctx, id); err != nil {
		return fmt.Errorf("image record: %w", err)
	}
	failpoint.Here("image/remove/after-record")
	gone := filepath.Join(l.dir, goneDir+string(id))
	err := os.Rename(filepath.Join(l.dir, string(id)), gone)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a record without a tree
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	failpoint.Here("image/remove/after-rename")
	if err := os.RemoveAll(gone); err != nil {
		return fmt.Errorf("remove image %s: %w", id, err)
	}
	return atomicfile.SyncDir(l.dir)
}

// Recover removes what an interrupted build, pull or removal left. It may run
// beside the library's other methods, not beside another process's.
func (l *Library) Recover(ctx context.Context) error {
	entries, err := os.ReadDir(l.dir)
	if err != nil {
		return fmt.Errorf("image directory: %w", err)
	}
	// Read after the directory: an image that appears in between has a record.
	records, err := l.records.Images(ctx)
	if err != nil {
		return fmt.Errorf("image records: %w", err)
	}
	listed := map[cloche.ImageID]bool{}
	for _, img := range records {
		listed[img.ID] = true
	}
	var errs []error
	for _, e := range entries {
		id, half := leftover(e.Name())
		if !id.Valid() || !half && listed[id] || l.held(id) {
			continue
		}
		l.log.InfoContext(ctx, "remove a half-made image", "image", id)
		if err := os.RemoveAll(filepath.Join(l.dir, e.Name())); err != nil {
			errs = append(errs, fmt.Errorf("remove half-made image %s: %w", id, err))
		}
	}
	return errors.Join(errs...)
}

// leftover splits the name of an entry of the library's directory. half is true
// of a name that is never listed.
func leftover(entry string) (id cloche.ImageID, half bool) {
	for _, prefix := range []string{newDir, goneDir} {
		if rest, ok := strings.CutPrefix(entry, prefix); ok {
			return cloche.ImageID(rest), true
		}
	}
	return cloche.ImageID(entry), false
}

func (l *Library) treePath(id cloche.ImageID) string {
	return filepath.Join(l.dir, string(id), treeDir)
}

// hold keeps Recover away from id until the returned function is called.
func (l *Library) hold(id cloche.ImageID) (release func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.making[id] = true
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.making, id)
	}
}

func (l *Library) held(id cloche.ImageID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.making[id]
}
