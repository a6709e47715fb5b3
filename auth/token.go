// Package auth makes and checks API tokens, and holds the key that seals stored
// secrets. It says who somebody is (a cloche.Principal); what they may do is
// decided where the things are.
package auth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
)

// Tokens remembers tokens durably.
type Tokens interface {
	PutToken(ctx context.Context, t cloche.Token) error
	// TokenByHash returns CodeNotFound if no token has that hash.
	TokenByHash(ctx context.Context, hash [32]byte) (cloche.Token, error)
	Tokens(ctx context.Context) ([]cloche.Token, error)
	DeleteToken(ctx context.Context, id cloche.TokenID) error
}

// secretPrefix tells people and secret scanners what they are looking at.
const secretPrefix = "clo_"

const (
	secretBytes = 32
	maxBearer   = 4096 // a JWT form with the longest team and project is far below
)

// Auth makes and checks tokens. It is safe for concurrent use.
type Auth struct{ tokens Tokens }

// New returns an Auth on tokens.
func New(tokens Tokens) *Auth { return &Auth{tokens: tokens} }

// idForm keeps ids fit for URLs and for a base64 without '-' and '_' (see JWT).
var idForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// CheckID returns an *Error of CodeInvalid unless id may name a team or a
// project. what is the word for it in the message.
func CheckID(what, id string) error {
	if !idForm.MatchString(id) {
		return cloche.Errorf(cloche.CodeInvalid,
			"a %s has 1 to 64 letters, digits, '.', '_' and '-', and begins with a letter or digit", what)
	}
	return nil
}

// Create makes a token for a project; "" means the default team or project. The
// secret exists only in the answer.
func (a *Auth) Create(ctx context.Context, team, project string) (secret string, t cloche.Token, err error) {
	if team == "" {
		team = cloche.DefaultTeam
	}
	if project == "" {
		project = cloche.DefaultProject
	}
	if err := CheckID("team", team); err != nil {
		return "", t, err
	}
	if err := CheckID("project", project); err != nil {
		return "", t, err
	}
	random := make([]byte, secretBytes)
	if _, err := rand.Read(random); err != nil {
		return "", t, cloche.Internal("token secret", err)
	}
	secret = secretPrefix + hex.EncodeToString(random)
	t = cloche.Token{
		ID:        cloche.NewTokenID(),
		Team:      team,
		Project:   project,
		Hash:      sha256.Sum256([]byte(secret)),
		CreatedAt: time.Now(),
	}
	if err := a.tokens.PutToken(ctx, t); err != nil {
		return "", cloche.Token{}, err
	}
	return secret, t, nil
}

// List returns all tokens, oldest first.
func (a *Auth) List(ctx context.Context) ([]cloche.Token, error) { return a.tokens.Tokens(ctx) }

// Revoke ends a token at once. None is CodeNotFound.
func (a *Auth) Revoke(ctx context.Context, id cloche.TokenID) error {
	return a.tokens.DeleteToken(ctx, id)
}

// jwtHeader is what the sandbox command looks at: a non-empty alg, and JWT as
// the type if there is one. It decodes it with atob, which knows neither '-' nor
// '_'; neither can occur in the base64 of this text, nor in that of claims whose
// ids have idForm. (@vercel/sandbox 3.5.0, sandbox 4.5.0)
const jwtHeader = `{"alg":"none","typ":"JWT"}`

// claims are for the client, which takes its team and project from them. There
// is no exp: with one, the client would try to refresh the token elsewhere.
type claims struct {
	Owner    string `json:"owner_id"`
	Project  string `json:"project_id"`
	IssuedAt int64  `json:"iat"` // seconds since 1970
}

// JWT returns the three-part form of a token, for VERCEL_OIDC_TOKEN. The third
// part is the secret, and the only part that Authenticate believes.
func (a *Auth) JWT(team, project, secret string) (string, error) {
	body, err := json.Marshal(claims{Owner: team, Project: project, IssuedAt: time.Now().Unix()})
	if err != nil {
		return "", fmt.Errorf("token claims: %w", err)
	}
	enc := base64.RawURLEncoding
	return enc.EncodeToString([]byte(jwtHeader)) + "." + enc.EncodeToString(body) + "." + secret, nil
}

// Authenticate says who bears a token of either form. No token and a bad one
// are CodeUnauthorized. It does the same work for every token of one length.
func (a *Auth) Authenticate(ctx context.Context, bearer string) (cloche.Principal, error) {
	if bearer == "" {
		return cloche.Principal{}, unauthorized("there is no token")
	}
	hash := sha256.Sum256([]byte(bearerSecret(bearer)))
	t, err := a.tokens.TokenByHash(ctx, hash)
	switch {
	case cloche.ErrorCode(err) == cloche.CodeNotFound:
		return cloche.Principal{}, unauthorized("the token is not valid")
	case err != nil:
		return cloche.Principal{}, err
	case subtle.ConstantTimeCompare(hash[:], t.Hash[:]) != 1:
		return cloche.Principal{}, unauthorized("the token is not valid")
	}
	return cloche.Principal{Token: t.ID, Team: t.Team, Project: t.Project}, nil
}

// bearerSecret finds the secret in either form. What has neither form hashes to
// something that no token has.
func bearerSecret(bearer string) string {
	if len(bearer) > maxBearer {
		return ""
	}
	if parts := strings.Split(bearer, "."); len(parts) == 3 {
		return parts[2]
	}
	return bearer
}

func unauthorized(what string) error {
	return cloche.Errorf(cloche.CodeUnauthorized,
		"%s; make one on the server with `cloche token create` and send it as `Authorization: Bearer clo_...`", what)
}
