package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/cloche-dev/cloche"
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

// write unpacks an archive and returns the error.
func write(t *testing.T, c *dial.Client, f guest.FileRequest, files ...file) error {
	t.Helper()
	_, err := c.WriteFiles(t.Context(), f, bytes.NewReader(archive(t, f.Gzip, files...)))
	return err
}

func TestF1_FullDiskIsAnErrorAndLeavesNothing(t *testing.T) {
	_, c := configured(t)
	at := guest.FileRequest{WorkDir: []byte(smallDisk)}
	if err := write(t, c, at, file{name: "old", data: []byte("old content")}); err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{smallSize, smallSize * 3} {
		err := write(t, c, at, file{name: "old", data: make([]byte, size)})
		if cloche.ErrorCode(err) != cloche.CodeExhausted {
			t.Errorf("%d bytes into %d: %v", size, smallSize, err)
		}
	}
	if b, err := read(t, c, smallDisk+"/old"); err != nil || string(b) != "old content" {
		t.Errorf("the old file: %q, %v", b, err)
	}
	if r := sh(t, c, "ls -A "+smallDisk); string(r.stdout) != "old\n" {
		t.Errorf("left: %q", r.stdout)
	}
}

func TestF1_CutArchivesAreErrors(t *testing.T) {
	_, c := configured(t)
	data := make([]byte, 200<<10)
	_, _ = rand.Read(data) // never fails
	for _, gz := range []bool{false, true} {
		whole := archive(t, gz, file{name: "cut", data: data}, file{name: "second", data: data})
		for _, n := range []int{0, 1, 511, 600, 100 << 10, 201 << 10, len(whole) - 100<<10, len(whole) - 1030} {
			if !gz && n == 0 {
				continue // an empty stream is an empty archive
			}
			_, err := c.WriteFiles(t.Context(), guest.FileRequest{Gzip: gz}, bytes.NewReader(whole[:n]))
			if cloche.ErrorCode(err) != cloche.CodeInvalid {
				t.Errorf("gzip %v, %d of %d bytes: %v", gz, n, len(whole), err)
			}
		}
	}
	broken := errors.New("the client has gone")
	_, err := c.WriteFiles(t.Context(), guest.FileRequest{}, io.MultiReader(bytes.NewReader(archive(t, false, file{name: "cut", data: data})[:100<<10]), iotest.ErrReader(broken)))
	if !errors.Is(err, broken) {
		t.Errorf("a reader that fails: %v", err)
	}
	eventually(t, "no half-written file stays", func() bool { return string(sh(t, c, "ls -A | grep cloche").stdout) == "" })
}

func TestF3_BinarySafeNames(t *testing.T) {
	_, c := configured(t)
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	names := []string{"new\nline", "invalid-\xff\xfe-utf8", "quote'\"\\", "tab\there", "\x01\x02\x7f", "ünï", "-dash", " space ", "a\x80"}
	for _, name := range names {
		content := append(append([]byte(name), all...), all...)
		if err := write(t, c, guest.FileRequest{}, file{name: "d-" + name + "/" + name, data: content}); err != nil {
			t.Errorf("write %q: %v", name, err)
			continue
		}
		got, err := read(t, c, "d-"+name+"/"+name)
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("read %q: %d bytes, %v", name, len(got), err)
		}
		if err := c.MakeDir(t.Context(), guest.FileRequest{WorkDir: []byte("d-" + name), Path: []byte(name + "2")}); err != nil {
			t.Errorf("mkdir %q: %v", name, err)
		}
		_, err = read(t, c, "d-"+name+"/missing")
		if cloche.ErrorCode(err) != cloche.CodeNotFound {
			t.Errorf("a missing file beside %q: %v", name, err)
		}
	}
	long := strings.Repeat("n", 255)
	deep := strings.Repeat(strings.Repeat("p", 200)+"/", 10) + long
	for _, name := range []string{long, deep, "zwölf/" + long[:200]} {
		if err := write(t, c, guest.FileRequest{Gzip: true}, file{name: name, data: all}); err != nil {
			t.Errorf("a name of %d bytes: %v", len(name), err)
		}
		if got, err := read(t, c, name); err != nil || !bytes.Equal(got, all) {
			t.Errorf("a name of %d bytes: %v", len(name), err)
		}
	}
}

