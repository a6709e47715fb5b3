package vercel

import (
	"os"
	"strings"
	"testing"
)

// TestDocumentNamesEveryRoute: a route that is not in docs/api.md does not exist
// for anybody but its author.
func TestDocumentNamesEveryRoute(t *testing.T) {
	doc, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, rt := range routes() {
		if !strings.Contains(string(doc), "`"+rt.name()+"`") {
			t.Errorf("docs/api.md has no `%s`", rt.name())
		}
	}
	for code := range statuses {
		if !strings.Contains(string(doc), "`"+string(code)+"`") {
			t.Errorf("docs/api.md has no code `%s`", code)
		}
	}
}
