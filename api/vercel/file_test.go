package vercel

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/cloche-dev/cloche"
)

// archive is one file in a tar stream.
func archive(t testing.TB, name string, data []byte, zip bool) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	var w io.Writer = &b
	if zip {
		w = z
	}
	a := tar.NewWriter(w)
	err := a.WriteHeader(&tar.Header{Name: name, Size: int64(len(data)), Mode: 0o640})
	if err == nil {
		_, err = a.Write(data)
	}
	if err == nil {
		err = a.Close()
	}
	if err == nil && zip {
		err = z.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestF3AnyBytesInFilesAndNames(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/fs/"
	data := make([]byte, 3000)
	for i := range data {
		data[i] = byte(i)
	}
	name := "a\nb\xff\xfe"
	for _, zip := range []bool{true, false} {
		kind := map[bool]string{true: "application/gzip", false: "application/x-tar"}[zip]
		res, body := s.send(t, s.request(t, "POST", path+"write", bytes.NewReader(archive(t, name, data, zip)), "Content-Type", kind, "X-Cwd", "/tmp"))
		if res.StatusCode != 200 || body != "{}" {
			t.Fatalf("write: %d %s", res.StatusCode, body)
		}
		res, body = s.send(t, s.request(t, "POST", path+"read", jsonBody(t, map[string]any{"pathBytes": []byte(name), "cwd": "/tmp"})))
		if res.StatusCode != 200 || body != string(data) {
			t.Fatalf("read: %d, %d bytes", res.StatusCode, len(body))
		}
		if h := res.Header; h.Get("Content-Type") != "application/octet-stream" || h.Get("Cloche-Size") != "3000" || h.Get("Cloche-Mode") != "640" {
			t.Errorf("headers %v", h)
		}
	}
	res, body := s.call(t, "POST", path+"read", `{"path":"none"}`)
	wantError(t, res, body, 404, cloche.CodeNotFound)
	res, body = s.call(t, "POST", path+"read", `{"path":"/tmp"}`)
	wantError(t, res, body, 400, cloche.CodeInvalid)
	res, body = s.call(t, "POST", path+"write", "x", "Content-Type", "application/json")
	wantError(t, res, body, 400, cloche.CodeInvalid)
	res, body = s.call(t, "POST", path+"write", "not gzip", "Content-Type", "application/gzip")
	wantError(t, res, body, 400, cloche.CodeInvalid)
}

// files is a Service with one source and one sink of files.
type files struct {
	Service
	write func(io.Reader) error
	read  func() io.Reader
}

func (f files) WriteFiles(_ context.Context, _ cloche.Principal, _ cloche.SessionID, _ cloche.WriteFiles, r io.Reader) error {
	return f.write(r)
}

func (f files) ReadFile(context.Context, cloche.Principal, cloche.SessionID, cloche.ReadFile) (cloche.FileInfo, io.ReadCloser, error) {
	return cloche.FileInfo{Size: -1, Mode: 0o644}, io.NopCloser(f.read()), nil
}

var anySession = string(cloche.NewSessionID())

// pattern is n bytes in which no piece can be missing or moved unseen.
func pattern(n int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), n) }

// TestF1Sizes: whatever is sent arrives, at the sizes where others lost it, and
// memory does not grow with it.
func TestF1Sizes(t *testing.T) {
	var got atomic.Value
	var size atomic.Int64
	s := start(t, files{
		write: func(r io.Reader) error {
			h := sha256.New()
			n, err := io.Copy(h, r)
			got.Store(fmt.Sprintf("%x", h.Sum(nil)))
			size.Store(n)
			return err
		},
		read: func() io.Reader { return pattern(size.Load()) },
	})
	path := "/v2/sandboxes/sessions/" + anySession + "/fs/"
	sizes := []int64{0, 1, 64 << 20}
	for _, n := range []int64{4 << 10, 18 << 10, 64 << 10, 96 << 10, 128 << 10, 256 << 10, 1 << 20, 16 << 20} {
		sizes = append(sizes, n-1, n, n+1)
	}
	for _, n := range sizes {
		h := sha256.New()
		if _, err := io.Copy(h, pattern(n)); err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("%x", h.Sum(nil))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		res, body := s.send(t, s.request(t, "POST", path+"write", pattern(n), "Content-Type", "application/gzip"))
		if res.StatusCode != 200 || got.Load() != want || size.Load() != n {
			t.Fatalf("write of %d bytes: %d %s, %d bytes arrived", n, res.StatusCode, body, size.Load())
		}
		res, err := s.Client().Do(s.request(t, "POST", path+"read", strings.NewReader(`{"path":"x"}`)))
		if err != nil {
			t.Fatal(err)
		}
		h.Reset()
		if _, err := io.Copy(h, res.Body); err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if sum := fmt.Sprintf("%x", h.Sum(nil)); sum != want {
			t.Fatalf("read of %d bytes: other content", n)
		}
		runtime.ReadMemStats(&after)
		if grown := int64(after.TotalAlloc - before.TotalAlloc); grown > 8<<20 {
			t.Errorf("%d bytes allocated %d", n, grown)
		}
	}
}

