package image

import (
	"bufio"
	"bytes"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// maxWindow bounds the memory for one zstd stream: level 19 and "--long" of the
// zstd tool need 8 and 128 MiB.
const maxWindow = 128 << 20

// decompress recognises gzip, zstd and plain archives by their first bytes, since
// media types are not always true.
func decompress(r io.Reader) (io.ReadCloser, error) {
	b := bufio.NewReaderSize(r, 256<<10)
	head, err := b.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, archiveError(err)
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}): // RFC 1952
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, archiveError(err)
		}
		return z, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}): // RFC 8878
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, archiveError(err)
		}
		return z.IOReadCloser(), nil
	}
	return io.NopCloser(b), nil
}
