package guest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/cloche-dev/cloche"
)

// maxNonce bounds the nonce of a Hello, which the agent repeats in its answer.
const maxNonce = 128

// maxAttempts bounds how many lines with the prefix and the nonce a host
// parses, so that a hostile agent cannot make it parse 32 MiB of near misses.
const maxAttempts = 64

// WriteHello writes the host's line.
func WriteHello(w io.Writer, h Hello) error { return writeLine(w, h) }

// WriteWelcome writes the agent's line.
func WriteWelcome(w io.Writer, m Welcome) error { return writeLine(w, m) }

func writeLine(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("handshake line: %w", err)
	}
	line := append(append([]byte(HelloPrefix), b...), '\n')
	if len(line) > MaxHello {
		return fmt.Errorf("handshake line: %d bytes exceed the bound", len(line))
	}
	_, err = w.Write(line)
	return err
}

// ReadHello reads the host's line, which must come first. r may have read ahead
// when it returns: what follows must be read through it.
func ReadHello(r *bufio.Reader) (Hello, error) {
	var line []byte
	for {
		b, err := r.ReadByte()
		if err != nil {
			return Hello{}, fmt.Errorf("read hello: %w", err)
		}
		if b == '\n' {
			break
		}
		if len(line) == MaxHello-1 {
			return Hello{}, errors.New("read hello: line exceeds the bound")
		}
		line = append(line, b)
	}
	payload, ok := bytes.CutPrefix(line, []byte(HelloPrefix))
	if !ok {
		return Hello{}, errors.New("read hello: not a handshake line")
	}
	var h Hello
	if err := json.Unmarshal(payload, &h); err != nil {
		return Hello{}, fmt.Errorf("read hello: %w", err)
	}
	if h.Nonce == "" || len(h.Nonce) > maxNonce {
		return Hello{}, fmt.Errorf("read hello: nonce of %d bytes", len(h.Nonce))
	}
	return h, nil
}

// ReadWelcome drops stale bytes, up to MaxStale, and returns the agent's answer
// to the Hello with that nonce. r may have read ahead when it returns.
func ReadWelcome(r *bufio.Reader, nonce string) (Welcome, error) {
	attempts := 0
	// tail is the end of the current line, at most MaxHello bytes of it. Stale
	// bytes need not end in a newline, so the answer may begin anywhere in it.
	tail := make([]byte, 0, 2*MaxHello)
	for range MaxStale {
		b, err := r.ReadByte()
		if err != nil {
			return Welcome{}, fmt.Errorf("read welcome: %w", err)
		}
		if b != '\n' {
			if len(tail) == cap(tail) {
				tail = tail[:copy(tail, tail[MaxHello:])]
			}
			tail = append(tail, b)
			continue
		}
		if bytes.Contains(tail, []byte(nonce)) {
			w, tried, ok := findWelcome(tail, nonce)
			if ok {
				return w, nil
			}
			if attempts += tried; attempts > maxAttempts {
				break
			}
		}
		tail = tail[:0]
	}
	return Welcome{}, errors.New("read welcome: no answer with this connection's nonce")
}

// findWelcome tries each occurrence of the prefix in line and says how many it
// tried.
func findWelcome(line []byte, nonce string) (w Welcome, tried int, ok bool) {
	for tried < maxAttempts {
		i := bytes.Index(line, []byte(HelloPrefix))
		if i < 0 {
			return Welcome{}, tried, false
		}
		line = line[i+len(HelloPrefix):]
		tried++
		var w Welcome
		if json.Unmarshal(line, &w) == nil && w.Nonce == nonce {
			return w, tried, true
		}
	}
	return Welcome{}, tried, false
}

// Negotiate gives the highest version that both the peer's range and ours have,
// or the Failure of code "version" that says what both are.
func Negotiate(peerMin, peerMax, ourMin, ourMax int) (int, *Failure) {
	if v := min(peerMax, ourMax); v >= max(peerMin, ourMin) {
		return v, nil
	}
	return 0, &Failure{Code: CodeVersion, Message: fmt.Sprintf(
		"the agent speaks protocol versions %d to %d, the host %d to %d", ourMin, ourMax, peerMin, peerMax)}
}

// Err is the failure as an error, nil for a nil Failure.
func (f *Failure) Err() error {
	if f == nil {
		return nil
	}
	return &cloche.Error{Code: f.Code, Message: f.Message}
}
