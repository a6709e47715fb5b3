package vercel

import (
	"unicode/utf16"
	"unicode/utf8"
)

// text turns the bytes of one output stream, which come in any pieces, into the
// inside of JSON strings in pure ASCII. A character that is not whole yet is
// kept for the next piece; a byte that belongs to none becomes U+FFFD. The zero
// value is ready. Not safe for concurrent use.
type text struct {
	rest [utf8.UTFMax]byte
	n    int // bytes of rest in use: the begin of a character
}

const replacement = `\ufffd`

// append appends what is whole of the kept bytes and data.
func (t *text) append(dst, data []byte) []byte {
	for t.n > 0 && len(data) > 0 {
		t.rest[t.n] = data[0]
		t.n++
		data = data[1:]
		if !utf8.FullRune(t.rest[:t.n]) {
			continue
		}
		// A character, or bytes that can never be one, of which the last
		// may begin something else.
		r, size := utf8.DecodeRune(t.rest[:t.n])
		if r == utf8.RuneError && size == 1 {
			back := t.rest[1:t.n]
			t.n = 0
			dst = append(dst, replacement...)
			for i := range back {
				dst = t.append(dst, []byte{back[i]})
			}
			continue
		}
		t.n = 0
		dst = appendRune(dst, r)
	}
	whole := len(data) - incomplete(data)
	dst = appendQuoted(dst, data[:whole])
	t.n += copy(t.rest[t.n:], data[whole:])
	return dst
}

// held reports whether finish has something to append.
func (t *text) held() bool { return t.n > 0 }

// finish appends one U+FFFD for each kept byte: no more will come.
func (t *text) finish(dst []byte) []byte {
	for ; t.n > 0; t.n-- {
		dst = append(dst, replacement...)
	}
	return dst
}

// incomplete is the number of bytes at the end of b that begin a character and
// do not end it.
func incomplete(b []byte) int {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if !utf8.FullRune(b[len(b)-i:]) {
				return i
			}
			return 0
		}
	}
	return 0
}

// appendQuoted appends b as the inside of a JSON string in ASCII.
func appendQuoted(dst, b []byte) []byte {
	start := 0
	for i := 0; i < len(b); {
		if c := b[i]; plain(c) {
			i++
			continue
		}
		dst = append(dst, b[start:i]...)
		r, size := utf8.DecodeRune(b[i:])
		dst = appendRune(dst, r)
		i += size
		start = i
	}
	return append(dst, b[start:]...)
}

// plain reports whether c stands for itself in a JSON string.
func plain(c byte) bool {
	return c >= ' ' && c < utf8.RuneSelf && c != '"' && c != '\\'
}

func appendRune(dst []byte, r rune) []byte {
	switch {
	case r == '"' || r == '\\':
		return append(dst, '\\', byte(r))
	case r == '\n':
		return append(dst, '\\', 'n')
	case r < utf8.RuneSelf && plain(byte(r)):
		return append(dst, byte(r))
	case r >= 0x10000:
		hi, lo := utf16.EncodeRune(r)
		return appendUnit(appendUnit(dst, hi), lo)
	default:
		return appendUnit(dst, r)
	}
}

func appendUnit(dst []byte, u rune) []byte {
	const hex = "0123456789abcdef"
	return append(dst, '\\', 'u', hex[u>>12&15], hex[u>>8&15], hex[u>>4&15], hex[u&15])
}

// appendASCII appends JSON with its characters beyond ASCII escaped; those are
// all inside strings.
func appendASCII(dst, json []byte) []byte {
	for i := 0; i < len(json); {
		if json[i] < utf8.RuneSelf {
			dst = append(dst, json[i])
			i++
			continue
		}
		r, size := utf8.DecodeRune(json[i:])
		dst = appendRune(dst, r)
		i += size
	}
	return dst
}
