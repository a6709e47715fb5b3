package auth

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/cloche-dev/cloche"
)

// memory is a Tokens in memory.
type memory struct {
	mu   sync.Mutex
	all  []cloche.Token
	fail error
}

func (m *memory) PutToken(_ context.Context, t cloche.Token) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all = append(m.all, t)
	return m.fail
}

func (m *memory) TokenByHash(_ context.Context, hash [32]byte) (cloche.Token, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, t := range m.all {
		if t.Hash == hash {
			return t, m.fail
		}
	}
	return cloche.Token{}, cloche.Errorf(cloche.CodeNotFound, "none")
}

func (m *memory) Tokens(context.Context) ([]cloche.Token, error) { return m.all, nil }

func (m *memory) DeleteToken(_ context.Context, id cloche.TokenID) error {
	for i, t := range m.all {
		if t.ID == id {
			m.all = append(m.all[:i], m.all[i+1:]...)
			return nil
		}
	}
	return cloche.Errorf(cloche.CodeNotFound, "none")
}

func TestAuthenticateBothForms(t *testing.T) {
	a := New(&memory{})
	secret, tok, err := a.Create(t.Context(), "team_a", "")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(secret, "clo_") || len(secret) != 4+64 || !tok.ID.Valid() {
		t.Errorf("secret %q, id %q", secret, tok.ID)
	}
	jwt, err := a.JWT(tok.Team, tok.Project, secret)
	if err != nil {
		t.Fatal(err)
	}
	want := cloche.Principal{Token: tok.ID, Team: "team_a", Project: cloche.DefaultProject}
	for _, bearer := range []string{secret, jwt} {
		if p, err := a.Authenticate(t.Context(), bearer); err != nil || p != want {
			t.Errorf("Authenticate(%q) = %+v, %v", bearer, p, err)
		}
	}
	if err := a.Revoke(t.Context(), tok.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Authenticate(t.Context(), jwt); cloche.ErrorCode(err) != cloche.CodeUnauthorized {
		t.Errorf("a revoked token: %v", err)
	}
}

func TestStoredTokenHasNoSecret(t *testing.T) {
	m := &memory{}
	secret, _, err := New(m).Create(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(m.all)
	if err != nil || len(m.all) != 1 || strings.Contains(string(b), secret[4:]) {
		t.Errorf("stored: %s, %v", b, err)
	}
}

func TestBadTokensSayHowToMakeOne(t *testing.T) {
	a := New(&memory{})
	secret, _, err := a.Create(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	for _, bearer := range []string{
		"", "clo_", secret[:len(secret)-1], secret + "0", strings.ToUpper(secret), "Bearer " + secret,
		"a.b.", "..", "a." + secret + ".b", "a.b.c." + secret, strings.Repeat("x", maxBearer) + ".b." + secret, "\xff\x00",
	} {
		p, err := a.Authenticate(t.Context(), bearer)
		if cloche.ErrorCode(err) != cloche.CodeUnauthorized || p != (cloche.Principal{}) {
			t.Errorf("Authenticate(%.20q) = %+v, %v", bearer, p, err)
		} else if !strings.Contains(err.Error(), "cloche token create") {
			t.Errorf("Authenticate(%.20q): %v does not say what to do", bearer, err)
		}
	}
}

func TestStoreFaultIsNotUnauthorized(t *testing.T) {
	m := &memory{}
	a := New(m)
	secret, _, err := a.Create(t.Context(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	m.fail = cloche.Errorf(cloche.CodeUnavailable, "locked")
	if _, err := a.Authenticate(t.Context(), secret); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("Authenticate: %v", err)
	}
}

func TestJWTIsWhatClientsDecode(t *testing.T) {
	a := New(&memory{})
	for _, id := range []string{"default", "team_Az09.-_", strings.Repeat("z", 64)} {
		jwt, err := a.JWT(id, id, "clo_00")
		if err != nil {
			t.Fatal(err)
		}
		parts := strings.Split(jwt, ".")
		if len(parts) != 3 || parts[2] != "clo_00" {
			t.Fatalf("JWT %q has not the three parts", jwt)
		}
		if strings.ContainsAny(parts[0]+parts[1], "-_=") {
			t.Errorf("JWT %q: atob cannot decode it", jwt)
		}
		header, err := base64.RawStdEncoding.DecodeString(parts[0])
		if err != nil || string(header) != jwtHeader {
			t.Errorf("header %q, %v", header, err)
		}
		body, err := base64.RawURLEncoding.DecodeString(parts[1])
		if err != nil {
			t.Fatal(err)
		}
		var c map[string]any
		if err := json.Unmarshal(body, &c); err != nil {
			t.Fatal(err)
		}
		if c["owner_id"] != id || c["project_id"] != id || c["iat"] == nil || len(c) != 3 {
			t.Errorf("claims %v", c)
		}
	}
}

func TestTeamAndProjectForm(t *testing.T) {
	a := New(&memory{})
	for _, id := range []string{"a b", "a/b", "../x", "-a", "é", "a\x00", "a\n", strings.Repeat("a", 65)} {
		if _, _, err := a.Create(t.Context(), id, ""); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("team %q: %v", id, err)
		}
		if _, _, err := a.Create(t.Context(), "", id); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("project %q: %v", id, err)
		}
	}
}

func FuzzAuthenticate(f *testing.F) {
	a := New(&memory{})
	secret, tok, err := a.Create(f.Context(), "", "")
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{"", "..", "a.b.c", "clo_00", "\xff.\x00.", strings.Repeat(".", 99)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, bearer string) {
		if strings.HasSuffix(bearer, secret) {
			t.Skip("it is the token")
		}
		p, err := a.Authenticate(t.Context(), bearer)
		if cloche.ErrorCode(err) != cloche.CodeUnauthorized || p.Token == tok.ID {
			t.Errorf("Authenticate(%q) = %+v, %v", bearer, p, err)
		}
	})
}
