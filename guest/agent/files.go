package agent

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// fileBuffer is the size of reads and writes of file content: large, because
// each costs several system calls on its way, which are slow in gVisor.
const fileBuffer = 256 << 10

// takeTransfer takes one of the places for reads and writes of files: each has
// buffers, and a write a thread. The host waits before it asks for too many;
// waiting here would keep its data in windows that others need.
func (a *Agent) takeTransfer() error {
	if a.transfers.Add(1) > guest.MaxTransfers {
		a.transfers.Add(-1)
		return cloche.Errorf(cloche.CodeExhausted, "more than %d files are being read or written", guest.MaxTransfers)
	}
	return nil
}

// place is where a file request works and as whom.
type place struct {
	user account
	base string // absolute
}

// locate resolves the user and the base of a request.
func (a *Agent) locate(f guest.FileRequest) (place, error) {
	cfg, err := a.configured()
	if err != nil {
		return place{}, err
	}
	spec := f.User
	if spec == "" {
		spec = cfg.User
	}
	u, err := a.accounts.lookup(spec)
	if err != nil {
		return place{}, err
	}
	dir, err := join(cfg.WorkDir, string(f.WorkDir))
	return place{u, dir}, err
}

// join resolves name against base and leaves ".." to the kernel, which knows
// where symlinks lead.
func join(base, name string) (string, error) {
	switch {
	case strings.ContainsRune(name, 0):
		return "", cloche.Errorf(cloche.CodeInvalid, "a path contains a NUL byte")
	case len(name) > cloche.MaxPathLen:
		return "", cloche.Errorf(cloche.CodeInvalid, "a path of %d bytes is longer than %d", len(name), cloche.MaxPathLen)
	case name == "":
		return base, nil
	case path.IsAbs(name):
		return name, nil
	case base == "/":
		return "/" + name, nil
	}
	return base + "/" + name, nil
}

// serveRead streams a file.
func (a *Agent) serveRead(w http.ResponseWriter, r *http.Request) {
	var f guest.FileRequest
	err := decode(r.Body, &f)
	if err == nil {
		err = a.takeTransfer()
	}
	var file *os.File
	if err == nil {
		defer a.transfers.Add(-1)
		file, err = a.openFile(f)
	}
	if err != nil {
		a.answer(w, r, nil, err)
		return
	}
	err = a.sendFile(r.Context(), w, file, string(f.Path))
	if cerr := file.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		a.log.WarnContext(r.Context(), "read file", "error", err)
	}
}

// openFile opens a regular file for reading as the user. Devices and FIFOs are
// not even opened: that alone can block or have an effect.
func (a *Agent) openFile(f guest.FileRequest) (*os.File, error) {
	p, err := a.locate(f)
	if err != nil {
		return nil, err
	}
	if len(f.Path) == 0 {
		return nil, cloche.Errorf(cloche.CodeInvalid, "no path")
	}
	name, err := join(p.base, string(f.Path))
	if err != nil {
		return nil, err
	}
	var file *os.File
	err = as(p.user, func() error {
		info, err := os.Stat(name)
		if err == nil {
			err = regular(info)
		}
		if err != nil {
			return err
		}
		file, err = os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		return err
	})
	if err == nil {
		var info os.FileInfo
		if info, err = file.Stat(); err == nil {
			err = regular(info) // it may have been replaced meanwhile
		}
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}
	if err != nil {
		return nil, fileError(string(f.Path), err)
	}
	return file, nil
}

var errNotRegular = errors.New("neither a file nor a directory")

func regular(info os.FileInfo) error {
	switch {
	case info.IsDir():
		return unix.EISDIR
	case !info.Mode().IsRegular():
		return errNotRegular
	}
	return nil
}

// sendFile writes the answer of a read. Files of /proc and /sys do not tell
// their size, so what fits into one buffer is read before anything is promised.
func (a *Agent) sendFile(ctx context.Context, w http.ResponseWriter, file *os.File, name string) error {
	info, err := file.Stat()
	if err != nil {
		a.fail(ctx, w, fileError(name, err))
		return err
	}
	buf := make([]byte, min(max(info.Size()+1, 4096), fileBuffer))
	n, err := io.ReadFull(file, buf)
	whole := err == io.EOF || err == io.ErrUnexpectedEOF
	if err != nil && !whole {
		a.fail(ctx, w, fileError(name, err))
		return err
	}
	size := info.Size()
	if whole {
		size = int64(n)
	}
	known := whole || size > int64(n)
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Trailer", guest.HeaderError)
	h.Set(guest.HeaderMode, strconv.FormatUint(uint64(info.Mode().Perm()), 8))
	if known {
		h.Set(guest.HeaderSize, strconv.FormatInt(size, 10))
	}
	w.WriteHeader(http.StatusOK)
	if _, err := w.Write(buf[:n]); err != nil || whole {
		return err
	}
	err = copyRest(w, file, buf, size-int64(n), known)
	if err != nil {
		h.Set(guest.HeaderError, a.failureHeader(ctx, fileError(name, err)))
	}
	return err
}

