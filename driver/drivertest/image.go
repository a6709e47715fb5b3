package drivertest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"testing"

	"golang.org/x/sys/unix"
)

// Image returns the tree of a small image, busybox and what a user database
// needs, and makes it first if this host has not got it. It is shared by all
// tests of the host and must not change.
func Image(t testing.TB) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	dir := filepath.Join(cache, "cloche", "test-root-1")
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "test-root-tmp-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	if err := buildImage(filepath.Join(tmp, "root"), tmp); err != nil {
		t.Skipf("SKIPPED, no test image: %v", err)
	}
	err = os.Rename(filepath.Join(tmp, "root"), dir)
	if err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.ENOTEMPTY) {
		t.Fatal(err)
	}
	return dir
}

func buildImage(root, tmp string) error {
	busybox, err := findBusybox(tmp)
	if err != nil {
		return err
	}
	for _, d := range []string{"bin", "etc", "root", "home/user", "usr/share/deep/tree", "var", "mnt"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"etc/passwd":                 "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
		"etc/group":                  "root:x:0:\nuser:x:1000:\n",
		"usr/share/deep/tree/leaf":   "from the image\n",
		"home/user/owned-by-1000":    "mine\n",
		"usr/share/deep/tree/second": "also\n",
	} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, name := range []string{"home/user", "home/user/owned-by-1000"} {
		if err := os.Lchown(filepath.Join(root, name), 1000, 1000); err != nil {
			return err
		}
	}
	if out, err := exec.Command("cp", busybox, filepath.Join(root, "bin/busybox")).CombinedOutput(); err != nil {
		return fmt.Errorf("copy busybox: %w: %s", err, out)
	}
	if out, err := exec.Command("chroot", root, "/bin/busybox", "--install", "-s", "/bin").CombinedOutput(); err != nil {
		return fmt.Errorf("install busybox: %w: %s", err, out)
	}
	return nil
}

// findBusybox takes the host's, if static, or Debian's package.
func findBusybox(tmp string) (string, error) {
	cmd := exec.Command("sh", "-c", "apt-get download busybox-static && dpkg -x busybox-static_*.deb x")
	cmd.Dir = tmp
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("download busybox-static: %w: %s", err, out)
	}
	for _, p := range []string{"x/bin/busybox", "x/usr/bin/busybox"} {
		if path := filepath.Join(tmp, p); fileExists(path) {
			return path, nil
		}
	}
	return "", errors.New("the package busybox-static has no busybox")
}

func fileExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// digest is over all that a tree is: names, types, modes, owners, content and
// times of change.
func digest(root string) (string, error) {
	var lines []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%s %o %d %d %d %d.%d", path, st.Mode, st.Uid, st.Gid, st.Size, st.Mtim.Sec, st.Mtim.Nsec)
		if d.Type().IsRegular() {
			h := sha256.New()
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			if _, err := io.Copy(h, f); err != nil {
				return err
			}
			line += fmt.Sprintf(" %x", h.Sum(nil))
		}
		lines = append(lines, line)
		return nil
	})
	sort.Strings(lines)
	h := sha256.New()
	for _, l := range lines {
		fmt.Fprintln(h, l)
	}
	return fmt.Sprintf("%x", h.Sum(nil)), err
}
