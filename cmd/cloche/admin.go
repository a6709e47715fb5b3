package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/image"
)

// admin is what the commands with --data do. A running server does it for them
// over admin.sock; without one they hold the lock and do it themselves.
type admin interface {
	// CreateToken makes a token and returns its secret, opaque or as a JWT.
	CreateToken(ctx context.Context, r tokenRequest) (string, error)
	// MakeImage builds or pulls an image, telling progress as it goes.
	MakeImage(ctx context.Context, r imageRequest, progress func(image.Step)) (cloche.Image, error)
	Images(ctx context.Context) ([]cloche.Image, error)
	// RemoveImage removes an image that no sandbox uses.
	RemoveImage(ctx context.Context, ref string) error
	// Tokens lists what is known of tokens: no secrets.
	Tokens(ctx context.Context) ([]tokenInfo, error)
	// RevokeToken ends a token at once.
	RevokeToken(ctx context.Context, id cloche.TokenID) error
}

type tokenRequest struct {
	Team    string `json:"team"`
	Project string `json:"project"`
	JWT     bool   `json:"jwt"`
}

// tokenInfo is a token without what would let anybody use it.
type tokenInfo struct {
	ID        cloche.TokenID `json:"id"`
	Team      string         `json:"team"`
	Project   string         `json:"project"`
	CreatedAt time.Time      `json:"createdAt"`
}

// imageRequest asks for an image by recipe name or by reference.
type imageRequest struct {
	Build     string `json:"build,omitempty"`
	Pull      string `json:"pull,omitempty"`
	IfMissing bool   `json:"ifMissing,omitempty"`
	Refresh   bool   `json:"refresh,omitempty"` // build: with today's packages
}

// withAdmin calls f with the admin of a data directory.
func withAdmin(ctx context.Context, dir string, log *slog.Logger, f func(admin) error) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		log.WarnContext(ctx, "there was no data directory here; a new one is made", "data", dir)
	}
	data, err := openDataDir(dir)
	if err != nil {
		return err
	}
	b, err := openBase(ctx, data, log)
	if errors.Is(err, errLocked) {
		return f(&remoteAdmin{socket: data.path("admin.sock")})
	}
	if err != nil {
		return err
	}
	return errors.Join(f(&localAdmin{b}), b.close())
}

// localAdmin works on the open data directory.
type localAdmin struct{ *base }

func (a *localAdmin) CreateToken(ctx context.Context, r tokenRequest) (string, error) {
	secret, _, err := a.auth.Create(ctx, r.Team, r.Project)
	if err != nil || !r.JWT {
		return secret, err
	}
	return a.auth.JWT(r.Team, r.Project, secret)
}

func (a *localAdmin) MakeImage(ctx context.Context, r imageRequest, progress func(image.Step)) (cloche.Image, error) {
	name := r.Build
	if name == "" {
		name = r.Pull
	}
	if r.IfMissing {
		img, err := a.images.Image(ctx, name)
		if cloche.ErrorCode(err) != cloche.CodeNotFound {
			return img, err
		}
	}
	if r.Pull != "" {
		return a.images.Pull(ctx, r.Pull, image.PullOptions{CacheDir: os.Getenv("CLOCHE_CACHE")}, progress)
	}
	return a.images.Build(ctx, r.Build, image.BuildOptions{CacheDir: os.Getenv("CLOCHE_CACHE"), Refresh: r.Refresh}, progress)
}

func (a *localAdmin) Images(ctx context.Context) ([]cloche.Image, error) { return a.images.List(ctx) }

func (a *localAdmin) RemoveImage(ctx context.Context, ref string) error {
	img, err := a.images.Image(ctx, ref)
	if err != nil {
		return err
	}
	return a.images.Remove(ctx, img.ID)
}

func (a *localAdmin) Tokens(ctx context.Context) ([]tokenInfo, error) {
	all, err := a.auth.List(ctx)
	list := make([]tokenInfo, len(all))
	for i, t := range all {
		list[i] = tokenInfo{ID: t.ID, Team: t.Team, Project: t.Project, CreatedAt: t.CreatedAt}
	}
	return list, err
}

func (a *localAdmin) RevokeToken(ctx context.Context, id cloche.TokenID) error {
	return a.auth.Revoke(ctx, id)
}

