package vercel

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"

	"github.com/cloche-dev/cloche"
)

// statuses is the one place where a Code becomes an HTTP status. Clients act on
// 404 (make it), 410 and 422 (resume, then once more), and repeat 429 and every
// 5xx, so a failure that is final is never one of those.
var statuses = map[cloche.Code]int{
	cloche.CodeInvalid:        http.StatusBadRequest,
	cloche.CodeTimeoutInvalid: http.StatusBadRequest,
	cloche.CodeUnauthorized:   http.StatusUnauthorized,
	cloche.CodeForbidden:      http.StatusForbidden,
	cloche.CodeNotFound:       http.StatusNotFound,
	cloche.CodeConflict:       http.StatusConflict,
	cloche.CodeGone:           http.StatusGone,
	cloche.CodeStopping:       http.StatusUnprocessableEntity,
	cloche.CodeTooLarge:       http.StatusRequestEntityTooLarge,
	cloche.CodeExhausted:      http.StatusTooManyRequests,
	cloche.CodeNotImplemented: http.StatusBadRequest,
	cloche.CodeUnavailable:    http.StatusServiceUnavailable,
	cloche.CodeInternal:       http.StatusInternalServerError,
}

// errorBody is the body of every answer that is not 2xx.
type errorBody struct {
	Error failure `json:"error"`
}

type failure struct {
	Code    cloche.Code `json:"code"`
	Message string      `json:"message"`
}

// public is what a client may know of err: an internal error has no message of
// its own, and no cause ever leaves.
func public(err error) failure {
	var e *cloche.Error
	if !errors.As(err, &e) || e.Code == cloche.CodeInternal {
		return failure{cloche.CodeInternal, "internal error; the server's log has the cause under this request's id"}
	}
	return failure{e.Code, e.Message}
}

// fail answers err, unless the client has gone or an answer has begun: then the
// connection is cut, because half an answer must not look whole.
func (c *call) fail(err error) {
	ctx := c.r.Context()
	if ctx.Err() != nil && cloche.ErrorCode(err) == cloche.CodeInternal {
		if !errors.Is(context.Cause(ctx), ErrShutdown) {
			c.w.cut = true
			c.Log.DebugContext(ctx, "the client went away", "error", err)
			return
		}
		err = cloche.Errorf(cloche.CodeUnavailable, "%v", ErrShutdown)
	}
	code := cloche.ErrorCode(err)
	level := slog.LevelDebug
	if code == cloche.CodeInternal || code == cloche.CodeUnavailable {
		level = slog.LevelError
	}
	c.Log.Log(ctx, level, "request failed", "code", code, "error", err)
	if c.w.status != 0 {
		panic(http.ErrAbortHandler)
	}
	status, known := statuses[code]
	if !known {
		status = http.StatusInternalServerError
	}
	switch status {
	case http.StatusUnauthorized:
		c.w.Header().Set("WWW-Authenticate", "Bearer")
	case http.StatusTooManyRequests:
		c.w.Header().Set("Retry-After", "5")
	case http.StatusServiceUnavailable:
		c.w.Header().Set("Retry-After", "1")
	}
	writeError(c.w, status, err)
}

// writeError writes an error answer. That the client may not be there to read
// it is no concern of anybody.
func writeError(w http.ResponseWriter, status int, err error) {
	body, merr := json.Marshal(errorBody{public(err)})
	if merr != nil {
		panic(merr) // two strings
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// later answers a part of the protocol that this server does not have. It is
// never a 5xx, which clients repeat, and never a success.
func later(what string) func(*call) error {
	return func(*call) error { return notImplemented(what) }
}

func notImplemented(what string) error {
	return cloche.Errorf(cloche.CodeNotImplemented, "this server does not have %s", what)
}
