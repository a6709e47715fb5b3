package cloche

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"strings"
	"time"
)

// SandboxID identifies a sandbox record ("box_" + 26 characters). People use
// the sandbox's name; the ID stays the same for the life of the record.
type SandboxID string

// SessionID identifies one run of a machine ("sbx_" + 26 characters). The
// prefix is the habit of the Vercel wire protocol.
type SessionID string

// CommandID identifies one command of a session ("cmd_" + 26 characters).
type CommandID string

// ImageID identifies one stored image ("img_" + 26 characters).
type ImageID string

// TokenID identifies an API token ("tok_" + 26 characters). It is not secret.
type TokenID string

const (
	prefixSandbox = "box_"
	prefixSession = "sbx_"
	prefixCommand = "cmd_"
	prefixImage   = "img_"
	prefixToken   = "tok_"

	ulidLen = 26
	// crockford is the base 32 alphabet of a ULID in lower case:
	// https://github.com/ulid/spec.
	crockford = "0123456789abcdefghjkmnpqrstvwxyz"
)

// NewSandboxID returns a fresh SandboxID. The time of creation orders it.
func NewSandboxID() SandboxID { return SandboxID(prefixSandbox + newULID(time.Now())) }

// NewSessionID returns a fresh SessionID.
func NewSessionID() SessionID { return SessionID(prefixSession + newULID(time.Now())) }

// NewCommandID returns a fresh CommandID.
func NewCommandID() CommandID { return CommandID(prefixCommand + newULID(time.Now())) }

// NewImageID returns a fresh ImageID.
func NewImageID() ImageID { return ImageID(prefixImage + newULID(time.Now())) }

// NewTokenID returns a fresh TokenID.
func NewTokenID() TokenID { return TokenID(prefixToken + newULID(time.Now())) }

// Valid reports whether id has the form of a SandboxID.
func (id SandboxID) Valid() bool { return validID(string(id), prefixSandbox) }

// Valid reports whether id has the form of a SessionID. Only a valid one may
// become part of a path or of the name of a host resource.
func (id SessionID) Valid() bool { return validID(string(id), prefixSession) }

// Valid reports whether id has the form of a CommandID. Only a valid one may
// become part of a path.
func (id CommandID) Valid() bool { return validID(string(id), prefixCommand) }

// Valid reports whether id has the form of an ImageID.
func (id ImageID) Valid() bool { return validID(string(id), prefixImage) }

// Valid reports whether id has the form of a TokenID.
func (id TokenID) Valid() bool { return validID(string(id), prefixToken) }

func validID(id, prefix string) bool {
	rest, ok := strings.CutPrefix(id, prefix)
	if !ok || len(rest) != ulidLen {
		return false
	}
	for i := range len(rest) {
		if strings.IndexByte(crockford, rest[i]) < 0 {
			return false
		}
	}
	return true
}

// newULID makes a ULID: 48 bits of milliseconds, then 80 random bits, in 26
// characters of 5 bits, the first of which carries only 3.
func newULID(now time.Time) string {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], uint64(now.UnixMilli())<<16)
	if _, err := rand.Read(b[6:]); err != nil {
		panic(fmt.Sprintf("crypto/rand: %v", err)) // documented never to fail
	}
	hi, lo := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	var out [ulidLen]byte
	for i := ulidLen - 1; i >= 0; i-- {
		out[i] = crockford[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	return string(out[:])
}
