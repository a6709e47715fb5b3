package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

const (
	maxID = 65535 // uids and gids of an image are 0 to this

	// maxDepth bounds the depth of a tree, so that walking it needs few
	// descriptors. The deepest of Debian's and npm's packages has below 30.
	maxDepth = 256

	// maxDirsLen bounds the memory for the times of directories; those that do
	// not fit keep the time of unpacking.
	maxDirsLen = 32 << 20

	// resolveInRoot makes the kernel resolve a path as chroot would: ".." and
	// absolute symbolic links end at the root of the image, whatever the
	// archive put there. openat2(2), Linux 5.6.
	resolveInRoot = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS
)

// unpacker applies the archives of one image, lowest first, to one directory.
// The archives are hostile; the directory is nobody else's. Every path is
// resolved by the kernel inside the root (resolveInRoot) up to its parent, and
// the last component is never followed.
//
// Kept: owners, modes with set-user-id, modification times, hard links, user.*
// attributes. Left out, with a note: device nodes and FIFOs, which a sandbox
// makes for itself if it may, and attributes of other namespaces (gVisor has no
// file capabilities), user.overlay.* among them, which the host's overlay
// would obey.
type unpacker struct {
	root   int    // descriptor of the directory
	base   string // its path, as the kernel spells it
	limits Limits
	stream int64 // left of limits.stream

	files, bytes int64
	notes        map[string]int64 // what was left out, and how often
	seed         maphash.Seed
	layer        map[uint64]struct{} // hashes of the resolved paths that the present layer made
	dirs         []dirTime           // set at the end, since filling a directory changes it
	dirsLen      int                 // bytes of the paths in dirs
	buf          []byte
}

type dirTime struct {
	path string // resolved
	time unix.Timespec
}

// archive is one layer: its uncompressed bytes and how to look at it.
type archive struct {
	r io.Reader
	// edit, if not nil, may change a header and returns false for an entry to
	// leave out.
	edit func(*tar.Header) bool
	// whiteouts: names that begin with .wh. take away what is below.
	whiteouts bool
}

// newUnpacker returns an unpacker into dir, which exists. Close it.
func newUnpacker(dir string, limits Limits) (*unpacker, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open image tree: %w", err)
	}
	base, err := os.Readlink(fdPath(fd))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open image tree: %w", err), unix.Close(fd))
	}
	limits = limits.withDefaults()
	return &unpacker{root: fd, base: base, limits: limits, stream: limits.stream(),
		notes: map[string]int64{}, seed: maphash.MakeSeed(), buf: make([]byte, 256<<10)}, nil
}

func (u *unpacker) close() error { return unix.Close(u.root) }

// apply unpacks one archive and reads it to its end.
func (u *unpacker) apply(ctx context.Context, a archive) error {
	u.layer = map[uint64]struct{}{}
	bound := &boundReader{r: a.r, n: u.stream}
	defer func() { u.stream = bound.n }()
	tr := tar.NewReader(bound)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) {
			return archiveError(err)
		}
		if err := u.count(1, 0); err != nil {
			return err
		}
		if a.edit != nil && !a.edit(hdr) {
			continue
		}
		if err := u.entry(hdr, tr, a.whiteouts); err != nil {
			return fmt.Errorf("entry %.200q: %w", hdr.Name, hostError("unpack image", err))
		}
	}
	// What follows the end mark counts for the digest of the layer.
	if _, err := io.CopyBuffer(io.Discard, onlyReader{bound}, u.buf); err != nil {
		return archiveError(err)
	}
	return u.dirTimes()
}

// archiveError is for what the archive's own bytes did.
func archiveError(err error) error {
	var have *cloche.Error
	if errors.As(err, &have) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &cloche.Error{Code: cloche.CodeInvalid, Op: "read image archive", Message: "the archive is damaged", Err: err}
}

// made reports whether the present layer has put something at a resolved path.
func (u *unpacker) made(real string) bool {
	_, ok := u.layer[maphash.String(u.seed, real)]
	return ok
}