func TestReadRefusesWhatIsNotAFile(t *testing.T) {
	_, c := configured(t)
	sh(t, c, "mkdir dir; mkfifo fifo; ln -s loop loop; echo x > secret; chmod 000 secret; : > empty; ln -s empty link; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'")
	for path, want := range map[string]cloche.Code{
		"dir": cloche.CodeInvalid, "fifo": cloche.CodeInvalid, "/dev/zero": cloche.CodeInvalid, "/dev/tty": cloche.CodeInvalid, "sock": cloche.CodeInvalid,
		"loop": cloche.CodeInvalid, "secret": cloche.CodeInvalid, "missing": cloche.CodeNotFound, "missing/x": cloche.CodeNotFound, "empty/x": cloche.CodeInvalid,
		"/etc/shadow": cloche.CodeInvalid, "": cloche.CodeInvalid, "a\x00b": cloche.CodeInvalid, strings.Repeat("x", 300): cloche.CodeInvalid, strings.Repeat("x/", 3000): cloche.CodeInvalid,
	} {
		_, _, err := c.ReadFile(t.Context(), guest.FileRequest{Path: []byte(path)})
		if cloche.ErrorCode(err) != want {
			t.Errorf("%.20q: %v, want %s", path, err, want)
		}
	}
	info, r, err := c.ReadFile(t.Context(), guest.FileRequest{Path: []byte("link")})
	if err != nil || info.Size != 0 || info.Mode != 0o644 {
		t.Errorf("an empty file: %+v, %v", info, err)
	} else if err := r.Close(); err != nil {
		t.Error(err)
	}
	if b, err := read(t, c, "/proc/self/status"); err != nil || !bytes.Contains(b, []byte("Pid:")) {
		t.Errorf("a file of /proc: %d bytes, %v", len(b), err)
	}
	info, r, err = c.ReadFile(t.Context(), guest.FileRequest{Path: []byte("/etc/shadow"), User: "root"})
	if err != nil {
		t.Errorf("as root: %+v, %v", info, err)
	} else if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func TestMakeDir(t *testing.T) {
	_, c := configured(t)
	for _, tc := range []struct {
		path string
		want cloche.Code
	}{{"new", ""}, {"new", cloche.CodeConflict}, {"a/b", cloche.CodeNotFound}, {"/root-only", cloche.CodeInvalid}, {"", cloche.CodeInvalid}} {
		if err := c.MakeDir(t.Context(), guest.FileRequest{Path: []byte(tc.path)}); cloche.ErrorCode(err) != tc.want {
			t.Errorf("%q: %v, want %q", tc.path, err, tc.want)
		}
	}
	if r := sh(t, c, "stat -c %U:%G:%a new"); string(r.stdout) != "ubuntu:ubuntu:755\n" {
		t.Errorf("%s", r.stdout)
	}
}

func TestWriteIsTheUsers(t *testing.T) {
	_, c := configured(t)
	sh(t, c, "echo old > over; chmod 600 over; ln over hard; mkdir there; ln -s there/target link; ln -s /etc/hosts escape; ln -s there dirlink; mkdir group; chgrp shared group; chmod 2770 group; sleep 300 & echo $!")
	err := write(t, c, guest.FileRequest{},
		file{name: "over", data: []byte("new"), mode: 0o644},
		file{name: "a/b/c", data: []byte("x"), mode: 0o755},
		file{name: "modes", data: []byte("x"), mode: 0o4711},
		file{name: "link", data: []byte("through")},
		file{name: "./dirlink/inside", data: []byte("x")},
		file{name: "readonly/", kind: tar.TypeDir, mode: 0o555},
		file{name: "readonly/file", data: []byte("x"), mode: 0o400},
		file{name: "empty/", kind: tar.TypeDir, mode: 0o700},
		file{name: "group/file", data: []byte("x")})
	if err != nil {
		t.Fatal(err)
	}
	r := sh(t, c, "cat over hard there/target there/inside; echo; stat -c '%n %U:%G %a' over a a/b/c modes readonly readonly/file empty group/file; readlink link")
	want := "newold\nthroughx\nover ubuntu:ubuntu 644\na ubuntu:ubuntu 755\na/b/c ubuntu:ubuntu 755\nmodes ubuntu:ubuntu 4711\nreadonly ubuntu:ubuntu 555\n" +
		"readonly/file ubuntu:ubuntu 400\nempty ubuntu:ubuntu 700\ngroup/file ubuntu:shared 644\nthere/target\n"
	if string(r.stdout) != want {
		t.Errorf("got\n%s%s\nwant\n%s", r.stdout, r.stderr, want)
	}
	// Where the user could not write, neither can the agent for it.
	for _, f := range []file{{name: "escape"}, {name: "readonly/other"}, {name: "over/x"}, {name: "there"}, {name: strings.Repeat("n", 300)}} {
		if err := write(t, c, guest.FileRequest{}, f); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%.20s: %v", f.name, err)
		}
	}
	for _, name := range []string{"etc/passwd", "etc/new", "new-at-root", "root/x", "proc/sys/kernel/hostname", "dev/null", "sys/fs/cgroup/x"} {
		if err := write(t, c, guest.FileRequest{WorkDir: []byte("/")}, file{name: name, data: []byte("owned")}); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := write(t, c, guest.FileRequest{WorkDir: []byte("/"), User: "root"}, file{name: "dev/null", data: []byte("x")}); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("/dev/null as root: %v", err)
	}
	if err := write(t, c, guest.FileRequest{WorkDir: []byte("/srv/made/for/root"), User: "root"}, file{name: "x", data: []byte("x")}); err != nil {
		t.Errorf("missing base: %v", err)
	}
}

