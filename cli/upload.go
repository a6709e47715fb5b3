package cli

import (
	"archive/tar"
	"compress/gzip"
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
)

// maxBatch is the number of entries that are sent in one request. A server
// bounds the entries of one archive (100,000 here), not those of a copy.
const maxBatch = 50_000

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
	next, stop := iter.Pull(j.tree(source, strings.TrimPrefix(abs, "/"), info))
	defer stop()
	for more := true; more; {
		more, err = j.uploadBatch(ctx, next)
		if err != nil {
			return err
		}
	}
	return nil
}

// local is an entry to be sent.
type local struct {
	path string // here
	name string // in the archive; any bytes
	info fs.FileInfo
}

// tree yields an entry and all below it, each directory before what is in it.
// What cannot be read is reported and left out. A link at the top is followed,
// those below are copied as they are.
func (j *copying) tree(source, name string, info fs.FileInfo) iter.Seq[local] {
	return func(yield func(local) bool) {
		if !info.IsDir() {
			yield(local{source, name, info})
			return
		}
		_ = filepath.WalkDir(source, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				j.entry(p, err) // for a directory this is its second call
				return nil
			}
			rel, err := filepath.Rel(source, p)
			if err != nil {
				j.entry(p, err)
				return nil
			}
			info := info
			if rel != "." {
				if info, err = d.Info(); err != nil {
					j.entry(p, err)
					return nil
				}
			}
			if !yield(local{p, strings.TrimPrefix(path.Join(name, filepath.ToSlash(rel)), "/"), info}) {
				return fs.SkipAll
			}
			return nil
		})
	}
}

// uploadBatch sends up to maxBatch entries, and says whether there may be more.
func (j *copying) uploadBatch(ctx context.Context, next func() (local, bool)) (more bool, err error) {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		var err error
		more, err = j.archive(w, next)
		w.CloseWithError(err)
		done <- err
	}()
	err = j.c.WriteFiles(ctx, j.session.ID, "/", r)
	r.CloseWithError(errors.New("the server has stopped reading"))
	if archiveErr := <-done; err == nil {
		err = archiveErr
	}
	return more, err
}

// archive writes a batch as tar.gz.
func (j *copying) archive(w io.Writer, next func() (local, bool)) (more bool, err error) {
	gz, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return false, err
	}
	tw := tar.NewWriter(gz)
	for range maxBatch {
		e, ok := next()
		if !ok {
			return false, errors.Join(tw.Close(), gz.Close())
		}
		if err := j.add(tw, e); err != nil {
			return false, err
		}
	}
	return true, errors.Join(tw.Close(), gz.Close())
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
			return nil // the root, which is there
		}
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
		return tw.WriteHeader(h)
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
	n, err := io.Copy(tw, content)
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
