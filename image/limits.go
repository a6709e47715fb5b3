package image

import (
	"errors"
	"io"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// Limits bound what an archive may become. A field that is 0 has its default.
type Limits struct {
	// Bytes is the content of all files of all layers together, also of those
	// that a later layer takes away; default 16 GiB.
	Bytes int64
	// Files is the number of entries of all layers together; default 1,000,000.
	Files int64
	// Layers is the number of layers; default 256. (Docker stops at 127.)
	Layers int
	// Blob is the size of one compressed layer; default 8 GiB.
	Blob int64
}

func (l Limits) withDefaults() Limits {
	if l.Bytes == 0 {
		l.Bytes = 16 << 30
	}
	if l.Files == 0 {
		l.Files = 1_000_000
	}
	if l.Layers == 0 {
		l.Layers = 256
	}
	if l.Blob == 0 {
		l.Blob = 8 << 30
	}
	return l
}

// stream is the most that the uncompressed archives may have together: content
// and for each entry its headers, of which a PAX one may be large.
func (l Limits) stream() int64 { return l.Bytes + 4096*l.Files + 1<<20 }

// boundReader fails with CodeTooLarge after n bytes.
type boundReader struct {
	r io.Reader
	n int64 // left
}

func (b *boundReader) Read(p []byte) (int, error) {
	if b.n <= 0 {
		return 0, cloche.Errorf(cloche.CodeTooLarge, "the archive is larger than the limit when uncompressed")
	}
	if int64(len(p)) > b.n {
		p = p[:b.n]
	}
	n, err := b.r.Read(p)
	b.n -= int64(n)
	return n, err
}

// hostError gives an error of the file system its code: what the archive asked
// for and no file system can do is the archive's fault, a full disk the host's.
func hostError(op string, err error) error {
	var have *cloche.Error
	switch {
	case err == nil || errors.As(err, &have):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return &cloche.Error{Code: cloche.CodeExhausted, Op: op, Message: "the host's disk is full", Err: err}
	case errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR),
		errors.Is(err, unix.EMLINK), errors.Is(err, unix.EINVAL), errors.Is(err, unix.E2BIG):
		return &cloche.Error{Code: cloche.CodeInvalid, Op: op, Message: "the archive has an entry that no file system can hold", Err: err}
	}
	return cloche.Internal(op, err)
}
