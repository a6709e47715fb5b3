package dial

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// ReadFile opens a file for reading. A missing one is CodeNotFound, a directory
// or a device CodeInvalid. The reader fails, and does not end with io.EOF,
// unless the whole file came. It must be closed.
func (c *Client) ReadFile(ctx context.Context, f guest.FileRequest) (cloche.FileInfo, io.ReadCloser, error) {
	body, err := json.Marshal(f)
	if err != nil {
		return cloche.FileInfo{}, nil, cloche.Internal("make request to agent", err)
	}
	resp, err := c.do(ctx, http.MethodPost, "/v1/files/read", bytes.NewReader(body))
	if err != nil {
		return cloche.FileInfo{}, nil, err
	}
	info := cloche.FileInfo{Size: -1}
	if s := resp.Header.Get(guest.HeaderSize); s != "" {
		info.Size, err = strconv.ParseInt(s, 10, 64)
		if err == nil && info.Size < 0 {
			err = fmt.Errorf("a file of %d bytes", info.Size)
		}
	}
	mode, merr := strconv.ParseUint(resp.Header.Get(guest.HeaderMode), 8, 12)
	if err = errors.Join(err, merr); err != nil {
		_ = resp.Body.Close() // nothing of it is wanted
		return cloche.FileInfo{}, nil, unavailable("read agent's answer", err)
	}
	info.Mode = uint32(mode)
	return info, &fileReader{resp: resp, left: info.Size, known: info.Size >= 0}, nil
}

// fileReader checks the length and the trailer of a file.
type fileReader struct {
	resp  *http.Response
	left  int64 // still due, if known
	known bool
}

// Read implements io.Reader.
func (f *fileReader) Read(p []byte) (int, error) {
	n, err := f.resp.Body.Read(p)
	if f.known && int64(n) > f.left {
		return 0, unavailable("read file", errors.New("more than the file's size came"))
	}
	f.left -= int64(n)
	switch {
	case err == io.EOF:
		if t := f.resp.Trailer.Get(guest.HeaderError); t != "" {
			return n, parseFailure([]byte(t))
		}
		if f.known && f.left > 0 {
			return n, unavailable("read file", io.ErrUnexpectedEOF)
		}
	case err != nil:
		err = unavailable("read file", err)
	}
	return n, err
}

// Close implements io.Closer. It may be called at any time.
func (f *fileReader) Close() error { return f.resp.Body.Close() }

// MakeDir makes one directory. One that exists is CodeConflict, a missing parent
// CodeNotFound.
func (c *Client) MakeDir(ctx context.Context, f guest.FileRequest) error {
	return c.call(ctx, http.MethodPost, "/v1/files/mkdir", f, nil)
}

// WriteFiles unpacks a tar stream. It returns an error unless every entry was
// written whole. A failing tar reader fails the call with the reader's error. No
// Read of it is in progress when the call returns: one that blocks holds it up.
func (c *Client) WriteFiles(ctx context.Context, f guest.FileRequest, tar io.Reader) (guest.Written, error) {
	q, err := json.Marshal(f)
	if err != nil {
		return guest.Written{}, cloche.Internal("make request to agent", err)
	}
	src := &source{r: tar}
	resp, err := c.do(ctx, http.MethodPost, "/v1/files/write?"+base64.RawURLEncoding.EncodeToString(q), src)
	if serr := src.detach(); serr != nil && err != nil {
		return guest.Written{}, serr
	}
	if err != nil {
		return guest.Written{}, err
	}
	b, err := readJSON(resp.Body)
	if cerr := resp.Body.Close(); err == nil {
		err = cerr
	}
	var w guest.Written
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	if err != nil {
		return guest.Written{}, unavailable("read agent's answer", err)
	}
	return w, nil
}
