package main

import (
	"context"
	"fmt"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/cli"
)

type tokenCmd struct {
	Create tokenCreateCmd `cmd:"" help:"Make a token and print it. It is shown this once."`
}

type tokenCreateCmd struct {
	Data    string `required:"" placeholder:"DIR" help:"Data directory of the server."`
	Team    string `help:"Team that the token belongs to (default: default)."`
	Project string `help:"Project whose sandboxes it reaches (default: default)."`
	JWT     bool   `name:"jwt" help:"Print the three-part form that VERCEL_OIDC_TOKEN needs."`
}

// Run prints one token.
func (c *tokenCreateCmd) Run(ctx context.Context, env *cli.Env) error {
	log, err := newLogger(env.Stderr, "text", "warn")
	if err != nil {
		return err
	}
	return withAdmin(ctx, c.Data, log, func(a admin) error {
		secret, err := a.CreateToken(ctx, tokenRequest{Team: or(c.Team, cloche.DefaultTeam), Project: or(c.Project, cloche.DefaultProject), JWT: c.JWT})
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(env.Stdout, secret)
		return err
	})
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

type versionCmd struct{}

// Run prints the version.
func (*versionCmd) Run(env *cli.Env) error {
	_, err := fmt.Fprintln(env.Stdout, "cloche", version)
	return err
}
