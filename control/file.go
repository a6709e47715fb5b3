package control

import (
	"context"
	"io"

	"github.com/cloche-dev/cloche"
)

// MakeDir makes a directory in a live session.
func (c *Control) MakeDir(ctx context.Context, p cloche.Principal, id cloche.SessionID, d cloche.MakeDir) error {
	if err := checkFile(d.Path, d.WorkDir); err != nil {
		return err
	}
	l, _, err := c.live(ctx, p, id)
	if err != nil {
		return err
	}
	return c.settled(ctx, l, c.node.MakeDir(ctx, id, d))
}

// WriteFiles unpacks a tar stream in a live session.
func (c *Control) WriteFiles(ctx context.Context, p cloche.Principal, id cloche.SessionID, w cloche.WriteFiles, tar io.Reader) error {
	if err := checkPath("working directory", w.WorkDir); err != nil {
		return err
	}
	l, _, err := c.live(ctx, p, id)
	if err != nil {
		return err
	}
	return c.settled(ctx, l, c.node.WriteFiles(ctx, id, w, tar))
}

// ReadFile reads a file of a live session. A missing file is CodeNotFound, a
// directory is CodeInvalid.
func (c *Control) ReadFile(ctx context.Context, p cloche.Principal, id cloche.SessionID, f cloche.ReadFile) (cloche.FileInfo, io.ReadCloser, error) {
	if err := checkFile(f.Path, f.WorkDir); err != nil {
		return cloche.FileInfo{}, nil, err
	}
	l, _, err := c.live(ctx, p, id)
	if err != nil {
		return cloche.FileInfo{}, nil, err
	}
	info, content, err := c.node.ReadFile(ctx, id, f)
	return info, content, c.settled(ctx, l, err)
}

func checkFile(path, workDir string) error {
	if path == "" {
		return cloche.Errorf(cloche.CodeInvalid, "there is no path")
	}
	if err := checkPath("path", path); err != nil {
		return err
	}
	return checkPath("working directory", workDir)
}
