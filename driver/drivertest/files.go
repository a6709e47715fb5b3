package drivertest

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
)

// testTop: what the guest synced is on the host after a kill, owned by the
// guest's ids and the offset, and a later machine goes on with it.
func testTop(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	s := e.session(t, m, spec)
	e.sh(t, s, `cd /root && echo synced | dd of=file conv=fsync 2>/dev/null && chown 1000:1000 file &&
		rm /usr/share/deep/tree/second && mv /usr/share/deep /usr/share/moved && sync`)
	if err := m.Kill(e.ctx); err != nil {
		t.Fatal(err)
	}
	upper := filepath.Join(spec.Root.Top, driver.TopUpper)
	data, err := os.ReadFile(filepath.Join(upper, "root/file"))
	if err != nil || string(data) != "synced\n" {
		t.Errorf("on the host: %q, %v", data, err)
	}
	for path, id := range map[string]uint32{"root/file": 1000, "usr/share/moved": 0, ".": 0} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(upper, path), &st); err != nil {
			t.Errorf("%s: %v", path, err)
		} else if want := driver.IDOffset + id; st.Uid != want || st.Gid != want {
			t.Errorf("%s is owned by %d:%d, want %d", path, st.Uid, st.Gid, want)
		}
	}
	if err := m.Release(e.ctx); err != nil {
		t.Fatal(err)
	}
	next := e.spec(t)
	next.Root.Top = spec.Root.Top
	e.checkChanged(t, e.start(t, next), next)
}

// checkChanged expects the changes of testTop in m.
func (e *env) checkChanged(t *testing.T, m driver.Machine, spec driver.Spec) {
	t.Helper()
	s := e.session(t, m, spec)
	out := e.sh(t, s, `cat /root/file /usr/share/moved/tree/leaf; stat -c %u /root/file /home/user/owned-by-1000 /bin/busybox;
		ls /usr/share /usr/share/moved/tree`)
	want := "synced\nfrom the image\n1000\n1000\n0\n/usr/share:\nmoved\n\n/usr/share/moved/tree:\nleaf\n"
	if out != want {
		t.Errorf("in the next machine: %q, want %q", out, want)
	}
}

// testLayers stacks the top of one machine under two others at once.
func testLayers(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	s := e.session(t, m, spec)
	e.sh(t, s, `echo synced > /root/file && chown 1000:1000 /root/file &&
		rm /usr/share/deep/tree/second && mv /usr/share/deep /usr/share/moved`)
	if err := m.Release(e.ctx); err != nil {
		t.Fatal(err)
	}
	before, err := digest(spec.Root.Top)
	if err != nil {
		t.Fatal(err)
	}
	second := e.spec(t)
	second.Root.Layers = []string{spec.Root.Top}
	m2 := e.start(t, second)
	e.checkChanged(t, m2, second)
	third := e.spec(t)
	third.Root.Layers = []string{spec.Root.Top}
	m3 := e.start(t, third)
	e.checkChanged(t, m3, third)
	s2 := e.session(t, m2, second)
	e.sh(t, s2, "echo second > /root/file; rm -r /usr/share/moved")
	e.checkChanged(t, m3, third) // the other's changes are its own
	if err := m2.Release(e.ctx); err != nil {
		t.Fatal(err)
	}
	fourth := e.spec(t)
	fourth.Root.Layers = []string{spec.Root.Top, second.Root.Top}
	s4 := e.session(t, e.start(t, fourth), fourth)
	if out := e.sh(t, s4, "cat /root/file; ls /usr/share"); out != "second\n" {
		t.Errorf("on two layers: %q", out)
	}
	if after, err := digest(spec.Root.Top); err != nil || after != before {
		t.Errorf("the layer changed: %v", err)
	}
}

func testImageUnchanged(t *testing.T, e *env) {
	before, err := digest(e.c.Image)
	if err != nil {
		t.Fatal(err)
	}
	spec := e.spec(t)
	m := e.start(t, spec)
	s := e.session(t, m, spec)
	e.sh(t, s, "chown -R 5:5 /home; chmod 700 /usr; touch /usr/new; rm -r /usr/share; mv /etc /etc2; echo x >> /bin/busybox.txt; rm -rf /bin")
	if err := m.Release(e.ctx); err != nil {
		t.Fatal(err)
	}
	after, err := digest(e.c.Image)
	if err != nil || after != before {
		t.Errorf("the image changed: %v", err)
	}
}

// testTopUntouched: a machine that does nothing leaves nothing in its top.
func testTopUntouched(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	s, err := open(e.ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := m.Release(e.ctx); err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(spec.Root.Top, func(path string, _ fs.DirEntry, err error) error {
		if rel, rerr := filepath.Rel(spec.Root.Top, path); rerr != nil || rel != "." && rel != driver.TopUpper {
			t.Errorf("in the top: %s", rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// testIsolation looks at what a machine can see and do.
func testIsolation(t *testing.T, e *env) {
	spec := e.spec(t)
	s := e.session(t, e.start(t, spec), spec)
	if out := e.sh(t, s, "ls /proc | grep -c '^[0-9]*$' > /dev/null; cat /proc/1/comm; ip link | grep -c '^[0-9]'"); out == "" {
		t.Error("no process 1")
	}
	secret := filepath.Join(e.dir, "secret-of-the-host")
	if err := os.WriteFile(secret, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, exit, err := s.run(e.ctx, "cat "+secret); err != nil || exit.Code == 0 {
		t.Errorf("a file of the host can be read: %+v, %v", exit, err)
	}
	other := e.spec(t)
	e.session(t, e.start(t, other), other)
	if out := e.sh(t, s, "hostname; mount | grep -c "+string(other.ID)+" || true"); out != "box-1\n0\n" {
		t.Errorf("output = %q", out)
	}
	if !cloche.SessionID(spec.ID).Valid() {
		t.Errorf("id = %q", spec.ID)
	}
}