// count adds to what the image has and fails at the limits.
func (u *unpacker) count(files, bytes int64) error {
	u.files += files
	if u.files > u.limits.Files {
		return cloche.Errorf(cloche.CodeTooLarge, "the image has more than %d files", u.limits.Files)
	}
	if bytes < 0 || bytes > u.limits.Bytes-u.bytes {
		return cloche.Errorf(cloche.CodeTooLarge, "the image has more than %d bytes", u.limits.Bytes)
	}
	u.bytes += bytes
	return nil
}

// entry puts one entry of an archive in its place.
func (u *unpacker) entry(hdr *tar.Header, content io.Reader, whiteouts bool) error {
	name, err := cleanName(hdr.Name)
	if err != nil {
		return err
	}
	if hdr.Uid < 0 || hdr.Uid > maxID || hdr.Gid < 0 || hdr.Gid > maxID {
		return cloche.Errorf(cloche.CodeInvalid, "owner %d:%d is outside 0 to %d", hdr.Uid, hdr.Gid, maxID)
	}
	switch hdr.Typeflag {
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeChar, tar.TypeBlock:
		u.notes["device nodes"]++
		return nil
	case tar.TypeFifo:
		u.notes["FIFOs"]++
		return nil
	}
	if name == "" {
		return u.rootEntry(hdr)
	}
	p, err := u.parent(path.Dir(name))
	if err != nil {
		return err
	}
	defer unix.Close(p.fd) // an O_PATH descriptor has nothing to lose
	base := path.Base(name)
	if whiteouts && strings.HasPrefix(base, whiteoutPrefix) {
		return u.whiteout(p, base)
	}
	if len(p.real)+1+len(base) > cloche.MaxPathLen {
		return cloche.Errorf(cloche.CodeInvalid, "the path is longer than %d bytes", cloche.MaxPathLen)
	}
	u.layer[maphash.String(u.seed, path.Join(p.real, base))] = struct{}{}
	switch hdr.Typeflag {
	case tar.TypeDir:
		return u.directory(p, base, hdr)
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.file(p, base, hdr, content)
	case tar.TypeSymlink:
		return u.symlink(p, base, hdr)
	case tar.TypeLink:
		return u.hardLink(p, base, hdr)
	}
	return cloche.Errorf(cloche.CodeInvalid, "type %q is not one that an image may have", hdr.Typeflag)
}

// cleanName returns the relative form of an entry's name, "" for the root. An
// absolute name counts from the root of the image; ".." is refused, because no
// tool that writes images makes it.
func cleanName(name string) (string, error) {
	if len(name) > cloche.MaxPathLen {
		return "", cloche.Errorf(cloche.CodeInvalid, "the path is longer than %d bytes", cloche.MaxPathLen)
	}
	if strings.ContainsRune(name, 0) {
		return "", cloche.Errorf(cloche.CodeInvalid, "the path has a NUL byte")
	}
	parts := make([]string, 0, 16)
	for c := range strings.SplitSeq(name, "/") {
		switch {
		case c == "" || c == ".":
		case c == "..":
			return "", cloche.Errorf(cloche.CodeInvalid, "the path tries to leave the image")
		case len(c) > unix.NAME_MAX:
			return "", cloche.Errorf(cloche.CodeInvalid, "a name is longer than %d bytes", unix.NAME_MAX)
		default:
			parts = append(parts, c)
		}
	}
	return strings.Join(parts, "/"), nil
}

// place is a directory of the tree.
type place struct {
	fd   int    // O_PATH
	real string // path from the root of the image with all links resolved; "/" = the root
}

// parent opens a directory by its name in the archive ("." = the root), making
// what is missing. The caller closes it.
func (u *unpacker) parent(dir string) (place, error) {
	p, err := u.openDir(dir)
	if !errors.Is(err, unix.ENOENT) {
		return p, err
	}
	at, err := u.parent(path.Dir(dir))
	if err != nil {
		return place{}, err
	}
	defer unix.Close(at.fd) // an O_PATH descriptor has nothing to lose
	if err := u.count(1, 0); err != nil {
		return place{}, err
	}
	if err := unix.Mkdirat(at.fd, path.Base(dir), 0o755); err != nil {
		if errors.Is(err, unix.EEXIST) {
			return place{}, cloche.Errorf(cloche.CodeInvalid, "the path leads through a link to nowhere")
		}
		return place{}, fmt.Errorf("make directory: %w", err)
	}
	if err := unix.Fchmodat(at.fd, path.Base(dir), 0o755, 0); err != nil { // whatever the umask
		return place{}, fmt.Errorf("make directory: %w", err)
	}
	return u.openDir(dir)
}

