package image

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/atomicfile"
)

// patience says how long a download goes on trying. The zero value is for
// production.
type patience struct {
	tries int           // in a row without a byte; default 6
	delay time.Duration // before the second try, doubled for each other; default 1 s
	stall time.Duration // without a byte before a try ends; default 60 s
}

func (p patience) withDefaults() patience {
	if p.tries == 0 {
		p.tries = 6
	}
	if p.delay == 0 {
		p.delay = time.Second
	}
	if p.stall == 0 {
		p.stall = time.Minute
	}
	return p
}

// download is one file on its way into the cache. What a broken connection left
// is in dest+".partial", and the next try, of this process or a later one, asks
// for the rest by Range (RFC 9110, section 14).
type download struct {
	client *http.Client
	url    string
	dest   string // in the cache; complete and verified if it exists
	size   int64  // -1 = not known
	max    int64  // with an unknown size
	hash   func() hash.Hash
	sum    []byte // of the whole
	meter  *meter
	patience
	counted int64 // what meter was told
	grown   int64 // by how much meter's total grew, with an unknown size
}

// errRestart says that what is there must be dropped and fetched again.
var errRestart = errors.New("the server does not continue where the download ended")

// run returns when dest is there and verified.
func (d *download) run(ctx context.Context) error {
	d.patience = d.withDefaults()
	if info, err := os.Stat(d.dest); err == nil {
		if d.size < 0 {
			d.meter.grow(info.Size())
		}
		d.progress(info.Size())
		return touch(d.dest)
	}
	limit := d.size
	if limit < 0 {
		limit = d.max
	}
	failed, restarts, resumed := 0, 0, false
	for {
		before := d.partialSize()
		resumed = resumed || before > 0
		err := d.once(ctx, limit)
		if err == nil {
			err = d.verify()
			if err == nil {
				return nil
			}
			if !resumed {
				return err
			}
			// A part from an earlier try may have been damaged by a crash.
			resumed = false
			err = errors.Join(errRestart, err)
		}
		if errors.Is(err, errRestart) {
			if rerr := os.Remove(d.partial()); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
				return hostError("restart download", rerr)
			}
			restarts++
		} else if ctx.Err() != nil || !transient(err) {
			return err
		}
		if d.partialSize() > before {
			failed = 0
		}
		if failed++; failed >= d.tries || restarts >= d.tries {
			return &cloche.Error{Code: cloche.CodeUnavailable, Op: "download",
				Message: "the download broke off and could not be continued; run the same command again to go on", Err: err}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d.delay << min(failed-1, 5)):
		}
	}
}

func (d *download) partial() string { return d.dest + ".partial" }

func (d *download) partialSize() int64 {
	info, err := os.Stat(d.partial())
	if err != nil {
		return 0
	}
	return info.Size()
}

// progress tells the meter that n bytes of this file are here.
func (d *download) progress(n int64) {
	d.meter.add(n - d.counted)
	d.counted = n
}

// transient reports whether another try may go better: an error that has a code
// is an answer, one without is a broken connection.
func transient(err error) bool {
	var answer *cloche.Error
	return !errors.As(err, &answer)
}

// once makes one request for what is missing and appends what comes.
func (d *download) once(ctx context.Context, limit int64) (err error) {
	f, err := os.OpenFile(d.partial(), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return hostError("open download", err)
	}
	defer func() {
		if cerr := f.Close(); err == nil && cerr != nil {
			err = hostError("write download", cerr)
		}
	}()
	off, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return hostError("open download", err)
	}
	if d.size >= 0 && off == d.size {
		return f.Sync()
	}
	if off > limit {
		return errRestart
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stalled := time.AfterFunc(d.stall, func() { cancel(errors.New("the server stopped sending")) })
	defer stalled.Stop()
	resp, err := d.request(ctx, off)
	if err != nil {
		return err
	}
	defer resp.Body.Close() // read to its end or given up
	if resp.StatusCode == http.StatusOK && off > 0 {
		if err := f.Truncate(0); err != nil {
			return hostError("restart download", err)
		}
		if off, err = f.Seek(0, io.SeekStart); err != nil {
			return hostError("restart download", err)
		}
	}
	if d.size < 0 && d.grown == 0 && resp.ContentLength > 0 {
		d.grown = off + resp.ContentLength
		d.meter.grow(d.grown)
	}
	d.progress(off)
	n, err := io.Copy(f, io.LimitReader(tickReader{resp.Body, func(n int) {
		stalled.Reset(d.stall)
		d.progress(d.counted + int64(n))
	}}, limit-off+1))
	if off += n; off > limit {
		return cloche.Errorf(cloche.CodeTooLarge, "a download is larger than its %d bytes", limit)
	}
	var pathErr *os.PathError
	switch {
	case errors.As(err, &pathErr): // of the file, not of the connection
		return hostError("write download", err)
	case err != nil:
		return fmt.Errorf("download: %w", errors.Join(err, context.Cause(ctx)))
	case d.size >= 0 && off < d.size:
		return fmt.Errorf("download: %w", io.ErrUnexpectedEOF)
	}
	if err := f.Sync(); err != nil {
		return hostError("write download", err)
	}
	return nil
}

// request asks for everything from off and returns an answer that has it.
func (d *download) request(ctx context.Context, off int64) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.url, nil)
	if err != nil {
		return nil, cloche.Internal("download", err)
	}
	req.Header.Set("Accept-Encoding", "identity")
	switch {
	case off > 0 && d.size > 0: // some registries want the end named
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, d.size-1))
	case off > 0:
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("download: %w", errors.Join(err, context.Cause(ctx)))
	}
	switch code := resp.StatusCode; {
	case code == http.StatusOK:
		return resp, nil
	case code == http.StatusPartialContent && off > 0 &&
		strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", off)):
		return resp, nil
	case code == http.StatusPartialContent, code == http.StatusRequestedRangeNotSatisfiable:
		err = errRestart
	case code >= 500, code == http.StatusTooManyRequests, code == http.StatusRequestTimeout:
		err = fmt.Errorf("download: the server answered %s", resp.Status)
	default:
		err = statusError(code)
	}
	return nil, errors.Join(err, resp.Body.Close())
}

// statusError gives the refusal of a registry its code.
func statusError(status int) error {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return cloche.Errorf(cloche.CodeForbidden, "the registry does not permit this: check the name, or log in with `docker login`")
	case http.StatusNotFound:
		return cloche.Errorf(cloche.CodeNotFound, "the registry has no such image")
	}
	return cloche.Errorf(cloche.CodeUnavailable, "the registry answered with status %d", status)
}

// verify compares the hash of the whole file and moves it into its place.
func (d *download) verify() error {
	f, err := os.Open(d.partial())
	if err != nil {
		return hostError("verify download", err)
	}
	h := d.hash()
	_, err = io.Copy(h, f)
	if err = errors.Join(err, f.Close()); err != nil {
		return hostError("verify download", err)
	}
	if string(h.Sum(nil)) != string(d.sum) {
		return errors.Join(
			cloche.Errorf(cloche.CodeInvalid, "a download does not have the digest that was promised"),
			os.Remove(d.partial()))
	}
	if err := os.Rename(d.partial(), d.dest); err != nil {
		return hostError("keep download", err)
	}
	return atomicfile.SyncDir(filepath.Dir(d.dest))
}

// tickReader calls tick for what was read.
type tickReader struct {
	io.Reader
	tick func(n int)
}

func (t tickReader) Read(p []byte) (int, error) {
	n, err := t.Reader.Read(p)
	if n > 0 {
		t.tick(n)
	}
	return n, err
}
