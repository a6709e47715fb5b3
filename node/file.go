package node

import (
	"context"
	"io"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// MakeDir makes one directory as the session's default user.
func (n *Node) MakeDir(ctx context.Context, id cloche.SessionID, d cloche.MakeDir) error {
	s, err := n.session(id)
	if err != nil {
		return err
	}
	return s.guest.MakeDir(ctx, guest.FileRequest{Path: []byte(d.Path), WorkDir: []byte(d.WorkDir)})
}

// WriteFiles unpacks a tar stream as the session's default user. It returns nil
// only if the agent said that every file is written whole. The archive is
// parsed inside the machine, never on the host.
func (n *Node) WriteFiles(ctx context.Context, id cloche.SessionID, w cloche.WriteFiles, tar io.Reader) error {
	s, err := n.session(id)
	if err != nil {
		return err
	}
	return s.guest.WriteFiles(ctx, guest.FileRequest{WorkDir: []byte(w.WorkDir), Gzip: w.Gzip}, tar)
}

// ReadFile opens a file as the session's default user. A failure midway is an
// error of the reader, never a short success.
func (n *Node) ReadFile(ctx context.Context, id cloche.SessionID, f cloche.ReadFile) (cloche.FileInfo, io.ReadCloser, error) {
	s, err := n.session(id)
	if err != nil {
		return cloche.FileInfo{}, nil, err
	}
	return s.guest.ReadFile(ctx, guest.FileRequest{Path: []byte(f.Path), WorkDir: []byte(f.WorkDir)})
}
