package main

import (
	"context"
	"io"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/guest/dial"
	"github.com/cloche-dev/cloche/node"
)

// guestChannel is a dial.Client in the shape that the node asks for.
type guestChannel struct{ *dial.Client }

// Run implements node.Guest.
func (g guestChannel) Run(ctx context.Context, id cloche.CommandID, s guest.Start, stdin io.Reader) (node.Stream, error) {
	return output(g.Client.Run(ctx, id, s, stdin))
}

// Attach implements node.Guest.
func (g guestChannel) Attach(ctx context.Context, id cloche.CommandID, offset int64) (node.Stream, error) {
	return output(g.Client.Attach(ctx, id, offset))
}

func output(s *dial.Stream, err error) (node.Stream, error) {
	if err != nil {
		return nil, err // a nil *dial.Stream in an interface would not be nil
	}
	return commandStream{s}, nil
}

// Commands implements node.Guest.
func (g guestChannel) Commands(ctx context.Context) ([]guest.Status, error) { return g.Status(ctx) }

// Signal implements node.Guest.
func (g guestChannel) Signal(ctx context.Context, id cloche.CommandID, signal int) error {
	_, err := g.Client.Signal(ctx, id, signal)
	return err
}

// WriteFiles implements node.Guest.
func (g guestChannel) WriteFiles(ctx context.Context, f guest.FileRequest, tar io.Reader) error {
	_, err := g.Client.WriteFiles(ctx, f, tar)
	return err
}

// Shutdown implements node.Guest.
func (g guestChannel) Shutdown(ctx context.Context, grace time.Duration) error {
	return g.Client.Shutdown(ctx, grace)
}

// commandStream is a dial.Stream in the shape that the node asks for.
type commandStream struct{ *dial.Stream }

// Next implements node.Stream.
func (s commandStream) Next() (cloche.LogEntry, *cloche.Exit, error) {
	e, err := s.Stream.Next()
	return cloche.LogEntry{Stream: e.Stream, Data: e.Data}, e.Exit, err
}

// Ack implements node.Stream. It is queued: a broken stream is seen by Next.
func (s commandStream) Ack(offset int64) error {
	s.Stream.Ack(offset)
	return nil
}
