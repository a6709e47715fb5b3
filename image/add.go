package image

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/atomicfile"
	"github.com/cloche-dev/cloche/internal/cleanup"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// draft is what filling a tree finds out about the image.
type draft struct {
	name   string
	digest string // "" = the tree's
	source string
	config cloche.ImageConfig
	notes  []string
}

// add makes one image: fill puts the files into an empty tree, then the tree is
// measured, made durable, put in its place and listed. An error leaves nothing.
// If the image is here already under the same name and digest, that one is
// returned and the new one dropped.
func (l *Library) add(ctx context.Context, p Progress, fill func(ctx context.Context, tree string) (draft, error)) (_ cloche.Image, err error) {
	id := cloche.NewImageID()
	defer l.hold(id)()
	making := filepath.Join(l.dir, newDir+string(id))
	var undo cleanup.Stack
	defer func() {
		if uerr := undo.Unwind(ctx); uerr != nil {
			l.log.ErrorContext(ctx, "half-made image stays until the next start", "image", id, "err", uerr)
		}
	}()
	undo.Push("new image", func(context.Context) error { return os.RemoveAll(making) })
	failpoint.Here("image/add/before-dir")
	tree := filepath.Join(making, treeDir)
	for _, dir := range []string{making, tree} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return cloche.Image{}, hostError("make image directory", err)
		}
	}
	if err := os.Chmod(tree, 0o755); err != nil { // the root of the sandbox
		return cloche.Image{}, hostError("make image directory", err)
	}
	failpoint.Here("image/add/after-dir")
	d, err := fill(ctx, tree)
	if err != nil {
		return cloche.Image{}, err
	}
	failpoint.Here("image/add/after-fill")
	m := p.begin("compute digest", 0)
	size, err := measure(ctx, tree)
	if err != nil {
		return cloche.Image{}, err
	}
	m.end()
	img := cloche.Image{ID: id, Name: d.name, Digest: d.digest, SizeBytes: size.bytes, Files: size.files,
		CreatedAt: time.Now().UTC(), Config: d.config}
	if img.Digest == "" {
		img.Digest = size.digest
	}
	if have, ok, err := l.same(ctx, img.Name, img.Digest); ok || err != nil {
		return have, err
	}
	about := meta{ID: id, Name: img.Name, Digest: img.Digest, Tree: size.digest, Source: d.source, Notes: d.notes}
	m = p.begin("write to disk", 0)
	if err := l.publish(ctx, making, about, &undo); err != nil {
		return cloche.Image{}, err
	}
	if err := l.records.PutImage(ctx, img); err != nil {
		return cloche.Image{}, fmt.Errorf("image record: %w", err)
	}
	failpoint.Here("image/add/after-record")
	undo.Release()
	m.end()
	l.log.InfoContext(ctx, "image is complete", "image", id, "name", img.Name, "digest", img.Digest,
		"bytes", img.SizeBytes, "files", img.Files)
	return img, nil
}

// publish makes everything under making durable and puts it in its place.
func (l *Library) publish(ctx context.Context, making string, about meta, undo *cleanup.Stack) error {
	b, err := json.MarshalIndent(about, "", "  ")
	if err != nil {
		return fmt.Errorf("image file: %w", err)
	}
	if err := atomicfile.Write(filepath.Join(making, metaFile), append(b, '\n'), 0o600); err != nil {
		return hostError("image file", err)
	}
	if err := syncFS(making); err != nil {
		return hostError("write image to disk", err)
	}
	failpoint.Here("image/add/before-rename")
	final := filepath.Join(l.dir, string(about.ID))
	undo.Push("image", func(context.Context) error { return os.RemoveAll(final) })
	if err := os.Rename(making, final); err != nil {
		return hostError("put image in place", err)
	}
	if err := atomicfile.SyncDir(l.dir); err != nil {
		return hostError("put image in place", err)
	}
	failpoint.Here("image/add/before-record")
	return ctx.Err()
}

// syncFS writes everything that the file system of dir holds in memory to its
// disk: one call instead of an fsync for each of many thousand files.
func syncFS(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = unix.Syncfs(int(d.Fd()))
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

// same finds an image that is complete under exactly that name and digest.
func (l *Library) same(ctx context.Context, name, digest string) (cloche.Image, bool, error) {
	all, err := l.List(ctx)
	if err != nil {
		return cloche.Image{}, false, err
	}
	i := slices.IndexFunc(all, func(img cloche.Image) bool { return img.Name == name && img.Digest == digest })
	if i < 0 {
		return cloche.Image{}, false, nil
	}
	return all[i], true, nil
}

// noteLines says what an unpacker left out.
func (u *unpacker) noteLines() []string {
	var lines []string
	for _, kind := range slices.Sorted(maps.Keys(u.notes)) {
		lines = append(lines, fmt.Sprintf("%d %s left out", u.notes[kind], kind))
	}
	return lines
}