// TestReadThatFailsMidway: half a file is never a whole one, and no error is in
// it.
func TestReadThatFailsMidway(t *testing.T) {
	broken := func() io.Reader { return iotest.ErrReader(errors.New("the disk broke")) }
	var source atomic.Value // of func() io.Reader
	s := start(t, files{read: func() io.Reader { return source.Load().(func() io.Reader)() }})
	path := "/v2/sandboxes/sessions/" + anySession + "/fs/read"
	source.Store(broken)
	res, body := s.call(t, "POST", path, `{"path":"x"}`)
	wantError(t, res, body, 500, cloche.CodeInternal)
	for _, n := range []int64{1, 100_000, 1 << 20} {
		source.Store(func() io.Reader { return io.MultiReader(pattern(n), broken()) })
		res, err := s.Client().Do(s.request(t, "POST", path, strings.NewReader(`{"path":"x"}`)))
		if err != nil {
			continue // cut before the headers were on their way
		}
		got, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err == nil {
			t.Fatalf("%d of %d bytes looked whole", len(got), n)
		}
		if bytes.Contains(got, []byte("internal")) {
			t.Error("the error is in the file")
		}
	}
}

// TestRefusedWriteIsHeard: a client that is still sending hears why, because the
// rest of what it sends is read.
func TestRefusedWriteIsHeard(t *testing.T) {
	s := start(t, files{write: func(io.Reader) error { return cloche.Errorf(cloche.CodeGone, "it has ended") }}, func(c *Config) {
		c.HeadersWithin = 20 * time.Millisecond // less than the upload takes
	})
	path := "/v2/sandboxes/sessions/" + anySession + "/fs/write"
	res, body := s.send(t, s.request(t, "POST", path, pattern(32<<20), "Content-Type", "application/gzip"))
	wantError(t, res, body, 410, cloche.CodeGone)
}

// TestBrokenWriteIsNoSuccess: a body that breaks off is an error to the Service.
func TestBrokenWriteIsNoSuccess(t *testing.T) {
	seen := make(chan error, 1)
	s := start(t, files{write: func(r io.Reader) error {
		_, err := io.Copy(io.Discard, r)
		seen <- err
		return nil
	}})
	path := "/v2/sandboxes/sessions/" + anySession + "/fs/write"
	r := s.request(t, "POST", path, io.MultiReader(pattern(100_000), iotest.ErrReader(errors.New("gone"))), "Content-Type", "application/gzip")
	if _, err := s.Client().Do(r); err == nil {
		t.Fatal("the client saw no error")
	}
	if err := <-seen; err == nil {
		t.Fatal("half a body looked whole")
	}
}

// TestSlowWriteFailsByACut: after its headers are out, a failed write cannot be
// told from {} by what is in the body.
func TestSlowWriteFailsByACut(t *testing.T) {
	release := make(chan error)
	s := start(t, files{write: func(r io.Reader) error {
		_, err := io.Copy(io.Discard, r)
		return errors.Join(err, <-release)
	}}, func(c *Config) { c.HeadersWithin, c.Heartbeat = time.Millisecond, time.Millisecond })
	path := "/v2/sandboxes/sessions/" + anySession + "/fs/write"
	for _, fail := range []error{nil, errors.New("late")} {
		res, err := s.Client().Do(s.request(t, "POST", path, pattern(5<<20), "Content-Type", "application/gzip"))
		if err != nil {
			t.Fatal(err)
		}
		release <- fail
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if fail == nil && (err != nil || strings.TrimSpace(string(body)) != "{}") {
			t.Errorf("%q %v", body, err)
		}
		if fail != nil && err == nil {
			t.Errorf("a failure looked like %q", body)
		}
	}
}

// TestSlowUploadKeepsItsStatus: while a client still sends it does not wait for
// headers, so that a refusal reaches it as what it is however long that took.
func TestSlowUploadKeepsItsStatus(t *testing.T) {
	s := start(t, files{write: func(r io.Reader) error {
		if _, err := io.CopyN(io.Discard, r, 2); err != nil {
			return err
		}
		return cloche.Errorf(cloche.CodeTooLarge, "too many entries")
	}}, func(c *Config) { c.HeadersWithin, c.Heartbeat = time.Millisecond, time.Millisecond })
	pr, pw := io.Pipe()
	go func() { // ends with the request
		for range 20 {
			<-time.After(2 * time.Millisecond)
			if _, err := pw.Write([]byte("x")); err != nil {
				return
			}
		}
		pw.Close()
	}()
	path := "/v2/sandboxes/sessions/" + anySession + "/fs/write"
	res, err := s.Client().Do(s.request(t, "POST", path, pr, "Content-Type", "application/gzip"))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != 413 {
		t.Errorf("status %d, want 413", res.StatusCode)
	}
}
