package auth

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestKeyIsMadeOnceAndPrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "secrets")
	first, err := OpenKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "key"): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	sealed, err := first.Seal([]byte("hello"), []byte("a"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := OpenKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	if plain, err := second.Open(sealed, []byte("a")); err != nil || string(plain) != "hello" {
		t.Errorf("Open = %q, %v", plain, err)
	}
}

func TestSealedValueIsBoundAndAuthentic(t *testing.T) {
	k, err := OpenKey(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := k.Seal([]byte("secret text"), []byte("a"))
	if err != nil {
		t.Fatal(err)
	}
	again, err := k.Seal([]byte("secret text"), []byte("a"))
	if err != nil || bytes.Equal(sealed, again) || bytes.Contains(sealed, []byte("secret")) {
		t.Errorf("Seal gave %x, then %x, %v", sealed, again, err)
	}
	if _, err := k.Open(sealed, []byte("b")); err == nil {
		t.Error("a value opened with another binding")
	}
	for i := range sealed {
		bent := bytes.Clone(sealed)
		bent[i] ^= 1
		if _, err := k.Open(bent, []byte("a")); err == nil {
			t.Errorf("a value opened with byte %d changed", i)
		}
		if _, err := k.Open(sealed[:i], []byte("a")); err == nil {
			t.Errorf("a value opened with %d bytes", i)
		}
	}
}

func TestUnfitKeyFileIsRefused(t *testing.T) {
	for name, f := range map[string]struct {
		mode os.FileMode
		size int
	}{"readable": {0o640, keyBytes}, "short": {0o600, keyBytes - 1}, "empty": {0o600, 0}} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "key")
			if err := os.WriteFile(path, make([]byte, f.size), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, f.mode); err != nil {
				t.Fatal(err)
			}
			if _, err := OpenKey(filepath.Dir(path)); err == nil {
				t.Error("OpenKey took it")
			}
		})
	}
}
