package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cloche-dev/cloche/client"
)

// maxBatch is the number of entries that are sent in one request. A server
// bounds the entries of one archive (100,000 here), not those of a copy.
const maxBatch = 50_000

// maxPiece is how much of a file is read at once.
const maxPiece = 256 << 10

// upload copies a local file or tree into the sandbox.
func (j *copying) upload(ctx context.Context, source, target string) error {
	info, err := os.Stat(source)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	abs, dir := j.remote(target)
	if !dir {
		if dir, err = j.isDir(ctx, abs); err != nil {
			return err
		}
	}
	if dir && !contents(source) {
		real, err := filepath.Abs(source) // "..", "." and "/" have no name of their own
		if err != nil {
			return fmt.Errorf("source: %w", err)
		}
		abs = path.Join(abs, filepath.Base(real))
	}
	base := strings.TrimPrefix(abs, "/")
	// The file, or the top of the tree with what is above it.
	top := []local{{source, base, info}}
	if _, err := j.uploadBatch(ctx, func() (e local, ok bool) {
		if len(top) > 0 {
			e, ok, top = top[0], true, nil
		}
		return e, ok
	}); err != nil || !info.IsDir() {
		return err
	}
	// tar in the sandbox goes on after an entry that it cannot make, and makes
	// links. Without it the server unpacks, and stops there.
	probe, err := j.c.Run(ctx, j.session.ID, client.Run{Command: "tar", Args: []string{"--version"}})
	if err != nil {
		return err
	}
	if *probe.ExitCode != exitNoCommand {
		return j.uploadTree(ctx, source, abs)
	}
	next, stop := iter.Pull(j.tree(source, base))
	defer stop()
	for more := true; more; {
		if more, err = j.uploadBatch(ctx, next); err != nil {
			return err
		}
	}
	return nil
}

// uploadTree unpacks a tree with tar, in the directory abs.
func (j *copying) uploadTree(ctx context.Context, source, abs string) error {
	j.links = true
	dir, base := abs, ""
	if !utf8.ValidString(abs) { // no argument, but a name in the archive
		dir, base = "/", strings.TrimPrefix(abs, "/")
	}
	next, stop := iter.Pull(j.tree(source, base))
	defer stop()
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := j.archive(w, next, -1)
		w.CloseWithError(err)
		done <- err
	}()
	// -o: everything belongs to the user of the sandbox, also if that is root.
	err := j.runTar(ctx, client.Run{Command: "tar", Args: []string{"-x", "-p", "-o", "-f", "-", "-C", dir}, Stdin: r})
	r.CloseWithError(errStopped)
	if archiveErr := <-done; err == nil && j.reported() == 0 {
		err = archiveErr
	}
	return err
}

// errStopped is why there is no use in writing more of an archive.
var errStopped = errors.New("the archive is not read to its end")

// local is an entry to be sent.
type local struct {
	path string // here
	name string // in the archive; any bytes
	info fs.FileInfo
}

// tree yields what is below source, each directory before what is in it, with
// names below base. What cannot be read is reported and left out. Links are
// yielded as they are.
func (j *copying) tree(source, base string) iter.Seq[local] {
	return func(yield func(local) bool) {
		_ = filepath.WalkDir(source, func(p string, d fs.DirEntry, err error) error {
			var info fs.FileInfo
			rel, relErr := filepath.Rel(source, p)
			if err = errors.Join(err, relErr); err == nil && rel != "." {
				info, err = d.Info()
			}
			switch {
			case err != nil:
				j.entry(p, err) // of a directory this is the second call
			case rel != "." && !yield(local{p, path.Join(base, filepath.ToSlash(rel)), info}):
				return fs.SkipAll
			}
			return nil
		})
	}
}

// uploadBatch lets the server unpack up to maxBatch entries, and says whether
// there may be more.
func (j *copying) uploadBatch(ctx context.Context, next func() (local, bool)) (more bool, err error) {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		var err error
		more, err = j.archive(w, next, maxBatch)
		w.CloseWithError(err)
		done <- err
	}()
	err = j.c.WriteFiles(ctx, j.session.ID, "/", r)
	r.CloseWithError(errStopped)
	if archiveErr := <-done; err == nil {
		err = archiveErr
	}
	return more, err
}

// archive writes up to limit entries as a tar stream; a negative limit is none.
func (j *copying) archive(w io.Writer, next func() (local, bool), limit int) (more bool, err error) {
	tw := tar.NewWriter(w)
	for n := 0; n != limit; n++ {
		e, ok := next()
		if !ok {
			return false, tw.Close()
		}
		if err := j.add(tw, e); err != nil {
			return false, err
		}
	}
	return true, tw.Close()
}

// add writes one entry. Its error is one of the archive; what is wrong with the
// entry itself is reported.
func (j *copying) add(tw *tar.Writer, e local) error {
	h := &tar.Header{
		Name:    e.name,
		Mode:    int64(e.info.Mode().Perm()),
		ModTime: e.info.ModTime().Truncate(time.Second),
		// GNU, because its names are any bytes of any length as they are.
		Format: tar.FormatGNU,
	}
	switch mode := e.info.Mode(); {
	case mode.IsDir():
		if h.Name == "" {
			return nil // the root of the sandbox, which is there
		}
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		return tw.WriteHeader(h)
	case mode&fs.ModeSymlink != 0 && !j.links:
		j.entry(e.path, errors.New("a link, which takes tar in the sandbox's image"))
		return nil
	case mode&fs.ModeSymlink != 0:
		link, err := os.Readlink(e.path)
		if err != nil {
			j.entry(e.path, err)
			return nil
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, link
		return tw.WriteHeader(h)
	case mode.IsRegular():
		return j.addFile(tw, h, e.path)
	}
	j.entry(e.path, errors.New("neither a file, a directory nor a link"))
	return nil
}

func (j *copying) addFile(tw *tar.Writer, h *tar.Header, p string) error {
	f, err := os.Open(p)
	if err != nil {
		j.entry(p, err)
		return nil
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		j.entry(p, errors.New("changed while it was opened"))
		return nil
	}
	h.Typeflag, h.Size = tar.TypeReg, info.Size()
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	content := &fileContent{r: io.LimitReader(j.count(f), h.Size)}
	n, err := io.CopyBuffer(tw, content, make([]byte, min(h.Size+1, maxPiece)))
	switch {
	case content.err != nil:
		j.entry(p, fmt.Errorf("%w; the copy ends in zeros", cause(content.err)))
	case err != nil:
		return err
	case n < h.Size:
		j.entry(p, fmt.Errorf("shrank while it was read; the copy ends in zeros"))
	default:
		return nil
	}
	// The size is promised already: the rest of the archive depends on it.
	_, err = io.CopyN(tw, zeros{}, h.Size-n)
	return err
}

// fileContent remembers a failure of the file, as opposed to one of the
// archive, and ends there.
type fileContent struct {
	r   io.Reader
	err error
}

// Read reads the file.
func (c *fileContent) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err != nil && err != io.EOF {
		c.err, err = err, io.EOF
	}
	return n, err
}

type zeros struct{}

// Read gives zeros without end.
func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