// listenAdmin opens the socket, which only root can connect to. The lock is
// held, so that one that is there belongs to no process.
func listenAdmin(dir dataDir) (net.Listener, error) {
	path := dir.path("admin.sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	old := syscall.Umask(0o177) // the socket's mode is right from its first moment
	l, err := net.Listen("unix", path)
	syscall.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	return l, nil
}

// adminEvent is one line of an answer on the socket: progress, then a result or
// an error.
type adminEvent struct {
	Progress *image.Step     `json:"progress,omitempty"`
	Result   json.RawMessage `json:"result,omitempty"`
	Error    *adminError     `json:"error,omitempty"`
}

type adminError struct {
	Code    cloche.Code `json:"code"`
	Message string      `json:"message"`
}

// adminRoutes serves an admin. Requests and answers are JSON; an answer is a
// sequence of adminEvents, one a line.
func adminRoutes(a admin) http.Handler {
	mux := http.NewServeMux()
	adminRoute(mux, "POST /token", func(ctx context.Context, r tokenRequest, _ func(image.Step)) (string, error) {
		return a.CreateToken(ctx, r)
	})
	adminRoute(mux, "POST /image", a.MakeImage)
	adminRoute(mux, "POST /image/remove", func(ctx context.Context, ref string, _ func(image.Step)) (struct{}, error) {
		return struct{}{}, a.RemoveImage(ctx, ref)
	})
	adminRoute(mux, "POST /tokens", func(ctx context.Context, _ struct{}, _ func(image.Step)) ([]tokenInfo, error) {
		return a.Tokens(ctx)
	})
	adminRoute(mux, "POST /token/revoke", func(ctx context.Context, id cloche.TokenID, _ func(image.Step)) (struct{}, error) {
		return struct{}{}, a.RevokeToken(ctx, id)
	})
	adminRoute(mux, "POST /images", func(ctx context.Context, _ struct{}, _ func(image.Step)) ([]cloche.Image, error) {
		return a.Images(ctx)
	})
	return mux
}

func adminRoute[Req, Res any](mux *http.ServeMux, pattern string, f func(context.Context, Req, func(image.Step)) (Res, error)) {
	mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		var req Req
		send := func(e adminEvent) {
			line, err := json.Marshal(e)
			if err == nil {
				_, err = w.Write(append(line, '\n'))
			}
			if err == nil {
				_ = http.NewResponseController(w).Flush() // a client that has gone is seen by its context
			}
		}
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			send(adminEvent{Error: &adminError{cloche.CodeInvalid, err.Error()}})
			return
		}
		res, err := f(r.Context(), req, func(p image.Step) { send(adminEvent{Progress: &p}) })
		if err != nil {
			send(adminEvent{Error: &adminError{cloche.ErrorCode(err), err.Error()}}) // root reads it: the cause is welcome
			return
		}
		body, err := json.Marshal(res)
		if err != nil {
			send(adminEvent{Error: &adminError{cloche.CodeInternal, err.Error()}})
			return
		}
		send(adminEvent{Result: body})
	})
}

// remoteAdmin asks the running server.
type remoteAdmin struct{ socket string }

// ask sends req to a route and decodes the result into res.
func (a *remoteAdmin) ask(ctx context.Context, path string, req, res any, progress func(image.Step)) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", a.socket)
	}
	c := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	hr, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://admin"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := c.Do(hr)
	if err != nil {
		return fmt.Errorf("the data directory is in use, but its server does not answer on admin.sock: %w", err)
	}
	defer resp.Body.Close() // read to its end below, or of no use
	dec := json.NewDecoder(resp.Body)
	for {
		var e adminEvent
		switch err := dec.Decode(&e); {
		case errors.Is(err, io.EOF):
			return errors.New("the server ended before it had answered")
		case err != nil:
			return err
		case e.Error != nil:
			return &cloche.Error{Code: e.Error.Code, Message: e.Error.Message}
		case e.Progress != nil:
			progress(*e.Progress)
		default:
			return json.Unmarshal(e.Result, res)
		}
	}
}

func (a *remoteAdmin) CreateToken(ctx context.Context, r tokenRequest) (secret string, err error) {
	err = a.ask(ctx, "/token", r, &secret, nil)
	return secret, err
}

func (a *remoteAdmin) MakeImage(ctx context.Context, r imageRequest, progress func(image.Step)) (img cloche.Image, err error) {
	err = a.ask(ctx, "/image", r, &img, progress)
	return img, err
}

func (a *remoteAdmin) Images(ctx context.Context) (list []cloche.Image, err error) {
	err = a.ask(ctx, "/images", struct{}{}, &list, nil)
	return list, err
}

func (a *remoteAdmin) RemoveImage(ctx context.Context, ref string) error {
	return a.ask(ctx, "/image/remove", ref, &struct{}{}, nil)
}

func (a *remoteAdmin) Tokens(ctx context.Context) (list []tokenInfo, err error) {
	err = a.ask(ctx, "/tokens", struct{}{}, &list, nil)
	return list, err
}

func (a *remoteAdmin) RevokeToken(ctx context.Context, id cloche.TokenID) error {
	return a.ask(ctx, "/token/revoke", id, &struct{}{}, nil)
}
