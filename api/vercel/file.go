package vercel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
)

// Headers of a file that is read, both extras: clients may show progress and
// keep the mode. The length is not promised, because a file may grow meanwhile.
const (
	sizeHeader = "Cloche-Size" // decimal
	modeHeader = "Cloche-Mode" // octal permission bits
)

// copyBuffer is what one transfer holds in memory.
const copyBuffer = 256 << 10

type pathBody struct {
	Path  string `json:"path"`
	Bytes []byte `json:"pathBytes"` // extra: base64, for a path that is not Unicode
	Cwd   string `json:"cwd"`
}

// path is the path that the body names.
func (b *pathBody) path() (string, error) {
	p := b.Path
	if len(b.Bytes) > 0 {
		p = string(b.Bytes)
	}
	switch {
	case p == "":
		return "", cloche.Errorf(cloche.CodeInvalid, "the field \"path\" is missing")
	case strings.ContainsRune(p+b.Cwd, 0):
		return "", cloche.Errorf(cloche.CodeInvalid, "a path has no NUL byte")
	case len(p) > cloche.MaxPathLen || len(b.Cwd) > cloche.MaxPathLen:
		return "", cloche.Errorf(cloche.CodeInvalid, "a path has at most %d bytes", cloche.MaxPathLen)
	}
	return p, nil
}

// pathRequest reads a request about one path of a session.
func (c *call) pathRequest() (id cloche.SessionID, path, cwd string, err error) {
	var body pathBody
	if id, err = c.session(); err == nil {
		err = c.decode(&body, maxBody)
	}
	if err == nil {
		path, err = body.path()
	}
	return id, path, body.Cwd, err
}

func (c *call) makeDir() error {
	id, path, cwd, err := c.pathRequest()
	if err != nil {
		return err
	}
	err = c.Service.MakeDir(c.r.Context(), c.who, id, cloche.MakeDir{Path: path, WorkDir: cwd})
	if e := (*cloche.Error)(nil); errors.As(err, &e) && e.Code == cloche.CodeConflict {
		// What exists is a bad request here, and not a race for a name.
		return &cloche.Error{Code: cloche.CodeInvalid, Op: e.Op, Message: e.Message, Err: e}
	}
	if err != nil {
		return err
	}
	return c.answer(struct{}{})
}

// writeFiles passes a tar stream on as it comes: nothing of it is kept here.
func (c *call) writeFiles() error {
	id, err := c.session()
	if err != nil {
		return err
	}
	w := cloche.WriteFiles{WorkDir: c.r.Header.Get("X-Cwd")}
	switch kind, _, _ := mime.ParseMediaType(c.r.Header.Get("Content-Type")); kind {
	case "application/gzip", "application/x-gzip":
		w.Gzip = true
	case "application/x-tar":
	default:
		return cloche.Errorf(cloche.CodeInvalid, "content-type %q is neither application/gzip nor application/x-tar", clip(kind))
	}
	if len(w.WorkDir) > cloche.MaxPathLen {
		return cloche.Errorf(cloche.CodeInvalid, "a path has at most %d bytes", cloche.MaxPathLen)
	}
	body := &idleReader{rc: http.NewResponseController(c.w), r: c.r.Body, ended: make(chan struct{})}
	err = c.slowly(true, body.ended, func(ctx context.Context) (any, error) {
		if err := c.Service.WriteFiles(ctx, c.who, id, w, body); err != nil {
			return nil, err
		}
		if err := body.drain(); err != nil { // what follows the archive
			return nil, cloche.Errorf(cloche.CodeInvalid, "the request body broke off")
		}
		return struct{}{}, nil
	})
	if err != nil && c.w.status == 0 {
		// A client hears the answer only once it has sent everything: one
		// that is cut off while it sends sees a broken connection, and
		// repeats the whole instead of, say, resuming the sandbox.
		_ = body.drain()
	}
	return err
}

// idleReader reads a body of any length from a client that may be slow but must
// not stop.
type idleReader struct {
	rc *http.ResponseController
	r  io.Reader

	ended chan struct{} // closed after the first error of Read
	once  sync.Once
}

// Read implements io.Reader.
func (i *idleReader) Read(b []byte) (int, error) {
	_ = i.rc.SetReadDeadline(time.Now().Add(idleTimeout)) // a test's writer may have none
	n, err := i.r.Read(b)
	if err != nil {
		// The server goes on reading after the body, to notice that the
		// client goes away; that must not end with the deadline.
		_ = i.rc.SetReadDeadline(time.Time{})
		i.once.Do(func() { close(i.ended) })
	}
	return n, err
}

func (i *idleReader) drain() error {
	_, err := io.Copy(io.Discard, i)
	return err
}

// readFile streams a file. Its end is the end of the answer; whatever goes wrong
// before it cuts the connection, so that half a file never looks whole and no
// error is taken for content.
func (c *call) readFile() error {
	id, path, cwd, err := c.pathRequest()
	if err != nil {
		return err
	}
	info, file, err := c.Service.ReadFile(c.r.Context(), c.who, id, cloche.ReadFile{Path: path, WorkDir: cwd})
	if err != nil {
		return err
	}
	defer file.Close() // only read from
	buf := make([]byte, copyBuffer)
	n, err := io.ReadAtLeast(file, buf, 1) // a failure here still has a status
	if err != nil && err != io.EOF {
		return err
	}
	c.w.Header().Set("Content-Type", "application/octet-stream")
	if info.Size >= 0 {
		c.w.Header().Set(sizeHeader, strconv.FormatInt(info.Size, 10))
	}
	c.w.Header().Set(modeHeader, strconv.FormatUint(uint64(info.Mode), 8))
	c.w.WriteHeader(http.StatusOK)
	if _, err := c.w.Write(buf[:n]); err != nil {
		return fmt.Errorf("write to the client: %w", err)
	}
	if err == io.EOF {
		return nil
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{c.w}, struct{ io.Reader }{file}, buf); err != nil {
		return fmt.Errorf("copy the file: %w", err) // fail cuts the connection
	}
	return nil
}
