package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cloche-dev/cloche"
)

// TestPagesShowEachRowOnceInOrder pages through random lists while rows are
// added, and compares with a sort in memory.
func TestPagesShowEachRowOnceInOrder(t *testing.T) {
	s := fresh(t)
	check := 0
	rapid.Check(t, func(t *rapid.T) {
		check++
		project := fmt.Sprintf("p%d", check)
		var model []cloche.SandboxView
		add := func(i int) {
			b, first := sample(project, rapid.SampledFrom([]string{"a", "ab", "b", "B", "a."}).Draw(t, "prefix")+fmt.Sprint(i))
			b.CreatedAt = time.Unix(int64(rapid.IntRange(0, 4).Draw(t, "created")), 1).UTC()
			first.RequestedAt = time.Unix(int64(rapid.IntRange(1, 4).Draw(t, "state at")), 1).UTC()
			b.Tags = map[string]string{"k": rapid.SampledFrom([]string{"x", "y"}).Draw(t, "tag")}
			if err := s.CreateSandbox(context.Background(), b, first); err != nil {
				t.Fatal(err)
			}
			b.Env = nil
			model = append(model, cloche.SandboxView{Sandbox: b, Session: first})
		}
		n := rapid.IntRange(0, 12).Draw(t, "rows")
		for i := range n {
			add(i)
		}
		l := cloche.ListSandboxes{
			Page: cloche.Page{Limit: rapid.IntRange(1, 5).Draw(t, "limit"), Ascending: rapid.Bool().Draw(t, "ascending")},
			Sort: rapid.SampledFrom([]cloche.SortField{"", cloche.SortCreatedAt, cloche.SortName, cloche.SortStatusUpdatedAt}).Draw(t, "sort"),
		}
		if rapid.Bool().Draw(t, "by prefix") {
			l.NamePrefix = rapid.SampledFrom([]string{"a", "ab", "B", "zz", "%", "a\x7f"}).Draw(t, "name prefix")
		}
		if rapid.Bool().Draw(t, "by tag") {
			l.TagKey, l.TagValue = "k", "x"
		}
		want := sorted(model, l)
		var got []string
		for pages := 0; ; pages++ {
			views, next, err := s.Sandboxes(context.Background(), "team", project, l)
			if err != nil {
				t.Fatal(err)
			}
			if len(views) > l.Limit || next != "" && len(views) < l.Limit || pages > 40 {
				t.Fatalf("page %d has %d rows of %d, next %q", pages, len(views), l.Limit, next)
			}
			for _, v := range views {
				got = append(got, v.Sandbox.Name)
			}
			if next == "" {
				break
			}
			l.Cursor = next
			if rapid.Bool().Draw(t, "insert") {
				add(n)
				n++
			}
		}
		// Rows added meanwhile may show; the others must, each once, in order.
		all := sorted(model, l)
		if !slices.IsSortedFunc(got, func(a, b string) int { return cmp.Compare(slices.Index(all, a), slices.Index(all, b)) }) {
			t.Fatalf("got %v, which is not in the order of %v", got, all)
		}
		shown := slices.DeleteFunc(slices.Clone(got), func(name string) bool { return !slices.Contains(want, name) })
		if !slices.Equal(shown, want) {
			t.Fatalf("got %v, want %v", shown, want)
		}
	})
}

// sorted gives the names that a list selects, in its order.
func sorted(model []cloche.SandboxView, l cloche.ListSandboxes) []string {
	rows := slices.Clone(model)
	slices.SortFunc(rows, func(a, b cloche.SandboxView) int {
		var c int
		switch l.Sort {
		case cloche.SortName:
			c = strings.Compare(a.Sandbox.Name, b.Sandbox.Name)
		case cloche.SortStatusUpdatedAt:
			c = a.Session.StateAt().Compare(b.Session.StateAt())
		default:
			c = a.Sandbox.CreatedAt.Compare(b.Sandbox.CreatedAt)
		}
		c = cmp.Or(c, strings.Compare(string(a.Sandbox.ID), string(b.Sandbox.ID)))
		if !l.Ascending {
			c = -c
		}
		return c
	})
	names := []string{}
	for _, v := range rows {
		if strings.HasPrefix(v.Sandbox.Name, l.NamePrefix) && (l.TagKey == "" || v.Sandbox.Tags[l.TagKey] == l.TagValue) {
			names = append(names, v.Sandbox.Name)
		}
	}
	return names
}

