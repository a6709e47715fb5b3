package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

const (
	testPasswd = "root:x:0:0:root:/root:/bin/bash\n# comment\nbad line\nweird:x:-1:0::/:/bin/sh\nbig:x:4294967295:0::/:\n" +
		"ubuntu:x:1000:1000:U,,,:/vercel:/bin/bash\r\ntwin:x:1000:1000::/twin:/bin/sh\nbare:x:7:7:::\n:x:8:8::/:/bin/sh\n4711:x:9:9::/named:/bin/sh"
	testGroup = "root:x:0:\nubuntu:x:1000:\nsudo:x:27:ubuntu,other\ndocker:x:28:other,ubuntu\ndup:x:27:ubuntu\nbad:x:y:ubuntu\nshort:x:3"
)

func TestResolve(t *testing.T) {
	for spec, want := range map[string]account{
		"":              {"root", 0, 0, []int{0}, "/root", "/bin/bash"},
		"root":          {"root", 0, 0, []int{0}, "/root", "/bin/bash"},
		"0":             {"root", 0, 0, []int{0}, "/root", "/bin/bash"},
		"ubuntu":        {"ubuntu", 1000, 1000, []int{1000, 27, 28}, "/vercel", "/bin/bash"},
		"1000":          {"ubuntu", 1000, 1000, []int{1000, 27, 28}, "/vercel", "/bin/bash"},
		"twin":          {"twin", 1000, 1000, []int{1000}, "/twin", "/bin/sh"},
		"bare":          {"bare", 7, 7, []int{7}, "/", "/bin/sh"},
		"4711":          {"4711", 9, 9, []int{9}, "/named", "/bin/sh"},
		"4712":          {"4712", 4712, 0, []int{0}, "/", "/bin/sh"},
		"4712:sudo":     {"4712", 4712, 27, []int{27}, "/", "/bin/sh"},
		"ubuntu:33":     {"ubuntu", 1000, 33, []int{33}, "/vercel", "/bin/bash"},
		"ubuntu:docker": {"ubuntu", 1000, 28, []int{28}, "/vercel", "/bin/bash"},
	} {
		got, err := resolve(spec, []byte(testPasswd), []byte(testGroup))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %v", spec, got, err)
		}
	}
	for _, spec := range []string{"nobody", "-1", "4294967295", "99999999999999999999", "ubuntu:nogroup", "weird", "big", " root", "root\n", "bad line"} {
		if got, err := resolve(spec, []byte(testPasswd), []byte(testGroup)); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%q: %+v, %v", spec, got, err)
		}
	}
	if got, err := resolve("", nil, nil); err != nil || !reflect.DeepEqual(got, rootAccount()) {
		t.Errorf("without files: %+v, %v", got, err)
	}
}

func FuzzResolve(f *testing.F) {
	f.Add("ubuntu", []byte(testPasswd), []byte(testGroup))
	f.Add("1000:27", []byte(testPasswd), []byte(testGroup))
	f.Fuzz(func(t *testing.T, spec string, passwd, group []byte) {
		u, err := resolve(spec, passwd, group)
		if err != nil {
			return
		}
		if u.uid < 0 || u.uid > maxID || u.gid < 0 || u.gid > maxID || len(u.groups) == 0 || len(u.groups) > maxGroups || u.home == "" || u.shell == "" {
			t.Fatalf("%q: %+v", spec, u)
		}
	})
}

func TestParseStat(t *testing.T) {
	line := "42 (a) b (c) S 7 42 41 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 99 1000000 1234 18446744073709551615 1 1 0"
	got, ok := parseStat([]byte(line))
	if want := (procStat{'S', 7, 41, 1234}); !ok || got != want {
		t.Errorf("%+v, %v", got, ok)
	}
	for _, bad := range []string{"", "42 a S", "42 (a)", "42 (a) S 1 2", strings.Replace(line, " 7 42", " x 42", 1), strings.Replace(line, "S", "SS", 1)} {
		if got, ok := parseStat([]byte(bad)); ok {
			t.Errorf("%q gave %+v", bad, got)
		}
	}
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	if got, ok := parseStat(b); !ok || got.parent != os.Getppid() || got.rssPages <= 0 {
		t.Errorf("this process: %+v, %v", got, ok)
	}
}

func TestParseMeminfo(t *testing.T) {
	total, free, ok := parseMeminfo([]byte("MemTotal:        1048576 kB\nMemFree:         1 kB\nMemAvailable:     848492 kB\n"))
	if !ok || total != 1<<30 || free != 848492<<10 {
		t.Errorf("%d %d %v", total, free, ok)
	}
	for _, bad := range []string{"", "MemTotal: 5 kB", "MemTotal: x kB\nMemAvailable: 3 kB", "MemTotal:\nMemAvailable:", "MemTotal: 0 kB\nMemAvailable: 0 kB", "MemTotal: 5 kB\nMemAvailable: -1 kB"} {
		if total, free, ok := parseMeminfo([]byte(bad)); ok {
			t.Errorf("%q gave %d, %d", bad, total, free)
		}
	}
}