func (u *unpacker) openDir(dir string) (place, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: resolveInRoot}
	var fd int
	err := error(unix.EAGAIN)
	// EAGAIN: a rename somewhere on the host raced with a ".." (openat2(2)).
	for try := 0; errors.Is(err, unix.EAGAIN) && try < 1000; try++ {
		fd, err = unix.Openat2(u.root, dir, &how)
	}
	if err != nil {
		return place{}, fmt.Errorf("open directory: %w", err)
	}
	real, err := os.Readlink(fdPath(fd))
	rest, inside := strings.CutPrefix(real, u.base)
	switch {
	case err != nil:
	case !inside || rest != "" && rest[0] != '/': // cannot be, and must not be
		err = cloche.Errorf(cloche.CodeInvalid, "the path leaves the image")
	case strings.Count(rest, "/") > maxDepth:
		err = cloche.Errorf(cloche.CodeInvalid, "the path is more than %d directories deep", maxDepth)
	}
	if err != nil {
		return place{}, errors.Join(err, unix.Close(fd))
	}
	return place{fd: fd, real: "/" + strings.TrimPrefix(rest, "/")}, nil
}

func fdPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// rootEntry applies what an archive says of the root itself.
func (u *unpacker) rootEntry(hdr *tar.Header) error {
	if hdr.Typeflag != tar.TypeDir {
		return cloche.Errorf(cloche.CodeInvalid, "the root of an image is a directory")
	}
	p, err := u.openDir(".")
	if err != nil {
		return err
	}
	defer unix.Close(p.fd) // an O_PATH descriptor has nothing to lose
	return u.dirMeta(p, ".", hdr)
}

func (u *unpacker) directory(p place, base string, hdr *tar.Header) error {
	var st unix.Stat_t
	err := unix.Fstatat(p.fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return u.dirMeta(p, base, hdr) // a lower layer's content stays
	case err == nil:
		err = unix.Unlinkat(p.fd, base, 0)
	case errors.Is(err, unix.ENOENT):
		err = nil
	}
	if err != nil {
		return fmt.Errorf("replace by directory: %w", err)
	}
	if err := unix.Mkdirat(p.fd, base, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	return u.dirMeta(p, base, hdr)
}

func (u *unpacker) dirMeta(p place, base string, hdr *tar.Header) error {
	fd, err := unix.Openat(p.fd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open directory: %w", err)
	}
	defer unix.Close(fd) // opened for reading
	if real := path.Join(p.real, base); u.dirsLen+len(real) < maxDirsLen {
		u.dirs = append(u.dirs, dirTime{real, modTime(hdr)})
		u.dirsLen += len(real)
	}
	return u.meta(fd, hdr)
}

// meta sets owner, mode and attributes of an open file, in this order: a change
// of owner clears set-user-id.
func (u *unpacker) meta(fd int, hdr *tar.Header) error {
	if err := unix.Fchown(fd, hdr.Uid, hdr.Gid); err != nil {
		return fmt.Errorf("set owner: %w", err)
	}
	if err := unix.Fchmod(fd, uint32(hdr.Mode)&0o7777); err != nil {
		return fmt.Errorf("set mode: %w", err)
	}
	for key, value := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(key, paxXattr)
		switch {
		case !ok:
		case name == "security.capability":
			u.notes["file capabilities"]++
		case !strings.HasPrefix(name, userXattr) || strings.HasPrefix(name, overlayXattr):
			u.notes["extended attributes"]++
		default:
			if err := unix.Fsetxattr(fd, name, []byte(value), 0); err != nil {
				return fmt.Errorf("set attribute: %w", err)
			}
		}
	}
	return nil
}

const (
	paxXattr     = "SCHILY.xattr."
	userXattr    = "user."
	overlayXattr = "user.overlay." // overlayfs with its option userxattr
)

