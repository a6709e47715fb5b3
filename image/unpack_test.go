package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// file, dir, link and hard make entries of archives.
func file(name, content string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}, content}
}

func dir(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}

func link(name, target string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}, ""}
}

func hard(name, target string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target, Mode: 0o644}, ""}
}

// with changes the header of an entry.
func (e entry) with(change func(*tar.Header)) entry {
	change(&e.hdr)
	return e
}

type entry struct {
	hdr     tar.Header
	content string
}

type layerOf []entry

// bytes is the layer as an archive.
func (l layerOf) bytes(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range l {
		if e.hdr.ModTime.IsZero() {
			e.hdr.ModTime = time.Unix(1e9, 0)
		}
		err := w.WriteHeader(&e.hdr)
		if err == nil {
			_, err = io.WriteString(w, e.content)
		}
		if err != nil {
			t.Fatalf("entry %q: %v", e.hdr.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// hostDir is a directory with a tree to unpack into and, beside it, what an
// attack would like to reach.
type hostDir struct{ dir, tree, outside string }

const canary = "untouched"

func newHostDir(t testing.TB) hostDir {
	t.Helper()
	d := t.TempDir()
	h := hostDir{d, filepath.Join(d, "tree"), filepath.Join(d, "outside")}
	for _, p := range []string{h.tree, h.outside} {
		if err := os.Mkdir(p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(h.outside, "canary"), []byte(canary), 0o600); err != nil {
		t.Fatal(err)
	}
	return h
}

// assertIntact fails if anything but the tree changed.
func (h hostDir) assertIntact(t testing.TB) {
	t.Helper()
	var got []string
	for _, d := range []string{h.dir, h.outside} {
		entries, err := os.ReadDir(d)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			got = append(got, e.Name())
		}
	}
	path := filepath.Join(h.outside, "canary")
	var st unix.Stat_t
	b, err := os.ReadFile(path)
	if err == nil {
		err = unix.Stat(path, &st)
	}
	if err != nil || !slices.Equal(got, []string{"outside", "tree", "canary"}) || string(b) != canary ||
		st.Nlink != 1 || st.Mode != unix.S_IFREG|0o600 || st.Uid != uint32(os.Getuid()) {
		t.Fatalf("the archive reached outside: %q, canary %q, %+v, %v", got, b, st, err)
	}
}

// unpack applies layers and returns the unpacker, closed, for its counts.
func (h hostDir) unpack(t testing.TB, limits Limits, layers ...[]byte) (*unpacker, error) {
	t.Helper()
	u, err := newUnpacker(h.tree, limits)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := u.close(); err != nil {
			t.Error(err)
		}
	}()
	for _, l := range layers {
		if err := u.apply(t.Context(), archive{r: bytes.NewReader(l), whiteouts: true}); err != nil {
			return u, err
		}
	}
	return u, nil
}

// list returns what is in the tree: "path", "path/" for directories and "path ->
// target" for links.
func (h hostDir) list(t testing.TB) []string {
	t.Helper()
	var got []string
	err := filepath.WalkDir(h.tree, func(p string, d os.DirEntry, err error) error {
		rel := strings.TrimPrefix(p, h.tree+"/")
		switch {
		case err != nil || p == h.tree:
		case d.IsDir():
			got = append(got, rel+"/")
		case d.Type() == os.ModeSymlink:
			target, lerr := os.Readlink(p)
			got, err = append(got, rel+" -> "+target), lerr
		default:
			got = append(got, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// attack is an archive that tries to reach what is not its own. It either fails
// with a code, or ends inside the tree as a chroot would see it.
type attack struct {
	layers func(h hostDir) []layerOf
	code   cloche.Code
	want   []string // in the tree, if it ends well
}

// canaryOf is the path that an attack wants.
func canaryOf(h hostDir) string { return filepath.Join(h.outside, "canary") }

var attacks = map[string]attack{
	"dot-dot name":          {func(hostDir) []layerOf { return []layerOf{{file("../outside/canary", "x")}} }, cloche.CodeInvalid, nil},
	"dot-dot in the middle": {func(hostDir) []layerOf { return []layerOf{{dir("a"), file("a/../../outside/x", "x")}} }, cloche.CodeInvalid, nil},
	"dot-dot directory":     {func(hostDir) []layerOf { return []layerOf{{dir("../outside/d")}} }, cloche.CodeInvalid, nil},
	"absolute name":         {func(hostDir) []layerOf { return []layerOf{{file("/etc/x", "x")}} }, "", []string{"etc/", "etc/x"}},
	"absolute symlink as parent": {func(h hostDir) []layerOf {
		return []layerOf{{link("l", h.outside), file("l/x", "x")}}
	}, cloche.CodeInvalid, nil},
	"absolute symlink as parent, inside": {func(hostDir) []layerOf {
		return []layerOf{{dir("run"), dir("var"), link("var/run", "/run"), file("var/run/x", "x")}}
	}, "", []string{"run/", "run/x", "var/", "var/run -> /run"}},
	"dot-dot symlink as parent": {func(hostDir) []layerOf {
		return []layerOf{{link("l", "../outside"), file("l/x", "x")}}
	}, cloche.CodeInvalid, nil},
	"many dots symlink as parent": {func(hostDir) []layerOf {
		return []layerOf{{dir("outside"), link("l", "../../../../../../../outside"), file("l/canary", "x")}}
	}, "", []string{"l -> ../../../../../../../outside", "outside/", "outside/canary"}},
	"symlink over two layers": {func(h hostDir) []layerOf {
		return []layerOf{{link("a", "b"), link("b", h.outside)}, {file("a/x", "x")}}
	}, cloche.CodeInvalid, nil},
	"symlink is replaced, not written through": {func(h hostDir) []layerOf {
		return []layerOf{{link("l", canaryOf(h))}, {file("l", "x")}}
	}, "", []string{"l"}},
	"directory over symlink": {func(h hostDir) []layerOf {
		return []layerOf{{link("l", h.outside)}, {dir("l").with(func(h *tar.Header) { h.Mode = 0o777; h.Uid = 5 }), file("l/x", "x")}}
	}, "", []string{"l/", "l/x"}},
	"symlink loop":         {func(hostDir) []layerOf { return []layerOf{{link("a", "b"), link("b", "a"), file("a/x", "x")}} }, cloche.CodeInvalid, nil},
	"magic link":           {func(hostDir) []layerOf { return []layerOf{{link("l", "/proc/self/root"), file("l/x", "x")}} }, cloche.CodeInvalid, nil},
	"empty symlink":        {func(hostDir) []layerOf { return []layerOf{{link("l", "")}} }, cloche.CodeInvalid, nil},
	"file as parent":       {func(hostDir) []layerOf { return []layerOf{{file("f", "x"), file("f/x", "x")}} }, cloche.CodeInvalid, nil},
	"hard link by dot-dot": {func(hostDir) []layerOf { return []layerOf{{hard("h", "../outside/canary")}} }, cloche.CodeInvalid, nil},
	"hard link by absolute name": {func(h hostDir) []layerOf {
		return []layerOf{{hard("h", canaryOf(h))}}
	}, cloche.CodeInvalid, nil},
	"hard link through symlink": {func(h hostDir) []layerOf {
		return []layerOf{{link("l", h.outside), hard("h", "l/canary")}}
	}, cloche.CodeInvalid, nil},
	"hard link to symlink": {func(h hostDir) []layerOf {
		return []layerOf{{link("l", canaryOf(h)), hard("h", "l"), file("h", "x")}}
	}, "", []string{"h", "l -> OUTSIDE/canary"}},
	"hard link to directory": {func(hostDir) []layerOf { return []layerOf{{dir("d"), hard("h", "d")}} }, cloche.CodeInvalid, nil},
	"hard link to root":      {func(hostDir) []layerOf { return []layerOf{{hard("h", "/")}} }, cloche.CodeInvalid, nil},
	"hard link to itself":    {func(hostDir) []layerOf { return []layerOf{{file("f", "x"), hard("f", "f"), hard("./f", "/f")}} }, "", []string{"f"}},
	"hard link to nothing":   {func(hostDir) []layerOf { return []layerOf{{hard("h", "missing/file")}} }, cloche.CodeInvalid, nil},
	"hard link into what it replaces": {func(hostDir) []layerOf {
		return []layerOf{{dir("d"), file("d/f", "x"), hard("d", "d/f")}}
	}, cloche.CodeInvalid, nil},
	"whiteout of dot-dot":   {func(hostDir) []layerOf { return []layerOf{{file(".wh...", "")}} }, cloche.CodeInvalid, nil},
	"whiteout of dot":       {func(hostDir) []layerOf { return []layerOf{{dir("d"), file("d/.wh..", "")}} }, cloche.CodeInvalid, nil},
	"whiteout of nothing":   {func(hostDir) []layerOf { return []layerOf{{file(".wh.", "")}} }, cloche.CodeInvalid, nil},
	"whiteout through link": {func(h hostDir) []layerOf { return []layerOf{{link("l", h.outside)}, {file("l/.wh.canary", "")}} }, cloche.CodeInvalid, nil},
	"opaque through link":   {func(h hostDir) []layerOf { return []layerOf{{link("l", h.outside)}, {file("l/.wh..wh..opq", "")}} }, cloche.CodeInvalid, nil},
	"opaque over link": {func(h hostDir) []layerOf {
		return []layerOf{{link("d/l", h.outside)}, {file("d/.wh..wh..opq", "")}}
	}, "", []string{"d/"}},
	"file for a directory of links": {func(h hostDir) []layerOf {
		return []layerOf{{dir("d/e"), link("d/e/l", h.outside), link("d/e/c", canaryOf(h))}, {file("d", "x")}}
	}, "", []string{"d"}},
	"root as file": {func(hostDir) []layerOf {
		return []layerOf{{file("./", "x").with(func(h *tar.Header) { h.Name = "." })}}
	}, cloche.CodeInvalid, nil},
	"root as symlink": {func(h hostDir) []layerOf { return []layerOf{{link(".", h.outside), file("x", "x")}} }, cloche.CodeInvalid, nil},
	"uid too large":   {func(hostDir) []layerOf { return []layerOf{{file("f", "").with(func(h *tar.Header) { h.Uid = 65536 })}} }, cloche.CodeInvalid, nil},
	"gid too large":   {func(hostDir) []layerOf { return []layerOf{{dir("d").with(func(h *tar.Header) { h.Gid = 1 << 31 })}} }, cloche.CodeInvalid, nil},
	"name too long":   {func(hostDir) []layerOf { return []layerOf{{file(strings.Repeat("n", 256), "")}} }, cloche.CodeInvalid, nil},
	"path too long":   {func(hostDir) []layerOf { return []layerOf{{file(strings.Repeat("n/", 3000)+"f", "")}} }, cloche.CodeInvalid, nil},
	"path too deep":   {func(hostDir) []layerOf { return []layerOf{{file(strings.Repeat("n/", 300)+"f", "")}} }, cloche.CodeInvalid, nil},
	"too deep by links": {func(hostDir) []layerOf {
		deep := strings.Repeat("d/", 200)
		return []layerOf{{dir(deep), link("l", deep), file("l/"+deep+"f", "")}}
	}, cloche.CodeInvalid, nil},
	"invalid UTF-8 in a name": {func(hostDir) []layerOf { return []layerOf{{file("a\xff\nb", "x")}} }, "", []string{"a\xff\nb"}},
}

func TestAttacks(t *testing.T) {
	asRoot(t)
	for name, test := range attacks {
		t.Run(name, func(t *testing.T) {
			h := newHostDir(t)
			var layers [][]byte
			for _, l := range test.layers(h) {
				layers = append(layers, l.bytes(t))
			}
			_, err := h.unpack(t, Limits{}, layers...)
			h.assertIntact(t)
			if cloche.ErrorCode(err) != test.code {
				t.Fatalf("unpack: %v (%s); want code %q", err, cloche.ErrorCode(err), test.code)
			}
			got := h.list(t)
			for i := range got {
				got[i] = strings.ReplaceAll(got[i], h.outside, "OUTSIDE")
			}
			if test.code == "" && !slices.Equal(got, test.want) {
				t.Errorf("tree has %q; want %q", got, test.want)
			}
		})
	}
}

// TestBombs applies archives that are far larger than they look.
func TestBombs(t *testing.T) {
	asRoot(t)
	limits := Limits{Bytes: 1 << 20, Files: 100}
	many := make(layerOf, 101)
	for i := range many {
		many[i] = file(fmt.Sprintf("f%d", i), "")
	}
	devices := make(layerOf, 101)
	for i := range devices {
		devices[i] = entry{tar.Header{Name: "dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, ""}
	}
	paxed := make(layerOf, 90)
	for i := range paxed {
		paxed[i] = file("f", "").with(func(h *tar.Header) {
			h.PAXRecords = map[string]string{"CLOCHE.x": strings.Repeat("x", 1<<19)}
		})
	}
	for name, archive := range map[string][]byte{
		"files":               many.bytes(t),
		"devices count too":   devices.bytes(t),
		"missing parents":     layerOf{file(strings.Repeat("d/", 120)+"f", "")}.bytes(t),
		"bytes in one file":   layerOf{file("f", strings.Repeat("x", 1<<20+1))}.bytes(t),
		"bytes in many files": layerOf{file("f", strings.Repeat("x", 1<<19)), file("f", strings.Repeat("x", 1<<19)), file("f", "x")}.bytes(t),
		"sparse file":         sparse(t, 1<<40),
		"headers":             paxed.bytes(t),
		"zeros after the end": append(layerOf{file("f", "")}.bytes(t), make([]byte, 4<<20)...),
	} {
		t.Run(name, func(t *testing.T) {
			h := newHostDir(t)
			if _, err := h.unpack(t, limits, archive); cloche.ErrorCode(err) != cloche.CodeTooLarge {
				t.Errorf("unpack: %v; want too_large", err)
			}
		})
	}
	t.Run("over two layers", func(t *testing.T) {
		h := newHostDir(t)
		half := layerOf{file("f", strings.Repeat("x", 600<<10))}.bytes(t)
		if _, err := h.unpack(t, limits, half, half); cloche.ErrorCode(err) != cloche.CodeTooLarge {
			t.Errorf("unpack: %v; want too_large", err)
		}
	})
}

// sparse is an archive with one file of that size and no content, in the PAX
// form 1.0 of GNU tar.
func sparse(t *testing.T, size int64) []byte {
	t.Helper()
	var b bytes.Buffer
	pax := ""
	for _, kv := range []string{"GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=f", fmt.Sprintf("GNU.sparse.realsize=%d", size)} {
		n := len(kv) + 3
		n += len(fmt.Sprint(n)) - 1
		pax += fmt.Sprintf("%d %s\n", n, kv)
	}
	sparseMap := fmt.Sprintf("1\n%d\n0\n", size)
	for _, part := range []struct {
		kind byte
		data string
	}{{'x', pax}, {'0', sparseMap + strings.Repeat("\x00", 512-len(sparseMap))}} {
		hdr := make([]byte, 512)
		copy(hdr, "f")
		copy(hdr[100:], "0000644\x000000000\x000000000\x00")
		copy(hdr[124:], fmt.Sprintf("%011o\x0000000000000\x00", len(part.data)))
		copy(hdr[148:], "        ")
		hdr[156] = part.kind
		copy(hdr[257:], "ustar\x0000")
		sum := 0
		for _, c := range hdr {
			sum += int(c)
		}
		copy(hdr[148:], fmt.Sprintf("%06o\x00 ", sum))
		b.Write(hdr)
		b.WriteString(part.data + strings.Repeat("\x00", (512-len(part.data)%512)%512))
	}
	b.Write(make([]byte, 1024))
	return b.Bytes()
}

func TestDamagedArchives(t *testing.T) {
	asRoot(t)
	whole := layerOf{file("f", strings.Repeat("x", 4096))}.bytes(t)
	for name, b := range map[string][]byte{
		"cut in a file":   whole[:2000],
		"cut in a header": whole[:300],
		"garbage":         bytes.Repeat([]byte("garbage "), 512),
	} {
		h := newHostDir(t)
		if _, err := h.unpack(t, Limits{}, b); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%s: %v; want bad_request", name, err)
		}
	}
}

func TestUnpackKeepsWhatAFileIs(t *testing.T) {
	asRoot(t)
	defer unix.Umask(unix.Umask(0o077)) // must not matter
	h := newHostDir(t)
	when := time.Unix(1234567890, 0)
	set := func(mode int64, uid, gid int) func(*tar.Header) {
		return func(h *tar.Header) { h.Mode, h.Uid, h.Gid, h.ModTime = mode, uid, gid, when }
	}
	_, err := h.unpack(t, Limits{}, layerOf{
		dir("./").with(set(0o751, 3, 4)),
		file("implicit/sudo", "x").with(set(0o4755, 0, 0)),
		file("sgid", "x").with(set(0o2711, 7, 65535)),
		dir("tmp").with(set(0o1777, 0, 9)),
		link("l", "nowhere").with(set(0o777, 65535, 8)),
		hard("h", "sgid"),
		file("tmp/x", ""),
	}.bytes(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		".": "40751 3:4", "implicit": "40755 0:0", "implicit/sudo": "104755 0:0", "sgid": "102711 7:65535",
		"h": "102711 7:65535", "tmp": "41777 0:9", "l": "120777 65535:8",
	} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(h.tree, name), &st); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid); got != want {
			t.Errorf("%s is %s; want %s", name, got, want)
		}
		if name != "implicit" && st.Mtim.Sec != when.Unix() {
			t.Errorf("%s is of %d; want %d", name, st.Mtim.Sec, when.Unix())
		}
	}
}

func TestUnpackLeavesOut(t *testing.T) {
	asRoot(t)
	h := newHostDir(t)
	attrs := func(h *tar.Header) {
		h.PAXRecords = map[string]string{
			"SCHILY.xattr.user.kept":                "v\x00w",
			"SCHILY.xattr.security.capability":      "\x01\x00\x00\x02",
			"SCHILY.xattr.trusted.overlay.redirect": "/etc",
			"SCHILY.xattr.user.overlay.redirect":    "/etc",
			"SCHILY.xattr.system.posix_acl_access":  "x",
		}
	}
	u, err := h.unpack(t, Limits{}, layerOf{
		file("f", "x").with(attrs), dir("d").with(attrs),
		{tar.Header{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, ""},
		{tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8}, ""},
		{tar.Header{Name: "fifo", Typeflag: tar.TypeFifo}, ""},
	}.bytes(t))
	if err != nil {
		t.Fatal(err)
	}
	if got := h.list(t); !slices.Equal(got, []string{"d/", "f"}) {
		t.Errorf("tree has %q; want d/ and f", got)
	}
	for _, name := range []string{"f", "d"} {
		buf := make([]byte, 256)
		n, err := unix.Llistxattr(filepath.Join(h.tree, name), buf)
		if err != nil || string(buf[:n]) != "user.kept\x00" {
			t.Errorf("%s has the attributes %q, %v; want user.kept alone", name, buf[:n], err)
		}
	}
	want := []string{"1 FIFOs left out", "2 device nodes left out", "6 extended attributes left out", "2 file capabilities left out"}
	got := u.noteLines()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("notes are %q; want %q", got, want)
	}
}

func TestWhiteouts(t *testing.T) {
	asRoot(t)
	lower := layerOf{
		file("a/one", "1"), file("a/two", "2"), file("a/sub/three", "3"), file("a/sub/four", "4"),
		file("b/x", ""), link("c", "a"), file(".wh.odd", ""),
	}
	for name, test := range map[string]struct {
		upper layerOf
		want  []string
	}{
		"one file":               {layerOf{file("a/.wh.one", ""), file("b/.wh.x", "")}, []string{"a/", "a/sub/", "a/sub/four", "a/sub/three", "a/two", "b/", "c -> a"}},
		"directory":              {layerOf{file(".wh.a", "")}, []string{"b/", "b/x", "c -> a"}},
		"link, not its target":   {layerOf{file(".wh.c", ""), file(".wh.b", "")}, []string{"a/", "a/one", "a/sub/", "a/sub/four", "a/sub/three", "a/two"}},
		"through a link inside":  {layerOf{file("c/.wh.one", ""), file(".wh.b", "")}, []string{"a/", "a/sub/", "a/sub/four", "a/sub/three", "a/two", "c -> a"}},
		"missing":                {layerOf{file(".wh.zzz", ""), file(".wh.a", ""), file(".wh.b", "")}, []string{"c -> a"}},
		"opaque first":           {layerOf{dir("a"), file("a/.wh..wh..opq", ""), file("a/new", ""), file(".wh.b", ""), file(".wh.c", "")}, []string{"a/", "a/new"}},
		"opaque last":            {layerOf{dir("a"), file("a/new", ""), file("a/sub/new", ""), file("a/.wh..wh..opq", ""), file(".wh.b", ""), file(".wh.c", "")}, []string{"a/", "a/new", "a/sub/", "a/sub/new"}},
		"opaque last, by a link": {layerOf{file("c/new", ""), file("c/.wh..wh..opq", ""), file(".wh.b", ""), file(".wh.c", "")}, []string{"a/", "a/new"}},
		"own file stays":         {layerOf{file("a/one", "new"), file("a/.wh.one", ""), file(".wh.b", ""), file(".wh.c", ""), file("a/.wh.sub", ""), file("a/.wh.two", "")}, []string{"a/", "a/one"}},
		"then again":             {layerOf{file(".wh.a", ""), file("a/new", ""), file(".wh.b", ""), file(".wh.c", "")}, []string{"a/", "a/new"}},
		"aufs's own":             {layerOf{file(".wh..wh.plnk", ""), dir(".wh..wh.orph"), file(".wh.a", ""), file(".wh.b", "")}, []string{"c -> a"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHostDir(t)
			if _, err := h.unpack(t, Limits{}, lower.bytes(t), test.upper.bytes(t)); err != nil {
				t.Fatal(err)
			}
			if got := h.list(t); !slices.Equal(got, test.want) {
				t.Errorf("tree has %q; want %q", got, test.want)
			}
		})
	}
}

func TestHardLinkToLowerLayer(t *testing.T) {
	asRoot(t)
	h := newHostDir(t)
	if _, err := h.unpack(t, Limits{}, layerOf{file("a/f", "x")}.bytes(t), layerOf{hard("g", "/a/f")}.bytes(t)); err != nil {
		t.Fatal(err)
	}
	a, errA := os.Stat(filepath.Join(h.tree, "a/f"))
	g, errG := os.Stat(filepath.Join(h.tree, "g"))
	if errA != nil || errG != nil || !os.SameFile(a, g) {
		t.Errorf("g is not a/f: %v, %v", errA, errG)
	}
}

func TestFullDiskIsExhausted(t *testing.T) {
	asRoot(t)
	h := newHostDir(t)
	if err := unix.Mount("tmpfs", h.tree, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(h.tree, 0); err != nil {
			t.Error(err)
		}
	}()
	_, err := h.unpack(t, Limits{}, layerOf{file("f", strings.Repeat("x", 1<<20))}.bytes(t))
	if cloche.ErrorCode(err) != cloche.CodeExhausted || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("unpack on a full disk: %v; want resource_exhausted", err)
	}
}

func FuzzUnpack(f *testing.F) {
	asRoot(f)
	f.Add(layerOf{file("a/f", "x"), link("l", "/a"), hard("l/h", "a/f"), dir("d")}.bytes(f), layerOf{file("l/.wh.h", ""), file("a/.wh..wh..opq", "")}.bytes(f))
	f.Add(layerOf{link("l", "../outside"), dir("outside")}.bytes(f), layerOf{file("l/canary", "x"), file("l/.wh.canary", "")}.bytes(f))
	f.Add(layerOf{file("a", "x").with(func(h *tar.Header) { h.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "b"} })}.bytes(f), []byte{})
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		h := newHostDir(t)
		_, err := h.unpack(t, Limits{Bytes: 1 << 20, Files: 1000}, lower, upper)
		h.assertIntact(t)
		if code := cloche.ErrorCode(err); code == cloche.CodeInternal {
			t.Errorf("an archive made an internal error: %v", err)
		}
		if _, err := measure(t.Context(), h.tree); err != nil {
			t.Errorf("digest of what was unpacked: %v", err)
		}
	})
}
