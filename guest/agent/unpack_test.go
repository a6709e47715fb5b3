package agent

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloche-dev/cloche"
)

// tarOf makes an archive by hand: what the library would not write.
func tarOf(t testing.TB, entries ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	for _, h := range entries {
		kind := h.Typeflag
		h.Typeflag = tar.TypeReg
		var one bytes.Buffer
		w := tar.NewWriter(&one)
		body := []byte(h.Linkname)
		h.Linkname, h.Size, h.Mode = "", int64(len(body)), 0o644
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(body); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		raw := one.Bytes()
		raw[156] = kind
		copy(raw[148:156], "        ")
		sum := 0
		for _, c := range raw[:512] {
			sum += int(c)
		}
		copy(raw[148:156], fmt.Sprintf("%06o\x00 ", sum))
		b.Write(raw)
	}
	b.Write(make([]byte, 1024))
	return b.Bytes()
}

func pax(records ...string) *tar.Header {
	var b strings.Builder
	for _, r := range records {
		n := len(r) + 3
		for len(fmt.Sprintf("%d %s\n", n, r)) != n {
			n++
		}
		fmt.Fprintf(&b, "%d %s\n", n, r)
	}
	return &tar.Header{Name: "pax", Typeflag: tar.TypeXHeader, Linkname: b.String()}
}

func TestUnpackRefusesSparseFiles(t *testing.T) {
	for name, data := range map[string][]byte{
		"pax 1.0": tarOf(t, pax("GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=s", "GNU.sparse.realsize=1000000000000"),
			&tar.Header{Name: "s", Linkname: "0\n" + strings.Repeat("\x00", 510), Typeflag: tar.TypeReg}),
		"pax 0.1": tarOf(t, pax("GNU.sparse.size=1000000000000", "GNU.sparse.numblocks=1", "GNU.sparse.map=0,1"), &tar.Header{Name: "s", Linkname: "x", Typeflag: tar.TypeReg}),
		"gnu":     tarOf(t, &tar.Header{Name: "s", Linkname: "x", Typeflag: tar.TypeGNUSparse}),
	} {
		dir := t.TempDir()
		_, err := unpack(bytes.NewReader(data), false, dir)
		if cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
			t.Errorf("%s left %v, %v", name, entries, err)
		}
	}
}

func TestUnpackTakesNamesFromPAX(t *testing.T) {
	long := strings.Repeat("d/", 100) + strings.Repeat("n", 200)
	for name, want := range map[string]bool{long: true, "ünï/cödé": true, "../up": false, "/abs": false, "a/../../b": false} {
		dir := t.TempDir()
		data := tarOf(t, pax("path="+name), &tar.Header{Name: "short", Linkname: "x", Typeflag: tar.TypeReg})
		_, err := unpack(bytes.NewReader(data), false, dir)
		if (err == nil) != want {
			t.Errorf("%.30q: %v", name, err)
		}
		if b, rerr := os.ReadFile(filepath.Join(dir, name)); want && string(b) != "x" {
			t.Errorf("%.30q: %q, %v", name, b, rerr)
		}
	}
}

func TestUnpackMakesTheBase(t *testing.T) {
	dir := t.TempDir()
	data := tarOf(t, &tar.Header{Name: "./a//b", Linkname: "x", Typeflag: tar.TypeReg}, &tar.Header{Name: "git", Typeflag: tar.TypeXGlobalHeader, Linkname: "12 comment=\n"})
	w, err := unpack(bytes.NewReader(data), false, dir+"/made/below")
	if err != nil || w.Files != 1 || w.Bytes != 1 {
		t.Errorf("%+v, %v", w, err)
	}
	if b, err := os.ReadFile(dir + "/made/below/a/b"); err != nil || string(b) != "x" {
		t.Errorf("%q, %v", b, err)
	}
}

// FuzzUnpack checks that nothing but files and directories appears, and none
// outside of the base.
func FuzzUnpack(f *testing.F) {
	f.Add(tarOf(f, &tar.Header{Name: "a/b", Linkname: "content", Typeflag: tar.TypeReg}), false)
	f.Add(tarOf(f, pax("path=../up"), &tar.Header{Name: "s", Typeflag: tar.TypeReg}), false)
	f.Add(tarOf(f, &tar.Header{Name: "d", Typeflag: tar.TypeDir}, &tar.Header{Name: "l", Typeflag: tar.TypeSymlink}), false)
	f.Add([]byte{0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff, 1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0}, true)
	f.Fuzz(func(t *testing.T, data []byte, gz bool) {
		top := t.TempDir()
		if err := os.Mkdir(top+"/base", 0o755); err != nil {
			t.Fatal(err)
		}
		_, err := unpack(bytes.NewReader(data), gz, top+"/base")
		if cloche.ErrorCode(err) == cloche.CodeInternal {
			t.Errorf("a fault of the archive is not said to be one: %v", err)
		}
		err = filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
			if err == nil && !d.Type().IsRegular() && !d.IsDir() {
				t.Errorf("%q appeared", p)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
		if entries, err := os.ReadDir(top); err != nil || len(entries) != 1 {
			t.Errorf("outside: %v, %v", entries, err)
		}
	})
}
