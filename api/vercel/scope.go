package vercel

import (
	"net/http"
	"strings"

	"github.com/cloche-dev/cloche"
)

// maxToken bounds a bearer token before anything looks at it.
const maxToken = 8 << 10

// authorize finds out who asks. The client sends its team with every call and
// its project with some; where it does, they must be the token's.
func (c *call) authorize() error {
	token, err := bearer(c.r)
	if err != nil {
		return err
	}
	if c.who, err = c.Authenticator.Authenticate(c.r.Context(), token); err != nil {
		return err
	}
	query := c.r.URL.Query()
	for _, team := range query["teamId"] {
		if team != c.who.Team {
			return cloche.Errorf(cloche.CodeForbidden, "the token is not one of team %q", team)
		}
	}
	for _, key := range []string{"project", "projectId"} {
		for _, project := range query[key] {
			if err := c.checkProject(project); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkProject compares a project that a request names with the token's.
func (c *call) checkProject(project string) error {
	if project != c.who.Project {
		return cloche.Errorf(cloche.CodeForbidden, "the token is not one of project %q", project)
	}
	return nil
}

func bearer(r *http.Request) (string, error) {
	scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	switch {
	case !ok || !strings.EqualFold(scheme, "Bearer") || token == "":
		return "", cloche.Errorf(cloche.CodeUnauthorized, "a token is missing: send \"Authorization: Bearer …\"; \"cloche token create\" makes one")
	case len(token) > maxToken:
		return "", cloche.Errorf(cloche.CodeUnauthorized, "the token is not valid")
	}
	return token, nil
}
