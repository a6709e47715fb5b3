package image

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBuildCancelled stops a build while packages are being installed: no mount,
// no scratch directory and no process holds on, and what was downloaded stays.
func TestBuildCancelled(t *testing.T) {
	asRoot(t)
	soak(t)
	cacheDir := t.TempDir()
	l, records := newLibrary(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := l.Build(ctx, "universal", BuildOptions{CacheDir: cacheDir}, func(s Step) {
		if s.Detail == "installing essential packages" {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled build: %v", err)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), cacheDir) {
		t.Errorf("the build left mounts, %v", err)
	}
	assertEntries(t, cacheDir, "apt", "lock", "npm", "products")
	debs, err := filepath.Glob(filepath.Join(cacheDir, "apt/archives/*.deb"))
	if err != nil || len(debs) < 100 {
		t.Errorf("%d packages are in the cache, %v", len(debs), err)
	}
	if len(records.list) > 0 {
		t.Errorf("a cancelled build is listed: %v", records.list)
	}
	c, err := openCache(t.Context(), cacheDir, nil) // nobody holds it
	if err != nil {
		t.Fatal(err)
	}
	if err := c.close(); err != nil {
		t.Error(err)
	}
}

// soak skips a test that downloads everything anew.
func soak(t *testing.T) {
	t.Helper()
	if os.Getenv("CLOCHE_SOAK") == "" {
		t.Skip("a long one: make soak runs it")
	}
}
