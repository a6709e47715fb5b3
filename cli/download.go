package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// download copies a file or a tree out of the sandbox.
func (j *copying) download(ctx context.Context, source, target string) error {
	abs, dir := j.remote(source)
	if dir {
		return j.downloadTree(ctx, abs, source, target)
	}
	f, err := j.c.ReadFile(ctx, j.session.ID, abs)
	switch code(err) {
	case "":
	case cloche.CodeNotFound:
		return fmt.Errorf("there is no file %s in the sandbox", printable(abs))
	case cloche.CodeInvalid: // what the server says of a directory
		yes, dirErr := j.isDir(ctx, abs)
		if dirErr == nil && yes {
			return j.downloadTree(ctx, abs, source, target)
		}
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if target == "-" {
		_, err = io.Copy(j.env.Stdout, j.count(f))
		return err
	}
	return j.saveFile(f, localTarget(target, path.Base(abs)))
}

// saveFile writes a file beside its place and moves it there once it is whole,
// so that a copy that fails leaves what was there.
func (j *copying) saveFile(f *client.File, target string) (err error) {
	tmp, err := os.CreateTemp(filepath.Dir(target), ".cloche-cp-*")
	if err != nil {
		return fmt.Errorf("target: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	_, err = io.Copy(tmp, j.count(f)) // a cut answer is an error of the reader
	mode := fs.FileMode(f.Mode).Perm()
	if f.Mode == 0 {
		mode = 0o644
	}
	err = errors.Join(err, tmp.Chmod(mode), tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), target)
	}
	return err
}

// downloadTree copies a directory by running tar in the sandbox.
func (j *copying) downloadTree(ctx context.Context, abs, source, target string) error {
	run := withPaths(client.Run{Command: "tar", Args: []string{"-c", "-f", "-", "-C"}}, abs, ".")
	if target == "-" {
		run.Stdout = writerFunc(func(p []byte) (int, error) {
			j.bytes.Add(int64(len(p)))
			return j.env.Stdout.Write(p)
		})
		return j.runTar(ctx, run)
	}
	if !contents(source) && path.Base(abs) != "/" {
		target = localTarget(target, path.Base(abs))
	}
	if err := os.MkdirAll(target, 0o755); err != nil {
		return fmt.Errorf("target: %w", err)
	}
	root, err := os.OpenRoot(target)
	if err != nil {
		return fmt.Errorf("target: %w", err)
	}
	defer root.Close()

	r, w := io.Pipe()
	run.Stdout = w
	done := make(chan error, 1)
	go func() {
		err := j.unpack(root, r)
		r.CloseWithError(err) // ends the command, if it is not at its end
		done <- err
	}()
	tarErr := j.runTar(ctx, run)
	w.CloseWithError(io.ErrUnexpectedEOF) // no effect after the archive's end
	if err := <-done; err != nil && tarErr == nil {
		return err
	}
	return tarErr
}

type writerFunc func([]byte) (int, error)

// Write calls the function.
func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// maxTarNotes bounds what is kept of what tar says on standard error.
const maxTarNotes = 64 << 10

// runTar runs tar and reports what it could not read.
func (j *copying) runTar(ctx context.Context, run client.Run) error {
	var notes bytes.Buffer
	run.Stderr = writerFunc(func(p []byte) (int, error) {
		notes.Write(p[:min(len(p), maxTarNotes-notes.Len())])
		return len(p), nil
	})
	cmd, err := j.c.Run(ctx, j.session.ID, run)
	if err != nil {
		var out *client.OutputError
		if errors.As(err, &out) {
			return out.Err
		}
		return err
	}
	switch *cmd.ExitCode {
	case 0:
		return nil
	case exitNoCommand:
		return errors.New("the sandbox's image has no tar, which a copy of a directory needs; copy its files one by one")
	}
	for note := range strings.Lines(notes.String()) {
		if note = strings.TrimSpace(note); note != "" && !strings.Contains(note, "Exiting with failure status") {
			j.entry("in the sandbox", errors.New(printable(note)))
		}
	}
	if j.reported() == 0 {
		return fmt.Errorf("tar in the sandbox: exit code %d", *cmd.ExitCode)
	}
	return nil
}

// unpack makes what the archive has below root, and nothing outside it: the
// archive is what a sandbox says. An entry that cannot be made is reported. The
// error is one of the archive or of reading it.
func (j *copying) unpack(root *os.Root, r io.Reader) error {
	tr := tar.NewReader(r)
	var dirs []*tar.Header
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("archive from the sandbox: %w", err)
		}
		name := path.Clean(h.Name)
		if name != "." {
			err = j.make(root, name, h, tr)
		}
		var broken *contentError
		switch {
		case errors.As(err, &broken):
			return fmt.Errorf("archive from the sandbox: %w", broken.err)
		case err != nil:
			j.entry(name, err)
		case h.Typeflag == tar.TypeDir && name != ".":
			dirs = append(dirs, h)
		}
	}
	// A directory gets its mode last, because it may forbid writing into it.
	for i := len(dirs) - 1; i >= 0; i-- {
		h := dirs[i]
		name := path.Clean(h.Name)
		if err := errors.Join(root.Chmod(name, h.FileInfo().Mode().Perm()), chtimes(root, name, h.ModTime)); err != nil {
			j.entry(name, err)
		}
	}
	// What is behind the end of the archive is padding; tar must not block on it.
	_, err := io.Copy(io.Discard, r)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil // the command's end, which its exit code tells of
	}
	return err
}

