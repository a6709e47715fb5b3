package cloche

import "time"

// The team and project of a token that was made without naming any.
const (
	DefaultTeam    = "default"
	DefaultProject = "default"
)

// Principal is who makes a request. It is a parameter of every operation that
// touches a tenant's things; an operation sees nothing outside its project.
type Principal struct {
	Token   TokenID
	Team    string
	Project string
}

// Token is an API token as it is stored: its secret only as a hash.
type Token struct {
	ID        TokenID
	Team      string
	Project   string
	Hash      [32]byte // SHA-256 of the secret, which has 256 random bits
	CreatedAt time.Time
}
