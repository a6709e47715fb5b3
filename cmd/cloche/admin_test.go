package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/cli"
	"github.com/cloche-dev/cloche/internal/testenv"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// openTestBase takes the lock of a fresh data directory.
func openTestBase(t *testing.T) *base {
	t.Helper()
	dir, err := openDataDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	b, err := openBase(t.Context(), dir, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// answerAdmin answers on the admin socket until the test ends.
func answerAdmin(t *testing.T, b *base, h http.Handler) {
	t.Helper()
	l, err := listenAdmin(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(srv.Close(), ignoreServerClosed(<-done)); err != nil {
			t.Error(err)
		}
	})
}

func ignoreServerClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// printed runs a command of this package and returns what it prints.
func printed(run func(context.Context, *cli.Env) error) (stdout, stderr string, err error) {
	var out, log bytes.Buffer
	err = run(context.Background(), &cli.Env{Stdout: &out, Stderr: &log})
	return out.String(), log.String(), err
}

// TestAdminWithoutServer: the commands do it themselves, and what they did is
// there for the server.
func TestAdminWithoutServer(t *testing.T) {
	data := t.TempDir()
	secret, _, err := printed((&tokenCreateCmd{Data: data, Team: "t", Project: "p"}).Run)
	if err != nil {
		t.Fatal(err)
	}
	stdout, stderr, err := printed((&imageLsCmd{adminFlags{Data: data}}).Run)
	if stdout != "" || !strings.Contains(stderr, "no images; make the default one with: cloche image build universal --data "+data) || err != nil {
		t.Errorf("%q, %q, %v", stdout, stderr, err)
	}
	dir, err := openDataDir(data)
	if err != nil {
		t.Fatal(err)
	}
	b, err := openBase(t.Context(), dir, quiet())
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	if p, err := b.auth.Authenticate(t.Context(), strings.TrimSpace(secret)); p.Team != "t" || p.Project != "p" || err != nil {
		t.Errorf("%+v, %v", p, err)
	}
}

// withImage is an admin that has one image.
type withImage struct {
	admin
	img cloche.Image
}

func (w withImage) Images(context.Context) ([]cloche.Image, error) {
	return []cloche.Image{w.img}, nil
}

// TestAdminWithServer: while a server has the lock it does it for them, with
// the same answers and the same errors.
func TestAdminWithServer(t *testing.T) {
	b := openTestBase(t)
	img := cloche.Image{ID: cloche.NewImageID(), Name: "universal", Digest: "sha256:0123456789abcdef", SizeBytes: 3 << 20, Files: 7, CreatedAt: time.Now()}
	answerAdmin(t, b, adminRoutes(withImage{&localAdmin{b}, img}))
	data := string(b.dir)
	for _, jwt := range []bool{false, true} {
		secret, _, err := printed((&tokenCreateCmd{Data: data, Team: "t", Project: "p", JWT: jwt}).Run)
		if err != nil || strings.Count(secret, "\n") != 1 || strings.HasPrefix(secret, "clo_") == jwt {
			t.Fatalf("%q, %v", secret, err)
		}
		if p, err := b.auth.Authenticate(t.Context(), strings.TrimSpace(secret)); p.Team != "t" || p.Project != "p" || err != nil {
			t.Errorf("%+v, %v", p, err)
		}
	}
	err := withAdmin(t.Context(), data, quiet(), func(a admin) error {
		if _, ok := a.(*remoteAdmin); !ok {
			t.Errorf("%T beside a server", a)
		}
		_, err := a.MakeImage(t.Context(), imageRequest{Build: "nonsense"}, nil)
		return err
	})
	if cloche.ErrorCode(err) != cloche.CodeNotFound || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("an unknown recipe: %v", err)
	}
	stdout, _, err := printed((&imageLsCmd{adminFlags{Data: data}}).Run)
	if !strings.Contains(stdout, "universal") || !strings.Contains(stdout, "3.0 MiB") || err != nil {
		t.Errorf("%q, %v", stdout, err)
	}
	if info, err := os.Stat(b.dir.path("admin.sock")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v", info.Mode(), err)
	}
}

// TestAdminWithDeafServer: a lock whose holder does not answer, or stops in the
// middle, is an error that says so.
func TestAdminWithDeafServer(t *testing.T) {
	b := openTestBase(t)
	create := (&tokenCreateCmd{Data: string(b.dir)}).Run
	if _, _, err := printed(create); err == nil || !strings.Contains(err.Error(), "the data directory is in use, but its server does not answer on admin.sock") {
		t.Errorf("without a socket: %v", err)
	}
	answerAdmin(t, b, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"progress":{}}` + "\n"))
	}))
	err := withAdmin(t.Context(), string(b.dir), quiet(), func(a admin) error {
		_, err := a.MakeImage(t.Context(), imageRequest{Build: "universal"}, newProgress(&bytes.Buffer{}).step)
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "the server ended before it had answered") {
		t.Errorf("half an answer: %v", err)
	}
}

// TestSecondServerIsRefused: it says which directory, prints nothing on standard
// output, and leaves the first one's socket alone.
func TestSecondServerIsRefused(t *testing.T) {
	testenv.Root(t)
	b := openTestBase(t)
	answerAdmin(t, b, adminRoutes(&localAdmin{b}))
	second := &serveCmd{Data: string(b.dir), Listen: "127.0.0.1:0", Driver: "gvisor", LogFormat: "text", LogLevel: "error"}
	stdout, _, err := printed(second.Run)
	if !errors.Is(err, errLocked) || !strings.Contains(err.Error(), string(b.dir)) || stdout != "" {
		t.Errorf("%q, %v", stdout, err)
	}
	if _, _, err := printed((&tokenCreateCmd{Data: string(b.dir)}).Run); err != nil {
		t.Errorf("the first server, afterwards: %v", err)
	}
	// An address that is taken is told before anything is opened.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	second.Data, second.Listen = t.TempDir(), l.Addr().String()
	if _, _, err := printed(second.Run); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("%v", err)
	}
}

// TestTokensEnd: a revoked token is worth nothing at once, with a server and
// without one; a list shows no secret.
func TestTokensEnd(t *testing.T) {
	b := openTestBase(t)
	answerAdmin(t, b, adminRoutes(&localAdmin{b}))
	data := adminFlags{Data: string(b.dir), JSON: true}
	secret, _, err := printed((&tokenCreateCmd{Data: data.Data}).Run)
	if err != nil {
		t.Fatal(err)
	}
	bearer := strings.TrimSpace(secret)
	stdout, _, err := printed((&tokenLsCmd{data}).Run)
	if err != nil || strings.Contains(stdout, bearer) {
		t.Errorf("%q, %v", stdout, err)
	}
	var list []tokenInfo
	if err := json.Unmarshal([]byte(stdout), &list); err != nil || len(list) != 1 || list[0].Team != cloche.DefaultTeam {
		t.Fatalf("%+v, %v", list, err)
	}
	if _, err := b.auth.Authenticate(t.Context(), bearer); err != nil {
		t.Errorf("before: %v", err)
	}
	if _, _, err := printed((&tokenRevokeCmd{data, string(list[0].ID)}).Run); err != nil {
		t.Error(err)
	}
	if _, err := b.auth.Authenticate(t.Context(), bearer); cloche.ErrorCode(err) != cloche.CodeUnauthorized {
		t.Errorf("after: %v", err)
	}
	if _, _, err := printed((&tokenRevokeCmd{data, string(list[0].ID)}).Run); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("again: %v", err)
	}
	if _, _, err := printed((&imageRmCmd{data, "universal"}).Run); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("remove an image that is not there: %v", err)
	}
}
