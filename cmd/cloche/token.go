package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"github.com/dustin/go-humanize"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/cli"
)

type tokenCmd struct {
	Create tokenCreateCmd `cmd:"" help:"Make a token and print it. It is shown this once."`
	Ls     tokenLsCmd     `cmd:"" aliases:"list" help:"List the tokens, without their secrets."`
	Revoke tokenRevokeCmd `cmd:"" help:"End a token at once."`
}

type tokenLsCmd struct{ adminFlags }

// Run lists tokens.
func (c *tokenLsCmd) Run(ctx context.Context, env *cli.Env) error {
	return c.admin(ctx, env, func(a admin) error {
		list, err := a.Tokens(ctx)
		if err != nil {
			return err
		}
		if c.JSON {
			return printJSON(env.Stdout, list)
		}
		t := tabwriter.NewWriter(env.Stdout, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "ID\tTEAM\tPROJECT\tCREATED")
		for _, k := range list {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", k.ID, k.Team, k.Project, humanize.Time(k.CreatedAt))
		}
		return t.Flush() // carries the errors of the lines above
	})
}

type tokenRevokeCmd struct {
	adminFlags
	ID string `arg:"" help:"Id of the token: cloche token ls shows it."`
}

// Run revokes a token.
func (c *tokenRevokeCmd) Run(ctx context.Context, env *cli.Env) error {
	return c.admin(ctx, env, func(a admin) error { return a.RevokeToken(ctx, cloche.TokenID(c.ID)) })
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
