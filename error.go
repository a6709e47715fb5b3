package cloche

import (
	"errors"
	"fmt"
	"strings"
)

// Code says what kind of failure an Error is. The set is closed: every API
// surface maps each Code once to its own status, and the command line once to
// an exit status.
type Code string

// The codes. The name is what clients see in {"error":{"code":...}}.
const (
	// CodeInvalid: the request can never succeed as it is.
	CodeInvalid Code = "bad_request"
	// CodeTimeoutInvalid: a timeout is outside what the server allows.
	CodeTimeoutInvalid Code = "sandbox_timeout_invalid"
	// CodeUnauthorized: no token, or one that is not valid.
	CodeUnauthorized Code = "unauthorized"
	// CodeForbidden: the token is valid and does not permit this.
	CodeForbidden Code = "forbidden"
	// CodeNotFound: no such thing, or not in the caller's project.
	CodeNotFound Code = "not_found"
	// CodeConflict: the name is taken, or the thing is in use.
	CodeConflict Code = "conflict"
	// CodeGone: the session has ended; the sandbox may be resumed.
	CodeGone Code = "sandbox_stopped"
	// CodeStopping: the session is on its way to its end; try again after it.
	CodeStopping Code = "sandbox_stopping"
	// CodeTooLarge: a bound on a size or a count was passed.
	CodeTooLarge Code = "too_large"
	// CodeExhausted: a quota, or what this host has, is used up.
	CodeExhausted Code = "resource_exhausted"
	// CodeNotImplemented: a part of the protocol that this server does not
	// have. Never retried by clients.
	CodeNotImplemented Code = "not_implemented"
	// CodeUnavailable: the server is shutting down or cannot reach a part of
	// itself; the same request may succeed later.
	CodeUnavailable Code = "unavailable"
	// CodeInternal: a fault of ours. The message says nothing more; the log
	// has the cause under the request id.
	CodeInternal Code = "internal_error"
)

// Error is the error type of every exported operation. Message is written for
// the user and holds no host path and no secret. Err is the cause, for the log
// alone: it never reaches a client.
type Error struct {
	Code    Code
	Op      string // the step, as a noun phrase: "mount layer"; may be empty
	Message string
	Err     error // may be nil
}

// Errorf returns an *Error without a cause.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Internal wraps a cause that is a fault of ours under the name of the step.
func Internal(op string, err error) *Error {
	return &Error{Code: CodeInternal, Op: op, Message: "internal error", Err: err}
}

// Error gives everything there is, cause included. It is for logs; a surface
// shows Message.
func (e *Error) Error() string {
	var b strings.Builder
	if e.Op != "" {
		b.WriteString(e.Op + ": ")
	}
	b.WriteString(e.Message)
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is makes errors.Is(err, &Error{Code: c}) true for every Error of that code.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && t.Message == "" && t.Err == nil
}

// ErrorCode returns the code of the first *Error in err's chain, "" for nil,
// and CodeInternal for any other error.
func ErrorCode(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return CodeInternal
}