func TestSessionPages(t *testing.T) {
	s := fresh(t)
	b, prev := create(t, s, "p", "box")
	create(t, s, "p", "other")
	ids := []cloche.SessionID{prev.ID}
	for range 4 {
		become(t, s, prev.ID, cloche.Failed)
		_, next := sample("p", "box")
		next.ID, next.SandboxID, next.RequestedAt = cloche.NewSessionID(), b.ID, prev.RequestedAt.Add(time.Second)
		if err := s.AddSession(t.Context(), next, prev.ID); err != nil {
			t.Fatal(err)
		}
		ids, prev = append(ids, next.ID), next
	}
	for _, ascending := range []bool{true, false} {
		l := cloche.ListSessions{Sandbox: "box", Page: cloche.Page{Limit: 2, Ascending: ascending}}
		var got []cloche.SessionID
		for {
			page, next, err := s.Sessions(t.Context(), "team", "p", l)
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range page {
				got = append(got, v.ID)
			}
			if l.Cursor = next; next == "" {
				break
			}
		}
		want := slices.Clone(ids)
		if !ascending {
			slices.Reverse(want)
		}
		if !slices.Equal(got, want) {
			t.Errorf("ascending %v: %v, want %v", ascending, got, want)
		}
	}
}

func TestBadPagesAreRefused(t *testing.T) {
	s := fresh(t)
	for i := range 3 {
		create(t, s, "p", fmt.Sprint("box", i))
	}
	_, byName, err := s.Sandboxes(t.Context(), "team", "p", cloche.ListSandboxes{Sort: cloche.SortName, Page: cloche.Page{Limit: 1}})
	if err != nil || byName == "" {
		t.Fatalf("cursor %q, %v", byName, err)
	}
	for name, l := range map[string]cloche.ListSandboxes{
		"of another sort":    {Page: cloche.Page{Cursor: byName}},
		"of another order":   {Sort: cloche.SortName, Page: cloche.Page{Cursor: byName, Ascending: true}},
		"garbage":            {Page: cloche.Page{Cursor: "garbage"}},
		"padded":             {Sort: cloche.SortName, Page: cloche.Page{Cursor: byName + "="}},
		"long":               {Page: cloche.Page{Cursor: strings.Repeat("A", 1<<20)}},
		"a negative limit":   {Page: cloche.Page{Limit: -1}},
		"too high a limit":   {Page: cloche.Page{Limit: cloche.MaxPageSize + 1}},
		"an unknown sorting": {Sort: "color"},
	} {
		if _, _, err := s.Sandboxes(t.Context(), "team", "p", l); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := s.Sessions(t.Context(), "team", "p", cloche.ListSessions{Page: cloche.Page{Cursor: byName}}); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("a cursor of another list: %v", err)
	}
}

func FuzzDecodeCursor(f *testing.F) {
	for _, c := range []cursor{
		{List: listSessions, Time: 5, ID: "x"}, {List: "name", Name: "n", ID: "y", Ascending: true}, {List: "createdAt", ID: "z"},
	} {
		text, err := c.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text, c.List, c.Ascending)
	}
	f.Add("e30", "name", false)
	f.Add("\xff", "", true)
	f.Fuzz(func(t *testing.T, text, list string, ascending bool) {
		c, err := decodeCursor(text, list, ascending)
		if err != nil {
			if cloche.ErrorCode(err) != cloche.CodeInvalid {
				t.Errorf("error %v", err)
			}
			return
		}
		again, err := c.encode()
		if err != nil {
			t.Fatal(err)
		}
		if d, err := decodeCursor(again, list, ascending); err != nil || d != c {
			t.Errorf("%+v became %+v, %v", c, d, err)
		}
	})
}
