package image

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/cloche-dev/cloche"
)

// memRecords is the list of images in memory.
type memRecords struct {
	mu   sync.Mutex
	list []cloche.Image
	fail error // of PutImage
}

func (m *memRecords) PutImage(_ context.Context, img cloche.Image) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail == nil {
		m.list = append(m.list, img)
	}
	return m.fail
}

func (m *memRecords) Images(context.Context) ([]cloche.Image, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.list), nil
}

func (m *memRecords) DeleteImage(_ context.Context, id cloche.ImageID) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.list = slices.DeleteFunc(m.list, func(i cloche.Image) bool { return i.ID == id })
	return nil
}

func newLibrary(t *testing.T) (*Library, *memRecords) {
	t.Helper()
	records := &memRecords{}
	l, err := Open(t.TempDir()+"/images", records, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return l, records
}

// asRoot skips a test that sets owners.
func asRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root, to set the owners of files")
	}
}
