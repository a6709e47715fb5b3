// Package client talks to a Cloche server over HTTP: the Vercel Sandbox API and
// the few extras of ours on it. It shapes requests, rebuilds typed errors and
// streams; it keeps no state but its connections and reads no environment
// unless FromEnv is asked to. Every error that the server sent is a
// *cloche.Error with the server's code and message.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche"
)

// Names of the environment variables that FromEnv reads.
const (
	EnvURL   = "CLOCHE_URL"
	EnvToken = "CLOCHE_TOKEN"
)

const (
	// maxErrorBody bounds what is read of an error answer.
	maxErrorBody = 64 << 10
	// maxAnswer bounds a JSON answer; 100 records of a list, each with a full
	// environment's worth of tags and arguments, stay far below it.
	maxAnswer = 64 << 20
	// attempts is how often a request that is safe to repeat is made.
	attempts = 3
	// maxRetryAfter is the longest wait that a server may ask for.
	maxRetryAfter = 20 * time.Second
)

// Client calls one server as the bearer of one token. It is safe for
// concurrent use. Its methods return once ctx ends.
type Client struct {
	base  string // scheme://host/api, without a slash at the end
	token string
	http  *http.Client
}

// New returns a Client of the server at rawURL, such as
// "http://127.0.0.1:4180". An unusable address or token is CodeInvalid. It
// makes no request.
func New(rawURL, token string) (*Client, error) {
	u, err := url.Parse(rawURL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, cloche.Errorf(cloche.CodeInvalid, "the server address %q is not of the form http://HOST:PORT", rawURL)
	}
	if strings.ContainsAny(token, " \r\n\t") {
		return nil, cloche.Errorf(cloche.CodeInvalid, "the token has white space in it")
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DisableCompression = true // contents are streamed as they are
	transport.MaxIdleConnsPerHost = 32
	transport.WriteBufferSize, transport.ReadBufferSize = blockSize, blockSize
	return &Client{
		base:  strings.TrimSuffix(strings.TrimRight(u.Scheme+"://"+u.Host+u.Path, "/"), "/api") + "/api",
		token: token,
		http:  &http.Client{Transport: transport},
	}, nil
}

// FromEnv returns the Client that CLOCHE_URL and CLOCHE_TOKEN describe. getenv
// is os.Getenv or the like. A missing variable is CodeInvalid, and the message
// says how to get its value.
func FromEnv(getenv func(string) string) (*Client, error) {
	address, token := getenv(EnvURL), getenv(EnvToken)
	if address == "" {
		return nil, cloche.Errorf(cloche.CodeInvalid, "%s is not set; set it to the address that `cloche serve` printed, such as http://127.0.0.1:4180", EnvURL)
	}
	if token == "" {
		return nil, cloche.Errorf(cloche.CodeInvalid, "%s is not set; set it to what `cloche token create --data DIR` printed", EnvToken)
	}
	return New(address, token)
}

// Close closes idle connections. The Client may still be used.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// call is one request.
type call struct {
	method string
	path   string // below /api, with escaped segments
	query  url.Values
	body   any // marshalled; nil = none
	// repeat says that the request may be made again although an earlier
	// attempt may have had its effect.
	repeat bool
}

// do makes the call and decodes the JSON answer into out, unless that is nil.
func (c *Client) do(ctx context.Context, r call, out any) error {
	var body []byte
	if r.body != nil {
		var err error
		if body, err = json.Marshal(r.body); err != nil {
			return fmt.Errorf("request body: %w", err)
		}
	}
	for attempt := 1; ; attempt++ {
		wait, err := c.once(ctx, r, body, out)
		if err == nil || wait < 0 || attempt == attempts || ctx.Err() != nil {
			return err
		}
		// 200 to 400 ms before the second attempt, twice that before the third.
		wait += time.Duration(200+rand.IntN(200)) * time.Millisecond << (attempt - 1)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}

// once makes one attempt. wait is how long the server asked to wait before the
// next one, and negative if there must be none.
func (c *Client) once(ctx context.Context, r call, body []byte, out any) (wait time.Duration, err error) {
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(body)
	}
	req, err := c.request(ctx, r, reader)
	if err != nil {
		return -1, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if !r.repeat || errors.Is(err, syscall.ECONNREFUSED) {
			return -1, c.unreachable(ctx, err)
		}
		return 0, c.unreachable(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return retryAfter(resp, r.repeat), responseError(resp)
	}
	if out == nil {
		_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswer))
		return -1, err
	}
	// A slow answer begins with white space that keeps the connection alive.
	err = json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(out)
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case err == nil:
		return -1, nil
	case errors.As(err, &syntax), errors.As(err, &kind):
		return -1, fmt.Errorf("answer to %s %s: %w", r.method, r.path, err)
	case r.repeat:
		return 0, c.unreachable(ctx, err)
	}
	return -1, c.unreachable(ctx, err)
}

