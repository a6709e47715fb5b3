package agent

import (
	"archive/tar"
	"bufio"
	"compress/flate"
	"compress/gzip"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

const (
	headerBuffer = 64 << 10
	maxLinks     = 40        // symlinks followed at the end of a name, as in the kernel
	tempName     = ".cloche" // begins the name of a file that is being written
)

// unpacker writes one tar stream below a base.
type unpacker struct {
	base   string
	parent string // directory of the last file: it is there
	buf    []byte // of file content
	done   guest.Written
	// modes are of new directories that their owner could not write into: they
	// are set at the end.
	modes []dirMode
}

type dirMode struct {
	path string
	mode fs.FileMode
}

// unpack extracts regular files and directories, in constant memory. A file
// appears under its name only when it is complete. On an error earlier entries
// stay. It is to be called as the place's user, so that whatever the names and
// the symlinks say, it reaches what the user can reach and no more.
func unpack(body io.Reader, gzipped bool, base string) (guest.Written, error) {
	u := &unpacker{base: base}
	// Headers and padding are read in small pieces; content passes the buffer by.
	var r io.Reader = bufio.NewReaderSize(body, headerBuffer)
	if gzipped {
		z, err := gzip.NewReader(r)
		if err != nil {
			return u.done, archiveError(err)
		}
		r = bufio.NewReaderSize(z, headerBuffer)
	}
	tr := tar.NewReader(r)
	for entries := 0; ; entries++ {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return u.done, archiveError(err)
		}
		if entries == guest.MaxTarEntries {
			return u.done, cloche.Errorf(cloche.CodeTooLarge, "the archive has more than %d entries", guest.MaxTarEntries)
		}
		if err := u.entry(h, tr); err != nil {
			return u.done, err
		}
	}
	// What follows the end of the archive belongs to it: a cut gzip stream
	// shows only here.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return u.done, archiveError(err)
	}
	return u.done, u.finish()
}

// archiveError tells a bad archive from a body that broke off.
func archiveError(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, gzip.ErrHeader) || errors.Is(err, gzip.ErrChecksum) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, tar.ErrFieldTooLong) {
		return cloche.Errorf(cloche.CodeInvalid, "the archive is damaged or cut off: %v", err)
	}
	var corrupt flate.CorruptInputError
	if errors.As(err, &corrupt) {
		return cloche.Errorf(cloche.CodeInvalid, "the archive is damaged: %v", err)
	}
	return fmt.Errorf("read archive: %w", err)
}

// entry writes one entry.
func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil // such as the commit id in archives of git
	}
	name, err := entryName(h)
	if err != nil {
		return err
	}
	mode := modeOf(h.Mode)
	switch h.Typeflag {
	case tar.TypeDir:
		if name == "" {
			return nil
		}
		err = u.directory(name, mode)
	case tar.TypeReg:
		if name == "" {
			return cloche.Errorf(cloche.CodeInvalid, "a file without a name in the archive")
		}
		err = u.file(name, mode, h.Size, content)
	}
	if err == nil {
		return nil
	}
	err = fileError(name, err)
	if cloche.ErrorCode(err) == cloche.CodeNotFound {
		// What was missing was made, or its file system does not make files.
		return cloche.Errorf(cloche.CodeInvalid, "%.256q: no file can be made there", name)
	}
	return err
}

// modeOf gives the 12 permission bits of a header as package fs has them.
func modeOf(m int64) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	for bit, flag := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if m&bit != 0 {
			mode |= flag
		}
	}
	return mode
}

// entryName checks an entry and gives its name without "." parts; "" is the
// base itself.
func entryName(h *tar.Header) (string, error) {
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir:
	default:
		return "", cloche.Errorf(cloche.CodeInvalid, "%.256q in the archive is neither a file nor a directory (type %q)", h.Name, h.Typeflag)
	}
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return "", cloche.Errorf(cloche.CodeInvalid, "%.256q in the archive is sparse", h.Name)
		}
	}
	if len(h.Name) > guest.MaxTarName {
		return "", cloche.Errorf(cloche.CodeInvalid, "a name of %d bytes in the archive", len(h.Name))
	}
	if path.IsAbs(h.Name) || strings.ContainsRune(h.Name, 0) {
		return "", cloche.Errorf(cloche.CodeInvalid, "%.256q in the archive is absolute, or has a NUL byte", h.Name)
	}
	var parts []string
	for part := range strings.SplitSeq(h.Name, "/") {
		switch part {
		case "", ".":
		case "..":
			return "", cloche.Errorf(cloche.CodeInvalid, "%.256q in the archive leads out of it", h.Name)
		default:
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "/"), nil
}

