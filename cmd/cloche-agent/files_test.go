package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"testing"

	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/guest/dial"
)

// file is one entry of an archive.
type file struct {
	name string
	mode int64
	kind byte // 0 = a regular file
	data []byte
	link string
}

// archive makes a tar stream, gzipped if asked for.
func archive(t *testing.T, gz bool, files ...file) []byte {
	t.Helper()
	var b bytes.Buffer
	var w io.Writer = &b
	var z *gzip.Writer
	if gz {
		z = gzip.NewWriter(&b)
		w = z
	}
	tw := tar.NewWriter(w)
	for _, f := range files {
		if f.kind == 0 {
			f.kind = tar.TypeReg
		}
		if f.mode == 0 {
			f.mode = 0o644
		}
		h := &tar.Header{Name: f.name, Mode: f.mode, Typeflag: f.kind, Size: int64(len(f.data)), Linkname: f.link}
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write(f.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	if z != nil {
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// read reads a file of the machine whole.
func read(t *testing.T, c *dial.Client, path string) ([]byte, error) {
	t.Helper()
	_, r, err := c.ReadFile(t.Context(), guest.FileRequest{Path: []byte(path)})
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(r)
	if cerr := r.Close(); err == nil {
		err = cerr
	}
	return b, err
}

func TestF1_SizesRoundTrip(t *testing.T) {
	_, c := configured(t)
	sizes := []int{0, 1, 4095, 4096, 4097, 18 << 10, 64<<10 - 1, 64 << 10, 64<<10 + 1, 96 << 10, 120 << 10, 128 << 10, 128<<10 + 1,
		256<<10 - 1, 256 << 10, 256<<10 + 1, 1 << 20, 16 << 20, 32 << 20}
	for _, size := range sizes {
		data := make([]byte, size)
		_, _ = rand.Read(data) // never fails
		name := fmt.Sprintf("size/%d", size)
		gz := size%2 == 0 && size < 16<<20
		w, err := c.WriteFiles(t.Context(), guest.FileRequest{Gzip: gz}, bytes.NewReader(archive(t, gz, file{name: name, data: data})))
		if err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if w.Files != 1 || w.Bytes != int64(size) {
			t.Errorf("%d bytes: answer %+v", size, w)
		}
		got, err := read(t, c, name)
		if err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if sha256.Sum256(got) != sha256.Sum256(data) {
			t.Errorf("%d bytes: %d other bytes came back", size, len(got))
		}
	}
}