// request builds a request with the headers that every call has.
func (c *Client) request(ctx context.Context, r call, body io.Reader) (*http.Request, error) {
	target := c.base + r.path
	if len(r.query) > 0 {
		target += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, target, body)
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", r.path, err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "cloche-client/1")
	return req, nil
}

// stream makes one attempt and returns the open response, which the caller
// closes. A status other than 2xx is an error.
func (c *Client) stream(req *http.Request) (*http.Response, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(req.Context(), err)
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		return nil, responseError(resp)
	}
	return resp, nil
}

// unreachable turns a transport error into one that says what to look at.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	server := strings.TrimSuffix(c.base, "/api")
	message := "the connection to the server at " + server + " broke"
	var dial *net.OpError
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		message = "nothing listens at " + server + "; start `cloche serve` there, or correct " + EnvURL
	case errors.As(err, &dial) && dial.Op == "dial":
		message = "the server at " + server + " cannot be reached; check " + EnvURL
	}
	return &cloche.Error{Code: cloche.CodeUnavailable, Message: message, Err: err}
}

// retryAfter says how long to wait before the next attempt after an error
// answer, negative for never. Nothing was done under 429, so that repeats any
// call; the others only those that are safe to repeat.
func retryAfter(resp *http.Response, repeat bool) time.Duration {
	switch resp.StatusCode {
	case http.StatusTooManyRequests:
		seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		wait := time.Duration(seconds) * time.Second
		if err != nil || wait < 0 || wait > maxRetryAfter {
			return -1
		}
		return wait
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		if repeat {
			return 0
		}
	}
	return -1
}

// errorBody is the one form of an error on the wire.
type errorBody struct {
	Error struct {
		Code    cloche.Code `json:"code"`
		Message string      `json:"message"`
	} `json:"error"`
}

// responseError rebuilds the error that an answer other than 2xx carries. A
// body that is not ours gets the code that its status suggests.
func responseError(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	var e errorBody
	mediaType, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if mediaType != "application/json" || json.Unmarshal(body, &e) != nil || e.Error.Message == "" {
		e.Error.Code = statusCode(resp.StatusCode)
		e.Error.Message = fmt.Sprintf("the server answered %s to %s", resp.Status, resp.Request.URL.Path)
	}
	if e.Error.Code == "" {
		e.Error.Code = statusCode(resp.StatusCode)
	}
	if id := resp.Header.Get("X-Request-Id"); id != "" && resp.StatusCode >= 500 {
		e.Error.Message += " (request " + id + ")"
	}
	return &cloche.Error{Code: e.Error.Code, Message: e.Error.Message}
}

func statusCode(status int) cloche.Code {
	switch status {
	case http.StatusUnauthorized:
		return cloche.CodeUnauthorized
	case http.StatusForbidden:
		return cloche.CodeForbidden
	case http.StatusNotFound:
		return cloche.CodeNotFound
	case http.StatusConflict:
		return cloche.CodeConflict
	case http.StatusGone:
		return cloche.CodeGone
	case http.StatusRequestEntityTooLarge:
		return cloche.CodeTooLarge
	case http.StatusTooManyRequests:
		return cloche.CodeExhausted
	case http.StatusNotImplemented:
		return cloche.CodeNotImplemented
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return cloche.CodeUnavailable
	}
	if status/100 == 4 {
		return cloche.CodeInvalid
	}
	return cloche.CodeInternal
}

func jsonReader(v any) (io.Reader, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("request body: %w", err)
	}
	return bytes.NewReader(b), nil
}