// directory makes a directory and its parents. One that exists keeps its mode.
func (u *unpacker) directory(name string, mode fs.FileMode) error {
	made, err := makeAll(u.base, name)
	if err != nil || !made {
		return err
	}
	full := u.base + "/" + name
	if mode&0o700 != 0o700 {
		u.modes = append(u.modes, dirMode{full, mode})
		mode |= 0o700
	}
	return os.Chmod(full, mode)
}

// makeAll makes name below base, and base itself with what is above it, all with
// mode 0755. made is false if it was there.
func makeAll(base, name string) (made bool, err error) {
	full := base
	if name != "" {
		full = base + "/" + name
	}
	err = os.Mkdir(full, 0o755)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrExist), errors.Is(err, unix.EROFS), errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		info, serr := os.Stat(full) // may well be a directory that is there
		if serr != nil {
			return false, err
		}
		if !info.IsDir() {
			return false, unix.ENOTDIR
		}
		return false, nil
	case !errors.Is(err, fs.ErrNotExist):
		return false, err
	}
	if name == "" {
		parent := dirOf(base)
		if parent == base {
			return false, err
		}
		if _, perr := makeAll(parent, ""); perr != nil {
			return false, perr
		}
	} else {
		parent := path.Dir(name)
		if parent == "." {
			parent = ""
		}
		if _, perr := makeAll(base, parent); perr != nil {
			return false, perr
		}
	}
	if err := os.Mkdir(full, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	return true, nil
}

// file writes one file: under a temporary name beside it, and then into place.
func (u *unpacker) file(name string, mode fs.FileMode, size int64, content io.Reader) error {
	final, err := u.target(name)
	if err != nil {
		return err
	}
	temp := dirOf(final) + "/" + tempName + rand.Text()
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, mode.Perm())
	if err != nil {
		return err
	}
	err = u.fill(f, size, content)
	if err == nil && mode != mode.Perm()&^umask {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(temp, final)
	}
	if err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(temp)))
	}
	u.done.Files++
	u.done.Bytes += size
	return nil
}

// dirOf is the path up to its last slash, with every ".." left to the kernel.
func dirOf(p string) string {
	if i := strings.LastIndexByte(p, '/'); i > 0 {
		return p[:i]
	}
	return "/"
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// fill writes exactly size bytes.
func (u *unpacker) fill(f *os.File, size int64, content io.Reader) error {
	if u.buf == nil && size > 0 {
		u.buf = make([]byte, fileBuffer)
	}
	for done := int64(0); done < size; {
		n, err := io.ReadFull(content, u.buf[:min(fileBuffer, size-done)])
		if n > 0 {
			if _, werr := f.Write(u.buf[:n]); werr != nil {
				return werr
			}
			done += int64(n)
		}
		if err != nil && done < size {
			return archiveError(err)
		}
	}
	return nil
}

// target makes the parents of name and gives the path that a write to it means:
// where symlinks at its end lead.
func (u *unpacker) target(name string) (string, error) {
	parent := path.Dir(name)
	if parent == "." {
		parent = ""
	}
	if parent != u.parent || u.parent == "" {
		if _, err := makeAll(u.base, parent); err != nil {
			return "", err
		}
		u.parent = parent
	}
	full := u.base + "/" + name
	for range maxLinks {
		info, err := os.Lstat(full)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return full, nil
		case err != nil:
			return "", err
		case info.Mode()&fs.ModeSymlink == 0:
			return full, regular(info)
		}
		link, err := os.Readlink(full)
		if err != nil {
			return "", err
		}
		if path.IsAbs(link) {
			full = link
		} else {
			full = dirOf(full) + "/" + link
		}
	}
	return "", unix.ELOOP
}

// finish sets the modes that would have been in the way.
func (u *unpacker) finish() error {
	for i := len(u.modes) - 1; i >= 0; i-- {
		m := u.modes[i]
		if err := os.Chmod(m.path, m.mode); err != nil {
			return fileError(m.path, err)
		}
	}
	return nil
}
