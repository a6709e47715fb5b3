package vercel

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/cloche-dev/cloche"
)

// answer writes v as the whole answer.
func (c *call) answer(v any) error {
	body, err := encode(v)
	if err != nil {
		return cloche.Internal("encode the answer", err)
	}
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = c.w.Write(body) // the client has gone: nobody is left to tell
	return nil
}

func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

type result struct {
	v   any
	err error
}

// slowly answers with the value of op. If that takes long, the headers go out
// ahead of it and spaces follow until the body, because clients repeat a
// request that got no headers for 300 s. A failure after that can only be told
// in the body: as the usual error object, which fits no answer that a client
// accepts, or, if cut, by cutting the connection. The time runs from the moment
// that sent is closed, or from now if it is nil: a client waits for headers
// while it does not send (undici, headersTimeout), and until then a failure can
// still be told as what it is.
func (c *call) slowly(cut bool, sent <-chan struct{}, op func(context.Context) (any, error)) error {
	done := make(chan result, 1) // buffered: but the loop below always takes it
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- result{err: cloche.Internal("serve", fmt.Errorf("panic: %v\n%s", p, debug.Stack()))}
			}
		}()
		v, err := op(c.r.Context())
		done <- result{v, err}
	}()
	var timeout <-chan time.Time
	if sent == nil {
		timeout = time.After(c.HeadersWithin)
	}
	for waiting := true; waiting; {
		select {
		case r := <-done:
			if r.err != nil {
				return r.err
			}
			return c.answer(r.v)
		case <-sent:
			sent, timeout = nil, time.After(c.HeadersWithin)
		case <-timeout:
			waiting = false
		}
	}
	rc := http.NewResponseController(c.w)
	_ = rc.EnableFullDuplex() // a body may still be on its way in
	c.w.Header().Set("Content-Type", "application/json")
	tick := time.NewTicker(c.Heartbeat)
	defer tick.Stop()
	for {
		_, _ = c.w.Write([]byte(" ")) // a client that has gone cancels the context of op
		_ = rc.Flush()
		select {
		case r := <-done:
			return c.late(r, cut)
		case <-tick.C:
		}
	}
}

// late writes the body of an answer whose headers have been sent.
func (c *call) late(r result, cut bool) error {
	if r.err != nil {
		if cut {
			return r.err // fail cuts the connection
		}
		c.Log.ErrorContext(c.r.Context(), "request failed after its headers", "error", r.err)
		r.v = errorBody{public(r.err)}
	}
	body, err := encode(r.v)
	if err != nil {
		return cloche.Internal("encode the answer", err)
	}
	_, _ = c.w.Write(body)
	return nil
}
