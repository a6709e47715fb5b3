package client

import (
	"context"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"unicode/utf8"

	"github.com/cloche-dev/cloche"
)

// WriteFiles unpacks a tar stream in the session, names
// relative to dir, which is an absolute path. Missing parents are made and
// existing files replaced. It returns once everything is in place, and uses
// constant memory. An entry that the server refuses fails the whole call.
func (c *Client) WriteFiles(ctx context.Context, id cloche.SessionID, dir string, archive io.Reader) error {
	req, err := c.request(ctx, call{method: http.MethodPost, path: sessionPath(id) + "/fs/write"}, blocks{archive})
	if err != nil {
		return err
	}
	// An extra of ours: other clients compress.
	req.Header.Set("Content-Type", "application/x-tar")
	req.Header.Set("X-Cwd", dir)
	resp, err := c.stream(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswer)); err != nil {
		return c.unreachable(ctx, err)
	}
	return nil
}

// blockSize is what a connection reads and writes at once. With the 4 KiB of
// net/http a file goes at half the speed.
const blockSize = 256 << 10

// blocks is a reader that is sent in pieces as large as it gives them, and as
// soon: net/http alone would take 32 KiB at a time.
type blocks struct{ io.Reader }

// WriteTo implements io.WriterTo, which net/http uses for a body.
func (b blocks) WriteTo(w io.Writer) (n int64, err error) {
	buf := make([]byte, blockSize)
	for {
		got, err := b.Read(buf)
		if got > 0 {
			sent, werr := w.Write(buf[:got])
			n += int64(sent)
			if werr != nil {
				return n, werr
			}
		}
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// File is the content of a file that is being read. A failure midway is an
// error of Read, never a short success. The caller closes it.
type File struct {
	io.ReadCloser
	Size int64  // when it was opened; -1 = not known. It may have changed since
	Mode uint32 // permission bits; 0 = not known
}

// ReadFile opens a file of the session. A relative path is below the session's
// working directory. No such file is CodeNotFound, a directory CodeInvalid.
func (c *Client) ReadFile(ctx context.Context, id cloche.SessionID, path string) (*File, error) {
	name := map[string]any{"path": path}
	if !utf8.ValidString(path) { // JSON cannot carry it
		name = map[string]any{"pathBytes": []byte(path)}
	}
	body, err := jsonReader(name)
	if err != nil {
		return nil, err
	}
	req, err := c.request(ctx, call{method: http.MethodPost, path: sessionPath(id) + "/fs/read"}, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.stream(req)
	if err != nil {
		return nil, err
	}
	if t, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")); t != "application/octet-stream" {
		resp.Body.Close()
		return nil, fmt.Errorf("answer of type %q in place of a file's content", t)
	}
	f := &File{Size: -1}
	if size, err := strconv.ParseInt(resp.Header.Get("Cloche-Size"), 10, 64); err == nil {
		f.Size = size
	}
	if mode, err := strconv.ParseUint(resp.Header.Get("Cloche-Mode"), 8, 32); err == nil {
		f.Mode = uint32(mode)
	}
	f.ReadCloser = &fileBody{ReadCloser: resp.Body, ctx: ctx, c: c}
	return f, nil
}

// fileBody names the failures of a body.
type fileBody struct {
	io.ReadCloser
	ctx context.Context // of the request, to tell its end from a broken one
	c   *Client
}

// Read reads content.
func (b *fileBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = b.c.unreachable(b.ctx, err)
	}
	return n, err
}

// MakeDir makes a directory, one level. One that exists is CodeInvalid.
func (c *Client) MakeDir(ctx context.Context, id cloche.SessionID, path string) error {
	return c.do(ctx, call{
		method: http.MethodPost, path: sessionPath(id) + "/fs/mkdir",
		body: map[string]string{"path": path},
	}, nil)
}
