// Package trace carries the request id that ties one request's lines together
// in the logs of the API, the node and the agent.
package trace

import (
	"context"
	"crypto/rand"
	"log/slog"
)

type key struct{}

// NewID returns a fresh request id: "req_" + 26 random characters.
func NewID() string { return "req_" + rand.Text() }

// WithID returns ctx with the request id.
func WithID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, key{}, id)
}

// ID returns the request id of ctx, or "".
func ID(ctx context.Context) string {
	id, _ := ctx.Value(key{}).(string)
	return id
}

// Handler adds the request id of the context to every record, as "request".
type Handler struct{ slog.Handler }

// Handle implements slog.Handler.
func (h Handler) Handle(ctx context.Context, r slog.Record) error {
	if id := ID(ctx); id != "" {
		r.AddAttrs(slog.String("request", id))
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h Handler) WithAttrs(a []slog.Attr) slog.Handler { return Handler{h.Handler.WithAttrs(a)} }

// WithGroup implements slog.Handler.
func (h Handler) WithGroup(name string) slog.Handler { return Handler{h.Handler.WithGroup(name)} }