func TestTarAttacks(t *testing.T) {
	m, c := configured(t)
	for _, f := range []file{
		{name: "../up"}, {name: "a/../../up"}, {name: "a/.."}, {name: ".."}, {name: "/srv/absolute"},
		{name: "sym", kind: tar.TypeSymlink, link: "/etc"}, {name: "hard", kind: tar.TypeLink, link: "/etc/passwd"},
		{name: "null", kind: tar.TypeChar}, {name: "disk", kind: tar.TypeBlock}, {name: "fifo", kind: tar.TypeFifo}, {name: "cont", kind: tar.TypeCont},
	} {
		for _, gz := range []bool{false, true} {
			if err := write(t, c, guest.FileRequest{Gzip: gz}, f, file{name: "sym/x"}); cloche.ErrorCode(err) != cloche.CodeInvalid {
				t.Errorf("%s (%c): %v", f.name, f.kind, err)
			}
		}
	}
	if r := sh(t, c, "ls -A . .."); string(r.stdout) != ".:\n\n..:\nbox\n" {
		t.Errorf("something was written: %s", r.stdout)
	}
	// More entries than the bound, and a bomb for the disk.
	many, feed := io.Pipe()
	go func() {
		tw := tar.NewWriter(feed)
		var err error
		for i := 0; err == nil; i++ {
			err = tw.WriteHeader(&tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755})
		}
		_ = feed.CloseWithError(err)
	}()
	_, err := c.WriteFiles(t.Context(), guest.FileRequest{}, many)
	_ = many.Close()
	if cloche.ErrorCode(err) != cloche.CodeTooLarge {
		t.Errorf("entries without end: %v", err)
	}
	before := m.memory()
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Name: "bomb", Mode: 0o644, Size: 1 << 40}); err != nil {
		t.Fatal(err)
	}
	bomb, feedBomb := io.Pipe()
	go func() {
		z := gzip.NewWriter(feedBomb)
		_, err := z.Write(head.Bytes())
		for zero := make([]byte, 1<<20); err == nil; {
			_, err = z.Write(zero)
		}
		_ = feedBomb.CloseWithError(err)
	}()
	_, err = c.WriteFiles(t.Context(), guest.FileRequest{Gzip: true, WorkDir: []byte(smallDisk)}, bomb)
	_ = bomb.Close()
	if cloche.ErrorCode(err) != cloche.CodeExhausted {
		t.Errorf("a bomb: %v", err)
	}
	if after := m.memory(); after > before+32<<10 {
		t.Errorf("the agent grew from %d to %d KiB", before, after)
	}
}

func BenchmarkFiles(b *testing.B) {
	c := benchmarkClient(b)
	const size = 100 << 20
	var head bytes.Buffer
	tw := tar.NewWriter(&head)
	if err := tw.WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: size}); err != nil {
		b.Fatal(err)
	}
	b.Run("write", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			body := io.MultiReader(bytes.NewReader(head.Bytes()), io.LimitReader(zeros{}, size+1024))
			if _, err := c.WriteFiles(b.Context(), guest.FileRequest{}, body); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("read", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			_, r, err := c.ReadFile(b.Context(), guest.FileRequest{Path: []byte("big")})
			if err != nil {
				b.Fatal(err)
			}
			n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, r, make([]byte, 256<<10))
			if err != nil || n != size {
				b.Fatal(n, err)
			}
			if err := r.Close(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