// errShort: a file became shorter while it was read.
var errShort = errors.New("it became shorter while it was read")

// copyRest sends left bytes of file, or all if the size is not known.
func copyRest(w io.Writer, file io.Reader, buf []byte, left int64, known bool) error {
	for !known || left > 0 {
		part := buf
		if known {
			part = buf[:min(int64(len(buf)), left)]
		}
		n, err := file.Read(part)
		if n > 0 {
			left -= int64(n)
			if _, werr := w.Write(part[:n]); werr != nil {
				return werr
			}
		}
		if err == io.EOF {
			if known && left > 0 {
				return errShort
			}
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fail answers with an error before anything else was written.
func (a *Agent) fail(ctx context.Context, w http.ResponseWriter, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	if err := json.NewEncoder(w).Encode(a.failure(ctx, err)); err != nil {
		a.log.WarnContext(ctx, "write answer", "error", err)
	}
}

// failureHeader is a Failure in the letters that a header may have.
func (a *Agent) failureHeader(ctx context.Context, err error) string {
	f := a.failure(ctx, err)
	f.Message = strings.Trim(strconv.QuoteToASCII(f.Message), `"`)
	b, err := json.Marshal(f)
	if err != nil {
		return `{"code":"internal_error"}`
	}
	return string(b)
}

// makeDir makes one directory as the user.
func (a *Agent) makeDir(f guest.FileRequest) error {
	p, err := a.locate(f)
	if err != nil {
		return err
	}
	if len(f.Path) == 0 {
		return cloche.Errorf(cloche.CodeInvalid, "no path")
	}
	name, err := join(p.base, string(f.Path))
	if err != nil {
		return err
	}
	if err := as(p.user, func() error { return os.Mkdir(name, 0o755) }); err != nil {
		return fileError(string(f.Path), err)
	}
	return nil
}

// serveWrite unpacks a tar stream.
func (a *Agent) serveWrite(w http.ResponseWriter, r *http.Request) {
	f, err := writeRequest(r.URL.RawQuery)
	var p place
	if err == nil {
		p, err = a.locate(f)
	}
	if err == nil {
		err = a.takeTransfer()
	}
	var done guest.Written
	if err == nil {
		defer a.transfers.Add(-1)
		err = as(p.user, func() (err error) {
			done, err = unpack(r.Body, f.Gzip, p.base)
			return err
		})
	}
	a.answer(w, r, done, err)
}

// writeRequest decodes the query of a write.
func writeRequest(query string) (guest.FileRequest, error) {
	var f guest.FileRequest
	b, err := base64.RawURLEncoding.DecodeString(query)
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil {
		return f, cloche.Errorf(cloche.CodeInvalid, "the query is not a file request: %v", err)
	}
	return f, nil
}

// fileError names the kernel's reasons for the user. Other errors, such as a
// body that broke off, stay as they are.
func fileError(name string, err error) error {
	var e *cloche.Error
	if errors.As(err, &e) {
		return err
	}
	code, why := cloche.CodeInvalid, ""
	switch {
	case errors.Is(err, unix.ENOENT):
		code, why = cloche.CodeNotFound, "no such file or directory"
	case errors.Is(err, unix.EEXIST):
		code, why = cloche.CodeConflict, "it exists"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code, why = cloche.CodeExhausted, "no space left in the sandbox"
	case errors.Is(err, unix.EFBIG):
		code, why = cloche.CodeTooLarge, "the file is too large"
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		code, why = cloche.CodeExhausted, "no file descriptors left in the sandbox"
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		why = "permission denied"
	case errors.Is(err, unix.EROFS):
		why = "the file system is read-only"
	case errors.Is(err, unix.EISDIR):
		why = "it is a directory"
	case errors.Is(err, unix.ENOTDIR):
		why = "a part of the path is not a directory"
	case errors.Is(err, unix.ELOOP):
		why = "too many symbolic links"
	case errors.Is(err, unix.ENAMETOOLONG):
		why = "the name is too long"
	case errors.Is(err, errNotRegular), errors.Is(err, unix.ENXIO):
		why = "it is neither a file nor a directory"
	case errors.Is(err, errShort):
		code, why = cloche.CodeConflict, errShort.Error()
	default:
		return fmt.Errorf("file %.256q: %w", name, err)
	}
	return cloche.Errorf(code, "%.256q: %s", name, why)
}