func TestGuardsReserveAndInterval(t *testing.T) {
	for total, want := range map[int64]int64{64 << 20: 16 << 20, 256 << 20: 64 << 20, 1 << 30: 107374182, 64 << 30: 6871947673} {
		if got := reserve(total); got != want {
			t.Errorf("%d: %d, want %d", total, got, want)
		}
	}
	for room, want := range map[int64]time.Duration{-5: guardFast, 0: guardFast, 1 << 62 >> 10: guardSlow} {
		if got := interval(room); got != want {
			t.Errorf("%d: %v, want %v", room, got, want)
		}
	}
}

func FuzzProc(f *testing.F) {
	f.Add([]byte("42 (a) S 7 42 41 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 99 1000000 1234"))
	f.Add([]byte("MemTotal:        1048576 kB\nMemAvailable:     848492 kB\n"))
	f.Add([]byte("0::/commands/cmd_01m8pcb18ffaewm6rt7zn6dhf1\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		parseStat(data)
		if total, free, ok := parseMeminfo(data); ok && (total <= 0 || free < 0) {
			t.Fatalf("memory of %d, %d", total, free)
		}
		if id := parseOwner(data); id != "" && !id.Valid() {
			t.Fatalf("owner %q", id)
		}
		for _, pid := range parsePIDs(data) {
			if pid <= 1 {
				t.Fatalf("process %d may not be signalled", pid)
			}
		}
	})
}

func TestParseOwner(t *testing.T) {
	id := cloche.NewCommandID()
	for text, want := range map[string]cloche.CommandID{
		"0::/commands/" + string(id) + "\n":                       id,
		"3:pids:/x\n0::/commands/" + string(id) + "/below/more\n": id,
		"0::/\n":                             "",
		"0::/commands\n":                     "",
		"0::/commands/../cloche-agent\n":     "",
		"0::/other/commands/" + string(id):   "",
		"1:x:/commands/" + string(id) + "\n": "",
		"":                                   "",
	} {
		if got := parseOwner([]byte(text)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestFindExecutable(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]os.FileMode{"all": 0o755, "owner": 0o700, "group": 0o070, "none": 0o644} {
		if err := os.WriteFile(dir+"/"+name, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir+"/"+name, mode); err != nil {
			t.Fatal(err)
		}
	}
	me, mine := os.Getuid(), os.Getgid()
	stranger := account{uid: me + 1000, gid: mine + 1000}
	comrade := account{uid: me + 1000, gid: mine + 1000, groups: []int{mine}}
	for _, tc := range []struct {
		name string
		user account
		want string
	}{
		{"all", stranger, ""}, {"owner", stranger, "permission denied"}, {"group", comrade, ""}, {"none", comrade, "permission denied"},
		{"missing", stranger, errNotFound.Error()}, {"./all", stranger, ""}, {"./missing", stranger, "no such file"}, {"..", stranger, "directory"}, {"/", stranger, "is a directory"},
	} {
		if tc.name == ".." {
			tc.name = "./.."
		}
		p, err := findExecutable(tc.name, "/nowhere::"+dir, dir, tc.user)
		if got := fmt.Sprint(err); err != nil && (tc.want == "" || !strings.Contains(got, tc.want)) || err == nil && (tc.want != "" || p == "") {
			t.Errorf("%s: %q, %v, want %q", tc.name, p, err, tc.want)
		}
	}
}

func TestAbsolute(t *testing.T) {
	for _, tc := range [][3]string{{"/w", "", "/w"}, {"/w", "a", "/w/a"}, {"/w", "../..", "/"}, {"/w", "/x/../y", "/y"}, {"/", "a", "/a"}} {
		if got := absolute(tc[0], tc[1]); got != tc[2] {
			t.Errorf("%q: %s", tc, got)
		}
	}
	for _, tc := range [][3]string{{"/w", "", "/w"}, {"/w", "a/../b", "/w/a/../b"}, {"/", "a", "/a"}, {"/w", "/x", "/x"}} {
		if got, err := join(tc[0], tc[1]); err != nil || got != tc[2] {
			t.Errorf("%q: %s, %v", tc, got, err)
		}
	}
}

func TestWriteRequest(t *testing.T) {
	for _, bad := range []string{"%%%", "bm90IGpzb24", "W10"} {
		if f, err := writeRequest(bad); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%q: %+v, %v", bad, f, err)
		}
	}
	if f, err := writeRequest("eyJnemlwIjp0cnVlfQ"); err != nil || !f.Gzip || !reflect.DeepEqual(f, guest.FileRequest{Gzip: true}) {
		t.Errorf("%+v, %v", f, err)
	}
}

// TestAccountFileSeesChanges: a file that was replaced or rewritten is read
// again, one that has gone is empty.
func TestAccountFileSeesChanges(t *testing.T) {
	f := accountFile{path: filepath.Join(t.TempDir(), "passwd")}
	want := func(content string) {
		t.Helper()
		if got, err := f.read(); err != nil || string(got) != content {
			t.Errorf("read %q, %v; want %q", got, err, content)
		}
	}
	write := func(path, content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want("")
	write(f.path, "one")
	want("one")
	want("one")
	write(f.path, "other length")
	want("other length")
	write(f.path+"-new", "other  ength") // of the same size, by another inode
	if err := os.Rename(f.path+"-new", f.path); err != nil {
		t.Fatal(err)
	}
	want("other  ength")
	if err := os.Remove(f.path); err != nil {
		t.Fatal(err)
	}
	want("")
}
