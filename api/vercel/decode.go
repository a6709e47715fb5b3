package vercel

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/cloche-dev/cloche"
)

// Bounds on what is read. A command's is above the kernel's own bound on
// arguments, so that the kernel is the one to refuse them.
const (
	maxBody        = 1 << 20
	maxCommandBody = 4 << 20
	bodyTimeout    = 30 * time.Second // for the whole of a JSON body
	idleTimeout    = 60 * time.Second // between two pieces of a stream
)

// decode reads a JSON body into v. An empty one is an empty object: clients
// send POSTs without a body, with a JSON content type.
func (c *call) decode(v any, limit int64) error {
	rc := http.NewResponseController(c.w)
	// A writer that knows no deadlines is one of a test.
	_ = rc.SetReadDeadline(time.Now().Add(bodyTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, limit))
	_ = rc.SetReadDeadline(time.Time{})
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return cloche.Errorf(cloche.CodeTooLarge, "the request body is over %d bytes", limit)
	case err != nil:
		return cloche.Errorf(cloche.CodeInvalid, "the request body broke off")
	}
	return unmarshal(body, v)
}

// unmarshal parses JSON with errors that name the field.
func unmarshal(body []byte, v any) error {
	if !utf8.Valid(body) {
		return cloche.Errorf(cloche.CodeInvalid, "the request body is not valid UTF-8")
	}
	body = bytes.TrimSpace(body)
	if len(body) == 0 {
		return nil
	}
	if body[0] != '{' {
		return cloche.Errorf(cloche.CodeInvalid, "the request body is not a JSON object")
	}
	err := json.Unmarshal(body, v)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		return cloche.Errorf(cloche.CodeInvalid, "the field %q is a %s, which is not what it must be: %s", wrong.Field, wrong.Value, jsonName(wrong))
	case err != nil:
		return cloche.Errorf(cloche.CodeInvalid, "the request body is not valid JSON: %v", err)
	}
	return nil
}

func jsonName(e *json.UnmarshalTypeError) string {
	switch kind := e.Type.Kind().String(); {
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		return "a whole number"
	case strings.HasPrefix(kind, "float"):
		return "a number"
	case kind == "bool":
		return "a boolean"
	case kind == "slice":
		return "an array"
	case kind == "string":
		return "a string"
	default:
		return "an object"
	}
}

// given reports whether an optional field of any type says anything: it is
// there, and not null, false, or empty.
func given(raw json.RawMessage) bool {
	switch string(bytes.Join(bytes.Fields(raw), nil)) {
	case "", "null", "{}", "[]", `""`, "false":
		return false
	}
	return true
}

// stringMap is a map whose values must be strings; null is none.
type stringMap map[string]*string

func (m stringMap) check(field string) (map[string]string, error) {
	if m == nil {
		return nil, nil
	}
	out := make(map[string]string, len(m))
	for k, v := range m {
		if v == nil {
			return nil, cloche.Errorf(cloche.CodeInvalid, "the field %q holds a null; its values must be strings", field)
		}
		out[k] = *v
	}
	return out, nil
}

// millis turns milliseconds of the wire into a duration. Fractions are rounded
// up, so that no timeout becomes none.
func millis(ms float64) (time.Duration, error) {
	if math.IsNaN(ms) || ms < 0 || ms > float64(math.MaxInt64/int64(time.Millisecond)) {
		return 0, cloche.Errorf(cloche.CodeTimeoutInvalid, "%v ms is not a possible timeout", ms)
	}
	return time.Duration(math.Ceil(ms)) * time.Millisecond, nil
}

// page reads the parameters that every list has.
func page(q url.Values) (cloche.Page, error) {
	p := cloche.Page{Cursor: q.Get("cursor")}
	if s := q.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return p, cloche.Errorf(cloche.CodeInvalid, "limit %q is not a whole number from 1 to %d", clip(s), cloche.MaxPageSize)
		}
		p.Limit = min(n, cloche.MaxPageSize)
	}
	switch s := q.Get("sortOrder"); s {
	case "", "desc":
	case "asc":
		p.Ascending = true
	default:
		return p, cloche.Errorf(cloche.CodeInvalid, "sortOrder %q is neither asc nor desc", clip(s))
	}
	return p, nil
}

// boolean reads a boolean parameter; absent is false.
func boolean(q url.Values, key string) (bool, error) {
	switch s := q.Get(key); s {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	default:
		return false, cloche.Errorf(cloche.CodeInvalid, "%s=%s is neither true nor false", key, clip(s))
	}
}

// clip makes a caller's text fit for a message.
func clip(s string) string {
	s = strings.ToValidUTF8(s, "\ufffd")
	if len(s) > 64 {
		s = fmt.Sprintf("%.60s…", s)
	}
	return s
}

// session returns the id of the session in the path. One that has not the form
// of an id is one that does not exist.
func (c *call) session() (cloche.SessionID, error) {
	id := cloche.SessionID(c.r.PathValue("sid"))
	if !id.Valid() {
		return "", cloche.Errorf(cloche.CodeNotFound, "there is no session %q", clip(string(id)))
	}
	return id, nil
}

// command returns both ids of a command's path.
func (c *call) command() (cloche.SessionID, cloche.CommandID, error) {
	sid, err := c.session()
	if err != nil {
		return "", "", err
	}
	id := cloche.CommandID(c.r.PathValue("cid"))
	if !id.Valid() {
		return "", "", cloche.Errorf(cloche.CodeNotFound, "there is no command %q", clip(string(id)))
	}
	return sid, id, nil
}

// name returns the sandbox name in the path, which may be any string.
func (c *call) name() (string, error) {
	name := c.r.PathValue("name")
	if cloche.CheckName(name) != nil {
		return "", cloche.Errorf(cloche.CodeNotFound, "there is no sandbox %q", clip(name))
	}
	return name, nil
}
