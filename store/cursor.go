package store

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"

	"github.com/cloche-dev/cloche"
)

// cursor is the place after the last row of a page: that row's sort key and id.
// Rows that come and go elsewhere in the list do not move it.
type cursor struct {
	List      string `json:"l"`           // which list, by which key
	Ascending bool   `json:"a,omitempty"` // in which direction
	Time      int64  `json:"t,omitempty"` // the key if it is a time
	Name      string `json:"n,omitempty"` // the key if it is a name
	ID        string `json:"i"`
}

// maxCursor is far above what encode gives for the longest name.
const maxCursor = 1024

// encode returns the opaque form that clients pass back.
func (c cursor) encode() (string, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("cursor: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(b), nil
}

// key is the value of the sort column.
func (c cursor) key() any {
	if c.Name != "" {
		return c.Name
	}
	return c.Time
}

// decodeCursor reads an opaque cursor and holds it to the list and direction
// that it is used for.
func decodeCursor(opaque, list string, ascending bool) (cursor, error) {
	bad := cloche.Errorf(cloche.CodeInvalid, "the cursor is not one that this list gave out; begin again without one")
	var c cursor
	if len(opaque) > maxCursor {
		return c, bad
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(opaque)
	if err != nil {
		return c, bad
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil || d.More() {
		return c, bad
	}
	if c.List != list || c.Ascending != ascending || c.ID == "" {
		return c, bad
	}
	if byName := list == string(cloche.SortName); byName != (c.Name != "") || byName && c.Time != 0 {
		return c, bad
	}
	return c, nil
}

// keyset is a page's part of a query: the condition that it begins after the
// cursor, the order, and one row more than the page has.
type keyset struct {
	where string // begins with " AND", or ""
	order string
	args  []any
	limit int
}

// newKeyset builds the keyset of list sorted by column, then by idColumn.
func newKeyset(p cloche.Page, list, column, idColumn string) (keyset, error) {
	k := keyset{limit: p.Limit}
	switch {
	case k.limit == 0:
		k.limit = cloche.DefaultPageSize
	case k.limit < 0 || k.limit > cloche.MaxPageSize:
		return k, cloche.Errorf(cloche.CodeInvalid, "the limit of a page is 1 to %d", cloche.MaxPageSize)
	}
	direction, after := "DESC", "<"
	if p.Ascending {
		direction, after = "ASC", ">"
	}
	if p.Cursor != "" {
		c, err := decodeCursor(p.Cursor, list, p.Ascending)
		if err != nil {
			return k, err
		}
		k.where = fmt.Sprintf(" AND (%s, %s) %s (?, ?)", column, idColumn, after)
		k.args = []any{c.key(), c.ID}
	}
	k.order = fmt.Sprintf(" ORDER BY %s %s, %s %s LIMIT %d", column, direction, idColumn, direction, k.limit+1)
	return k, nil
}

// page cuts the extra row off and makes the cursor of the next page from the
// last one that stays.
func page[T any](rows []T, k keyset, last func(T) cursor) ([]T, string, error) {
	if len(rows) <= k.limit {
		return rows, "", nil
	}
	rows = rows[:k.limit]
	next, err := last(rows[k.limit-1]).encode()
	return rows, next, err
}