func (u *unpacker) file(p place, base string, hdr *tar.Header, content io.Reader) error {
	if err := u.count(0, hdr.Size); err != nil {
		return err
	}
	if err := removeAt(p.fd, base); err != nil {
		return fmt.Errorf("replace file: %w", err)
	}
	fd, err := unix.Openat(p.fd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("make file: %w", err)
	}
	f := os.NewFile(uintptr(fd), base)
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, content, u.buf)
	switch {
	case err == nil && n != hdr.Size, errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, tar.ErrHeader):
		err = archiveError(errors.Join(err, io.ErrUnexpectedEOF))
	case err == nil:
		err = u.meta(fd, hdr)
	}
	if err == nil {
		ts := modTime(hdr)
		err = unix.UtimesNanoAt(p.fd, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

func (u *unpacker) symlink(p place, base string, hdr *tar.Header) error {
	if hdr.Linkname == "" || len(hdr.Linkname) >= cloche.MaxPathLen || strings.ContainsRune(hdr.Linkname, 0) {
		return cloche.Errorf(cloche.CodeInvalid, "a symbolic link has a target of 1 to %d bytes without NUL", cloche.MaxPathLen-1)
	}
	if err := removeAt(p.fd, base); err != nil {
		return fmt.Errorf("replace by link: %w", err)
	}
	if err := unix.Symlinkat(hdr.Linkname, p.fd, base); err != nil {
		return fmt.Errorf("make link: %w", err)
	}
	if err := unix.Fchownat(p.fd, base, hdr.Uid, hdr.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set owner: %w", err)
	}
	ts := modTime(hdr)
	return unix.UtimesNanoAt(p.fd, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

// hardLink gives a file of the image, this layer's or a lower one's, another
// name. Only files and symbolic links can have one.
func (u *unpacker) hardLink(p place, base string, hdr *tar.Header) error {
	target, err := cleanName(hdr.Linkname)
	if err != nil {
		return fmt.Errorf("target of hard link: %w", err)
	}
	missing := cloche.Errorf(cloche.CodeInvalid, "hard link to %.200q, which is not a file of the image", hdr.Linkname)
	if target == "" {
		return missing
	}
	from, err := u.openDir(path.Dir(target))
	if errors.Is(err, unix.ENOENT) {
		return missing
	}
	if err != nil {
		return err
	}
	defer unix.Close(from.fd) // an O_PATH descriptor has nothing to lose
	var have, old unix.Stat_t
	if err := unix.Fstatat(from.fd, path.Base(target), &have, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return missing
	}
	if kind := have.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFLNK {
		return missing
	}
	if err := unix.Fstatat(p.fd, base, &old, unix.AT_SYMLINK_NOFOLLOW); err == nil && old.Ino == have.Ino && old.Dev == have.Dev {
		return nil // a link to itself: removing the old name first would lose the file
	}
	if err := removeAt(p.fd, base); err != nil {
		return fmt.Errorf("replace by hard link: %w", err)
	}
	if err := unix.Linkat(from.fd, path.Base(target), p.fd, base, 0); err != nil {
		if errors.Is(err, unix.ENOENT) { // it was inside what it replaced
			return missing
		}
		return fmt.Errorf("make hard link: %w", err)
	}
	return nil
}

// modTime returns the time of an entry, 0 for one that a file system may not
// hold.
func modTime(hdr *tar.Header) unix.Timespec {
	sec := hdr.ModTime.Unix()
	if sec < 0 || sec > 1<<33 { // year 2242; ext4 ends in 2446
		return unix.Timespec{}
	}
	return unix.Timespec{Sec: sec, Nsec: int64(hdr.ModTime.Nanosecond())}
}

// dirTimes sets the times of the layer's directories, those that are still
// there.
func (u *unpacker) dirTimes() error {
	for _, d := range u.dirs {
		p, err := u.openDir("." + d.path)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		if err != nil {
			return err
		}
		err = unix.UtimesNanoAt(unix.AT_FDCWD, fdPath(p.fd), []unix.Timespec{d.time, d.time}, 0)
		if err = errors.Join(err, unix.Close(p.fd)); err != nil {
			return hostError("set directory time", err)
		}
	}
	u.dirs, u.dirsLen = nil, 0
	return nil
}
