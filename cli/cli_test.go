package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

func TestDurations(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"90s": 90 * time.Second, "1h30m": 90 * time.Minute, "2d": 48 * time.Hour, "1d12h": 36 * time.Hour,
		"0.5d": 12 * time.Hour, "100ms": 100 * time.Millisecond,
		"": 0, "0s": 0, "-1s": 0, "5": 0, "d": 0, "1dd": 0, "soon": 0, "1d-48h": 0,
	} {
		var d Duration
		err := d.UnmarshalText([]byte(text))
		if time.Duration(d) != want || (err == nil) != (want != 0) {
			t.Errorf("%q: %s, %v; want %s", text, time.Duration(d), err, want)
		}
	}
}

func TestDurationsForPeople(t *testing.T) {
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 1234 * time.Microsecond: "1ms", 3210 * time.Millisecond: "3.2s",
		250 * time.Second: "4m10s", time.Hour: "1h", 65 * time.Minute: "1h5m", 5 * time.Minute: "5m", 30*time.Hour + 20*time.Second: "30h",
	} {
		if got := short(d); got != want {
			t.Errorf("%s: %q, want %q", time.Duration(d), got, want)
		}
	}
}

func TestSignals(t *testing.T) {
	for text, want := range map[string]int{"TERM": 15, "sigkill": 9, "SIGUSR1": 10, "9": 9, "64": 64, "65": 0, "0": 0, "-1": 0, "NOPE": 0, "": 0} {
		n, err := parseSignal(text)
		if n != want || (err == nil) != (want != 0) {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
	if signalName(9) != "SIGKILL" || signalName(40) != "signal 40" {
		t.Error(signalName(9), signalName(40))
	}
}

func TestPlaces(t *testing.T) {
	for arg, want := range map[string]place{
		"box:a/b": {"box", "a/b"}, "box:": {"box", ""}, "a:b:c": {"a", "b:c"},
		"./a:b": {"", "./a:b"}, "/a:b": {"", "/a:b"}, "d/a:b": {"", "d/a:b"}, "plain": {"", "plain"}, ":a": {"", ":a"}, "-": {"", "-"},
	} {
		if got := parsePlace(arg); got != want {
			t.Errorf("%q: %+v, want %+v", arg, got, want)
		}
	}
}

func TestTablesMoveNoCursor(t *testing.T) {
	var b bytes.Buffer
	tab := newTable(&b, "NAME", "X")
	tab.row("\x1b[2Jevil\t\n", "")
	if err := tab.flush(); err != nil || strings.ContainsAny(b.String(), "\x1b\t") || strings.Count(b.String(), "\n") != 2 {
		t.Errorf("%q %v", b.String(), err)
	}
}

// tree writes files below a new directory and returns it as a root of checks.
func tree(t *testing.T, files map[string]string) host {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		p := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(content), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return host{root: root, data: filepath.Join(root, "var/lib/cloche")}
}

func TestHostChecks(t *testing.T) {
	ctx := t.Context()
	v1 := map[string]string{"sys/fs/cgroup/cpu/cgroup.procs": "", "sys/fs/cgroup/memory/cgroup.procs": ""}
	both := map[string]string{"sys/fs/cgroup/pids/cgroup.procs": ""}
	for k, v := range v1 {
		both[k] = v
	}
	for _, test := range []struct {
		name   string
		files  map[string]string
		check  func(host, context.Context) Result
		status Status
		detail string
	}{
		{"v2", map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n"}, host.checkCgroups, OK, "cgroup v2 with cpu, memory, pids"},
		{"v2 without memory", map[string]string{"sys/fs/cgroup/cgroup.controllers": "cpu pids\n"}, host.checkCgroups, Missing, "without the memory controller"},
		{"v1", both, host.checkCgroups, OK, "cgroup v1"},
		{"v1 without pids", v1, host.checkCgroups, Missing, "without the pids controller"},
		{"no cgroups", nil, host.checkCgroups, Missing, "no controllers"},
		{"no user namespaces", map[string]string{"proc/sys/user/max_user_namespaces": "0\n"}, host.checkUserNamespaces, Missing, `is "0"`},
		{"no overlay", map[string]string{"proc/filesystems": "nodev\ttmpfs\n\text4\n"}, host.checkOverlay, Missing, "does not list overlay"},
		{"seccomp", map[string]string{"proc/sys/kernel/seccomp/actions_avail": "kill_process kill_thread trap errno allow\n"}, host.checkSeccomp, OK, "trap"},
		{"no seccomp", nil, host.checkSeccomp, Missing, "lacks the action trap"},
		{"no yama", nil, host.checkPtrace, OK, "not restricted"},
		{"ptrace 1", map[string]string{"proc/sys/kernel/yama/ptrace_scope": "1\n"}, host.checkPtrace, OK, "is 1"},
		{"ptrace 3", map[string]string{"proc/sys/kernel/yama/ptrace_scope": "3\n"}, host.checkPtrace, Missing, "is 3"},
		{"keyring", map[string]string{"usr/share/keyrings/debian-archive-keyring.pgp": ""}, host.checkKeyring, OK, "keyring.pgp"},
		{"no keyring", nil, host.checkKeyring, Missing, "not in"},
		{"no kvm", nil, host.checkKVM, Missing, "not there"},
		{"kvm", map[string]string{"dev/kvm": ""}, host.checkKVM, OK, "does not prove"},
	} {
		r := test.check(tree(t, test.files), ctx)
		if r.Status != test.status || !strings.Contains(r.Detail, test.detail) || (r.Status == OK) != (r.Fix == "") {
			t.Errorf("%s: %+v", test.name, r)
		}
	}
	for release, want := range map[string]Status{"6.1.0-13-amd64": OK, "5.19.0": OK, "5.18.19": Missing, "4.4.0": Missing, "10.0": OK, "odd": Missing} {
		if r := kernelResult(release); r.Status != want {
			t.Errorf("%s: %+v", release, r)
		}
	}
}

func TestDoctorFailsOnlyForWhatIsRequired(t *testing.T) {
	check := func(status Status, optional bool) Check {
		return Check{Name: "n", Why: "w", Optional: optional, Run: func(context.Context) Result { return Result{Status: status, Detail: "d", Fix: "f"} }}
	}
	for _, test := range []struct {
		check Check
		want  int
		text  string
	}{
		{check(OK, false), 0, "ok       n  d\n"},
		{check(Missing, true), 0, "absent   n  d\n            why: w (optional)\n            fix: f\n"},
		{check(Missing, false), 1, "missing  n  d\n            why: w\n            fix: f\n"},
	} {
		var out bytes.Buffer
		cmd := &doctorCmd{checks: func(string) []Check { return []Check{test.check} }}
		code := report(&Env{Stderr: io.Discard}, cmd.Run(t.Context(), &Env{Stdout: &out}), ExitFailed)
		if code != test.want || !strings.HasPrefix(out.String(), test.text) {
			t.Errorf("%d, want %d:\n%s", code, test.want, out.String())
		}
	}
}

func TestMemoryOfSandboxes(t *testing.T) {
	one, two, other := cloche.NewSessionID(), cloche.NewSessionID(), cloche.NewSessionID()
	const pss = "00400000-7fff ---p 00000000 00:00 0  [rollup]\nRss:  9000 kB\nPss:  "
	h := tree(t, map[string]string{
		"10/cgroup": "0::/cloche/" + string(one), "10/cmdline": "sentry", "10/smaps_rollup": pss + "1000 kB\n",
		"11/cgroup": "0::/", "11/cmdline": "gofer\x00--id\x00" + string(two), "11/smaps_rollup": pss + "500 kB\n",
		"12/cgroup": "0::/cloche/" + string(other), "12/cmdline": "x", "12/smaps_rollup": pss + "7000 kB\n",
		"13/cgroup": "0::/cloche/" + string(one), "13/cmdline": "", "13/smaps_rollup": "",
		"self/cgroup": string(one), "self/smaps_rollup": pss + "1 kB\n",
	})
	mb, n, err := sandboxesPSS(h.root, []cloche.SessionID{one, two})
	if err != nil || n != 2 || mb != 1500*1024/1e6 {
		t.Errorf("%f MB in %d processes, %v", mb, n, err)
	}
}

func TestPercentiles(t *testing.T) {
	for _, test := range []struct {
		values   []float64
		p50, p95 float64
	}{
		{[]float64{7}, 7, 7}, {[]float64{3, 1, 2}, 2, 3}, {[]float64{4, 3, 2, 1}, 2, 4},
		{[]float64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 100}, 10, 19},
	} {
		if p50, p95 := percentile(test.values, 50), percentile(test.values, 95); p50 != test.p50 || p95 != test.p95 {
			t.Errorf("%v: %f and %f", test.values, p50, p95)
		}
	}
}

// FuzzUnpack gives unpack archives as a hostile sandbox would make them:
// nothing may appear outside the root.
func FuzzUnpack(f *testing.F) {
	for _, h := range []tar.Header{
		{Name: "../out", Typeflag: tar.TypeReg}, {Name: "/out", Typeflag: tar.TypeReg}, {Name: "a/../../out", Typeflag: tar.TypeDir},
		{Name: "l", Linkname: "..", Typeflag: tar.TypeSymlink}, {Name: "h", Linkname: "../secret", Typeflag: tar.TypeLink},
		{Name: "d", Typeflag: tar.TypeBlock}, {Name: "ok", Typeflag: tar.TypeReg, Mode: 0o4777}, {Name: "in", Linkname: "ok", Typeflag: tar.TypeSymlink},
	} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := errors.Join(w.WriteHeader(&h), w.WriteHeader(&tar.Header{Name: h.Name + "/out", Typeflag: tar.TypeReg}), w.Close()); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, archive []byte) {
		if len(archive) > 1<<20 {
			t.Skip("large")
		}
		dir := t.TempDir()
		if err := errors.Join(os.Mkdir(filepath.Join(dir, "in"), 0o755), os.WriteFile(filepath.Join(dir, "secret"), []byte("s"), 0o600)); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(filepath.Join(dir, "in"))
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		j := &copying{env: &Env{Stderr: io.Discard}}
		_ = j.unpack(root, bytes.NewReader(archive))
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 2 {
			t.Errorf("%v %v", entries, err)
		}
		var s unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, "secret"), &s); err != nil || s.Nlink != 1 || s.Mode&0o777 != 0o600 || s.Size != 1 {
			t.Errorf("the file outside: %+v %v", s, err)
		}
		_ = filepath.Walk(filepath.Join(dir, "in"), func(p string, info os.FileInfo, err error) error {
			if err == nil && info.Mode()&(os.ModeSetuid|os.ModeSetgid|os.ModeDevice) != 0 {
				t.Errorf("%s: %s", p, info.Mode())
			}
			return nil
		})
	})
}
