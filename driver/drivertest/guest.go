package drivertest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/guest"
)

// session is a channel to an agent, with as much of package guest as the suite
// needs: a driver is tested with what the node will use it for.
type session struct {
	conn net.Conn
	http *http.Transport
}

// open dials the machine and shakes hands with its agent.
func open(ctx context.Context, m driver.Machine) (*session, error) {
	c, err := m.Dial(ctx)
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.SetDeadline(deadline); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	nonce := rand.Text()
	h := guest.Hello{Nonce: nonce, Token: "token-of-" + string(m.ID()), Min: guest.MinVersion, Max: guest.MaxVersion}
	r := bufio.NewReader(c)
	err = guest.WriteHello(c, h)
	if err == nil {
		var w guest.Welcome
		if w, err = guest.ReadWelcome(r, nonce); err == nil && w.Error != nil {
			err = fmt.Errorf("agent: %s: %s", w.Error.Code, w.Error.Message)
		}
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	s := &session{conn: buffered{c, r}, http: &http.Transport{Protocols: new(http.Protocols)}}
	s.http.Protocols.SetUnencryptedHTTP2(true)
	s.http.DialContext = func(context.Context, string, string) (net.Conn, error) { return s.conn, nil }
	return s, nil
}

func (s *session) Close() error {
	s.http.CloseIdleConnections()
	return s.conn.Close()
}

// buffered is a connection of which r has read ahead.
type buffered struct {
	net.Conn
	r *bufio.Reader
}

func (b buffered) Read(p []byte) (int, error) { return b.r.Read(p) }

// post sends body and returns the answer of a request that succeeded.
func (s *session) post(ctx context.Context, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://agent"+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := s.http.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 != 2 {
		text, err := io.ReadAll(io.LimitReader(resp.Body, guest.MaxJSON))
		return nil, errors.Join(fmt.Errorf("%s: %s: %s", path, resp.Status, text), err, resp.Body.Close())
	}
	return resp, nil
}

// configure tells the agent about its machine, as a node does first.
func (s *session) configure(ctx context.Context, spec driver.Spec) error {
	return s.configureMemory(ctx, spec, int64(spec.MemoryMiB)<<20)
}

// configureMemory lets the agent guard memory of another size than there is.
func (s *session) configureMemory(ctx context.Context, spec driver.Spec, memory int64) error {
	body, err := json.Marshal(guest.Config{
		Hostname:    spec.Hostname,
		WorkDir:     "/root",
		Env:         map[string]string{"PATH": "/bin:/sbin:/usr/bin:/usr/sbin"},
		MemoryBytes: memory,
		PIDs:        1000,
	})
	if err != nil {
		return err
	}
	resp, err := s.post(ctx, "/v1/configure", bytes.NewReader(body))
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// run runs a shell script as root and returns what it wrote and how it ended.
func (s *session) run(ctx context.Context, script string) (string, cloche.Exit, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	bodyR, bodyW := io.Pipe()
	defer bodyW.Close()
	started := make(chan error, 1)
	go func() {
		started <- guest.WriteFrameJSON(bodyW, guest.FrameStart, guest.Start{Argv: []string{"/bin/sh", "-c", script}})
	}()
	resp, err := s.post(ctx, "/v1/commands/"+string(cloche.NewCommandID()), bodyR)
	if err != nil {
		return "", cloche.Exit{}, errors.Join(err, bodyR.Close(), <-started)
	}
	defer resp.Body.Close()
	if err := <-started; err != nil {
		return "", cloche.Exit{}, err
	}
	var out strings.Builder
	frames := guest.NewFrameReader(resp.Body)
	for {
		typ, payload, err := frames.Next()
		if err != nil {
			return out.String(), cloche.Exit{}, fmt.Errorf("command stream: %w", err)
		}
		switch typ {
		case guest.FrameStdout, guest.FrameStderr:
			out.Write(payload)
			// Fails once the agent has read all it wants: the stream is ending.
			_ = guest.WriteAck(bodyW, int64(out.Len()))
		case guest.FrameExit:
			var e cloche.Exit
			return out.String(), e, json.Unmarshal(payload, &e)
		case guest.FrameFailure:
			return out.String(), cloche.Exit{}, fmt.Errorf("command failed to start: %s", payload)
		}
	}
}
