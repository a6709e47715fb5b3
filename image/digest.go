package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// meta is the file beside a tree.
type meta struct {
	ID     cloche.ImageID `json:"id"`
	Name   string         `json:"name"`
	Digest string         `json:"digest"` // the image's, as listed
	Tree   string         `json:"treeDigest"`
	Source string         `json:"source"`          // where it came from, for people
	Notes  []string       `json:"notes,omitempty"` // what was left out of the archive
}

// Verify measures the tree again and fails with CodeInternal if it differs from
// what was recorded when it was made.
func (l *Library) Verify(ctx context.Context, id cloche.ImageID) error {
	tree, err := l.Tree(ctx, id)
	if err != nil {
		return err
	}
	m, err := l.meta(id)
	if err != nil {
		return err
	}
	got, err := measure(ctx, tree)
	if err != nil {
		return err
	}
	if got.digest != m.Tree {
		return cloche.Errorf(cloche.CodeInternal,
			"image %s was changed after it was made: its files have digest %s, not %s", id, got.digest, m.Tree)
	}
	return nil
}

// meta reads the file beside an image's tree.
func (l *Library) meta(id cloche.ImageID) (m meta, err error) {
	b, err := os.ReadFile(filepath.Join(l.dir, string(id), metaFile))
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	if err != nil {
		return meta{}, fmt.Errorf("image file: %w", err)
	}
	return m, nil
}

// measured is what a walk over a tree finds.
type measured struct {
	digest string // "sha256:" + hex
	bytes  int64  // content of regular files, each once
	files  int64  // entries, the root not counted
}

// measure computes the canonical digest of a tree: SHA-256 over one line per
// entry, a directory before its content, names in the order of their bytes:
//
//	KIND MODE UID GID "PATH" REST [XATTR...]
//
// with MODE in octal, PATH relative ("." = the root) and quoted in ASCII, and
// REST, by KIND: d (directory) nothing; f (file) its size and the hex SHA-256 of
// its content; h (another name of an earlier f) the number of its line, from 1; l
// (symbolic link) the quoted target; others, by their letter of find(1),
// nothing. XATTR is "NAME"="VALUE" for those of the user namespace, by name: the
// others are the host's (security.selinux) or were left out. Times do not count.
func measure(ctx context.Context, tree string) (measured, error) {
	root, err := os.OpenRoot(tree)
	if err != nil {
		return measured{}, fmt.Errorf("image tree: %w", err)
	}
	defer root.Close() // opened for reading
	h := sha256.New()
	w := walker{ctx: ctx, root: root, out: bufio.NewWriterSize(h, 64<<10), hash: sha256.New(),
		buf: make([]byte, 256<<10), links: map[inode]int64{}}
	if err := w.walk("."); err != nil {
		return measured{}, fmt.Errorf("digest of image tree: %w", err)
	}
	if err := w.out.Flush(); err != nil {
		return measured{}, fmt.Errorf("digest of image tree: %w", err)
	}
	w.m.files-- // the root
	w.m.digest = "sha256:" + hex.EncodeToString(h.Sum(nil))
	return w.m, nil
}

type inode struct{ dev, ino uint64 }

// walker holds the state of one measure.
type walker struct {
	ctx   context.Context
	root  *os.Root
	out   *bufio.Writer
	hash  hash.Hash // of one file, reused
	buf   []byte
	links map[inode]int64 // line of the first name of each file with several
	m     measured
}

func (w *walker) walk(p string) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	info, err := w.root.Lstat(p)
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return errors.New("no stat of this system")
	}
	w.m.files++
	kind, rest, xattrs := "", "", ""
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		kind = "d"
		xattrs, err = w.xattrs(p)
	case syscall.S_IFREG:
		kind, rest, xattrs, err = w.file(p, st)
	case syscall.S_IFLNK:
		kind = "l"
		var target string
		target, err = w.root.Readlink(p)
		rest = " " + strconv.QuoteToASCII(target)
	case syscall.S_IFIFO:
		kind = "p"
	case syscall.S_IFSOCK:
		kind = "s"
	default:
		kind = "x" // device nodes, which unpacking leaves out
	}
	if err != nil {
		return err
	}
	// Errors of a bufio.Writer stay until Flush.
	fmt.Fprintf(w.out, "%s %o %d %d %s%s%s\n", kind, st.Mode&0o7777, st.Uid, st.Gid, strconv.QuoteToASCII(p), rest, xattrs)
	if kind != "d" {
		return nil
	}
	return w.children(p)
}

func (w *walker) children(p string) error {
	d, err := w.root.Open(p)
	if err != nil {
		return err
	}
	names, err := d.Readdirnames(-1)
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if err := w.walk(path.Join(p, n)); err != nil {
			return err
		}
	}
	return nil
}

// file returns what the line of a regular file says of it.
func (w *walker) file(p string, st *syscall.Stat_t) (kind, rest, xattrs string, err error) {
	id := inode{st.Dev, st.Ino}
	if st.Nlink > 1 {
		if first, ok := w.links[id]; ok {
			return "h", fmt.Sprintf(" %d", first), "", nil
		}
		w.links[id] = w.m.files
	}
	f, err := w.root.OpenFile(p, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", "", "", err
	}
	defer f.Close() // opened for reading
	w.hash.Reset()
	n, err := io.CopyBuffer(w.hash, onlyReader{f}, w.buf)
	if err != nil {
		return "", "", "", err
	}
	if n != st.Size {
		return "", "", "", &fs.PathError{Op: "read", Path: p, Err: errors.New("size changed")}
	}
	w.m.bytes += n
	xattrs, err = fileXattrs(f)
	return "f", fmt.Sprintf(" %d %x", n, w.hash.Sum(nil)), xattrs, err
}

func (w *walker) xattrs(p string) (string, error) {
	d, err := w.root.OpenFile(p, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return "", err
	}
	defer d.Close() // opened for reading
	return fileXattrs(d)
}

// onlyReader hides WriteTo, which would ignore the buffer.
type onlyReader struct{ io.Reader }

// fileXattrs returns the extended attributes of f in the form of a line.
func fileXattrs(f *os.File) (string, error) {
	list, err := xattrCall(func(b []byte) (int, error) { return unix.Flistxattr(int(f.Fd()), b) })
	if errors.Is(err, unix.ENOTSUP) || len(list) == 0 && err == nil {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("list xattrs: %w", err)
	}
	names := strings.Split(string(bytes.TrimSuffix(list, []byte{0})), "\x00")
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasPrefix(n, userXattr) })
	slices.Sort(names)
	var out strings.Builder
	for _, n := range names {
		v, err := xattrCall(func(b []byte) (int, error) { return unix.Fgetxattr(int(f.Fd()), n, b) })
		if err != nil {
			return "", fmt.Errorf("read xattr: %w", err)
		}
		fmt.Fprintf(&out, " %s=%s", strconv.QuoteToASCII(n), strconv.QuoteToASCII(string(v)))
	}
	return out.String(), nil
}

// xattrCall calls get with a buffer that is large enough: 64 KiB is the most
// that Linux returns for a list or a value (XATTR_LIST_MAX, XATTR_SIZE_MAX).
func xattrCall(get func([]byte) (int, error)) ([]byte, error) {
	n, err := get(nil)
	if err != nil || n == 0 {
		return nil, err
	}
	b := make([]byte, 64<<10)
	n, err = get(b)
	if err != nil {
		return nil, err
	}
	return b[:n], nil
}