// contentError is a failure to read the archive in the middle of an entry.
type contentError struct{ err error }

// Error gives the cause.
func (e *contentError) Error() string { return e.err.Error() }

// make makes one entry.
func (j *copying) make(root *os.Root, name string, h *tar.Header, content io.Reader) error {
	if !filepath.IsLocal(name) {
		return errors.New("its name leads out of the copy")
	}
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	if sparse(h) {
		return errors.New("a sparse file, which may be of any size")
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return makeDir(root, name)
	case tar.TypeReg:
		return j.makeFile(root, name, h, content)
	case tar.TypeSymlink:
		if !filepath.IsLocal(filepath.Join(path.Dir(name), h.Linkname)) || path.IsAbs(h.Linkname) {
			return fmt.Errorf("a link to %s, which leads out of the copy", printable(h.Linkname))
		}
		if err := makeRoom(root, name); err != nil {
			return err
		}
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		if err := makeRoom(root, name); err != nil {
			return err
		}
		return root.Link(path.Clean(h.Linkname), name)
	}
	return errors.New("neither a file, a directory nor a link")
}

// sparse reports whether an entry's holes are not in the archive: a few bytes of
// it would fill the disk.
func sparse(h *tar.Header) bool {
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return h.Typeflag == tar.TypeGNUSparse
}

// makeDir makes a directory that we can write into, for now.
func makeDir(root *os.Root, name string) error {
	err := root.Mkdir(name, 0o700)
	if errors.Is(err, fs.ErrExist) {
		info, statErr := root.Lstat(name)
		if statErr == nil && info.IsDir() {
			return root.Chmod(name, info.Mode().Perm()|0o700)
		}
	}
	return err
}

// makeRoom removes a file or a link that is in the way, never a directory.
func makeRoom(root *os.Root, name string) error {
	info, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.IsDir() {
		return errors.New("a directory of that name is in the way")
	}
	return root.Remove(name)
}

func (j *copying) makeFile(root *os.Root, name string, h *tar.Header, content io.Reader) error {
	if err := makeRoom(root, name); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	source := &fileContent{r: j.count(content)}
	_, err = io.Copy(f, source)
	err = errors.Join(err, f.Chmod(h.FileInfo().Mode().Perm()), f.Close())
	if source.err != nil {
		// What is there is not the file.
		return &contentError{errors.Join(source.err, root.Remove(name))}
	}
	if err != nil {
		return errors.Join(err, root.Remove(name))
	}
	return chtimes(root, name, h.ModTime)
}

// chtimes keeps the time of modification; one that the archive lacks is now.
func chtimes(root *os.Root, name string, t time.Time) error {
	if t.IsZero() || t.Unix() == 0 {
		return nil
	}
	return root.Chtimes(name, t, t)
}
