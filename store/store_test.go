package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cloche-dev/cloche"
)

// xor is a Sealer that hides a text from a search in the file and notices a
// wrong key or binding. It protects nothing.
type xor byte

func (x xor) sum(plain, binding []byte) []byte {
	h := sha256.Sum256(append(append([]byte{byte(x)}, binding...), plain...))
	return h[:]
}

func (x xor) flip(b []byte) []byte {
	out := make([]byte, len(b))
	for i := range b {
		out[i] = b[i] ^ byte(x)
	}
	return out
}

func (x xor) Seal(plain, binding []byte) ([]byte, error) {
	return append(x.sum(plain, binding), x.flip(plain)...), nil
}

func (x xor) Open(sealed, binding []byte) ([]byte, error) {
	if len(sealed) < sha256.Size {
		return nil, errors.New("short")
	}
	plain := x.flip(sealed[sha256.Size:])
	if !bytes.Equal(sealed[:sha256.Size], x.sum(plain, binding)) {
		return nil, errors.New("not authentic")
	}
	return plain, nil
}

func open(t testing.TB, path string) *Store {
	t.Helper()
	s, err := Open(context.Background(), path, xor(0x5a))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func fresh(t testing.TB) *Store {
	t.Helper()
	return open(t, filepath.Join(t.TempDir(), "cloche.db"))
}

// sample returns a sandbox with every field set, and its pending session.
func sample(project, name string) (cloche.Sandbox, cloche.Session) {
	now := time.Unix(1_700_000_000, 123456789).UTC()
	b := cloche.Sandbox{
		ID: cloche.NewSandboxID(), Team: "team", Project: project, Name: name,
		Persistent: true, Image: "universal@sha256:00", ImageID: cloche.NewImageID(), Runtime: "node24",
		User: "ubuntu", WorkDir: "/vercel/sandbox", VCPUs: 2, MemoryMiB: 4096, Timeout: 5 * time.Minute,
		Ports: []int{3000, 8080}, Env: map[string]string{"KEY": "a <secret> \"value\""},
		Tags: map[string]string{"env": "prod", `q"uote`: "é<>&\\"}, Region: "iad1",
		Policy:    cloche.Policy{Mode: cloche.DenyAll},
		SessionID: cloche.NewSessionID(), CreatedAt: now, UpdatedAt: now.Add(time.Second),
	}
	s := cloche.Session{
		ID: b.SessionID, SandboxID: b.ID, Team: b.Team, Project: b.Project, State: cloche.Pending, Cause: "none",
		ImageID: b.ImageID, Runtime: b.Runtime, User: b.User, WorkDir: b.WorkDir, VCPUs: 2, MemoryMiB: 4096,
		Timeout: b.Timeout, Region: b.Region, Policy: b.Policy, RequestedAt: now, UpdatedAt: now,
	}
	return b, s
}

func create(t testing.TB, s *Store, project, name string) (cloche.Sandbox, cloche.Session) {
	t.Helper()
	b, first := sample(project, name)
	if err := s.CreateSandbox(context.Background(), b, first); err != nil {
		t.Fatal(err)
	}
	return b, first
}

// become takes a session through states.
func become(t testing.TB, s *Store, id cloche.SessionID, states ...cloche.SessionState) cloche.Session {
	t.Helper()
	var v cloche.Session
	for _, state := range states {
		var err error
		v, err = s.UpdateSession(context.Background(), id, func(v *cloche.Session) error {
			v.State = state
			if state.Final() {
				v.Usage = cloche.Usage{ActiveCPU: 1, Duration: 2, EgressBytes: 3, IngressBytes: 4}
			}
			return nil
		})
		if err != nil {
			t.Fatalf("become %s: %v", state, err)
		}
	}
	return v
}

func wantCode(t testing.TB, err error, want cloche.Code) {
	t.Helper()
	if got := cloche.ErrorCode(err); got != want {
		t.Errorf("error %v has code %q, want %q", err, got, want)
	}
}

func TestRecordsComeBackWhole(t *testing.T) {
	s := fresh(t)
	b, first := create(t, s, "p", "box")
	got, err := s.Sandbox(t.Context(), "team", "p", "box")
	if err != nil || !cmp.Equal(got, b) {
		t.Errorf("Sandbox: %v\n%s", err, cmp.Diff(b, got))
	}
	if got, err = s.SandboxByID(t.Context(), b.ID); err != nil || !cmp.Equal(got, b) {
		t.Errorf("SandboxByID: %v\n%s", err, cmp.Diff(b, got))
	}
	session, err := s.Session(t.Context(), first.ID)
	if err != nil || !cmp.Equal(session, first) {
		t.Errorf("Session: %v\n%s", err, cmp.Diff(first, session))
	}
	views, next, err := s.Sandboxes(t.Context(), "team", "p", cloche.ListSandboxes{})
	b.Env = nil
	if want := []cloche.SandboxView{{Sandbox: b, Session: first}}; err != nil || next != "" || !cmp.Equal(views, want) {
		t.Errorf("Sandboxes: next %q, %v\n%s", next, err, cmp.Diff(want, views))
	}
}

func TestUpdateSandboxWritesSettings(t *testing.T) {
	s := fresh(t)
	b, _ := create(t, s, "p", "box")
	changed, err := s.UpdateSandbox(t.Context(), b.ID, func(b *cloche.Sandbox) error {
		b.VCPUs, b.MemoryMiB, b.Timeout, b.Ports = 4, 8192, time.Hour, nil
		b.Tags, b.Region, b.Env = map[string]string{"other": "tag"}, "sfo1", nil
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	changed.Ports = []int{}
	if got, err := s.SandboxByID(t.Context(), b.ID); err != nil || !cmp.Equal(got, changed) {
		t.Errorf("after the update: %v\n%s", err, cmp.Diff(changed, got))
	}
	refusal := cloche.Errorf(cloche.CodeInvalid, "no")
	if _, err := s.UpdateSandbox(t.Context(), b.ID, func(b *cloche.Sandbox) error { b.VCPUs = 1; return refusal }); !errors.Is(err, refusal) {
		t.Errorf("a refused change: %v", err)
	}
	if got, err := s.SandboxByID(t.Context(), b.ID); err != nil || got.VCPUs != 4 {
		t.Errorf("a refused change was written: %d vCPUs, %v", got.VCPUs, err)
	}
}

func TestNameIsUniqueInProjectAndFreeAfterDelete(t *testing.T) {
	s := fresh(t)
	b, first := create(t, s, "p", "box")
	create(t, s, "other", "box")
	again, session := sample("p", "box")
	wantCode(t, s.CreateSandbox(t.Context(), again, session), cloche.CodeConflict)
	wantCode(t, s.DeleteSandbox(t.Context(), b.ID, cloche.NewSessionID()), cloche.CodeConflict)
	if err := s.DeleteSandbox(t.Context(), b.ID, first.ID); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.DeleteSandbox(t.Context(), b.ID, first.ID), cloche.CodeNotFound)
	_, err := s.SandboxByID(t.Context(), b.ID)
	wantCode(t, err, cloche.CodeNotFound)
	_, err = s.Session(t.Context(), first.ID)
	wantCode(t, err, cloche.CodeNotFound)
	if err := s.CreateSandbox(t.Context(), again, session); err != nil {
		t.Errorf("the name of a deleted sandbox: %v", err)
	}
	// The deleted sandbox's session is still there for recovery.
	live, err := s.LiveSessions(t.Context())
	if err != nil || len(live) != 3 {
		t.Errorf("live sessions: %d, %v", len(live), err)
	}
	become(t, s, first.ID, cloche.Failed)
	all, _, err := s.Sessions(t.Context(), "team", "p", cloche.ListSessions{})
	if err != nil || len(all) != 1 || all[0].ID != session.ID {
		t.Errorf("sessions of the project: %v, %v", all, err)
	}
}

func TestAddSessionComparesAndSwaps(t *testing.T) {
	s := fresh(t)
	b, first := create(t, s, "p", "box")
	_, next := sample("p", "box")
	next.ID, next.SandboxID = cloche.NewSessionID(), b.ID
	wantCode(t, s.AddSession(t.Context(), next, cloche.NewSessionID()), cloche.CodeConflict)
	wantCode(t, s.AddSession(t.Context(), next, first.ID), cloche.CodeConflict) // first is live
	become(t, s, first.ID, cloche.Running, cloche.Stopping, cloche.Stopped)
	const racers = 8
	var wg sync.WaitGroup
	errs := make([]error, racers)
	for i := range racers {
		n := next
		n.ID = cloche.NewSessionID()
		wg.Go(func() { errs[i] = s.AddSession(context.Background(), n, first.ID) })
	}
	wg.Wait()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
		} else {
			wantCode(t, err, cloche.CodeConflict)
		}
	}
	if won != 1 {
		t.Errorf("%d of %d racers added a session", won, racers)
	}
	next.SandboxID = cloche.NewSandboxID()
	wantCode(t, s.AddSession(t.Context(), next, first.ID), cloche.CodeNotFound)
}

func TestStateTableHoldsInTheStore(t *testing.T) {
	s := fresh(t)
	_, first := create(t, s, "p", "box")
	become(t, s, first.ID, cloche.Running, cloche.Stopping, cloche.Stopped)
	_, err := s.UpdateSession(t.Context(), first.ID, func(v *cloche.Session) error { v.State = cloche.Running; return nil })
	wantCode(t, err, cloche.CodeConflict)
	if v, err := s.Session(t.Context(), first.ID); err != nil || v.State != cloche.Stopped {
		t.Errorf("state %s, %v", v.State, err)
	}
}

func TestUsageIsAddedOnce(t *testing.T) {
	s := fresh(t)
	b, first := create(t, s, "p", "box")
	become(t, s, first.ID, cloche.Running, cloche.Stopping, cloche.Stopped, cloche.Stopped)
	_, next := sample("p", "box")
	next.ID, next.SandboxID = cloche.NewSessionID(), b.ID
	if err := s.AddSession(t.Context(), next, first.ID); err != nil {
		t.Fatal(err)
	}
	become(t, s, next.ID, cloche.Running, cloche.Aborted)
	got, err := s.SandboxByID(t.Context(), b.ID)
	want := cloche.Usage{ActiveCPU: 2, Duration: 4, EgressBytes: 6, IngressBytes: 8}
	if err != nil || got.Total != want || got.SessionID != next.ID {
		t.Errorf("total %+v, want %+v; latest %s; %v", got.Total, want, got.SessionID, err)
	}
}

func TestEnvIsSealedAtRest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a ?#%name.db")
	s := open(t, path)
	b, first := create(t, s, "p", "box")
	other, session := sample("p", "other")
	other.Env = nil
	if err := s.CreateSandbox(t.Context(), other, session); err != nil {
		t.Fatal(err)
	}
	for _, suffix := range []string{"", "-wal"} {
		raw, err := os.ReadFile(path + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(raw, []byte("secret")) {
			t.Errorf("the file %q has the secret in clear", "db"+suffix)
		}
		if info, err := os.Stat(path + suffix); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode of %q: %v, %v", "db"+suffix, info.Mode(), err)
		}
	}
	// A sealed value does not open in another record.
	if _, err := s.write.ExecContext(t.Context(), `UPDATE sandbox SET env = (SELECT env FROM sandbox WHERE id = ?) WHERE id = ?`, b.ID, other.ID); err != nil {
		t.Fatal(err)
	}
	_, err := s.SandboxByID(t.Context(), other.ID)
	wantCode(t, err, cloche.CodeInternal)
	if err := s.DeleteSandbox(t.Context(), b.ID, first.ID); err != nil {
		t.Fatal(err)
	}
	var left int
	if err := s.read.QueryRowContext(t.Context(), `SELECT count(*) FROM sandbox WHERE id = ? AND env IS NOT NULL`, b.ID).Scan(&left); err != nil || left != 0 {
		t.Errorf("a deleted sandbox keeps its env: %d, %v", left, err)
	}
}

func TestOpenRefusesAnotherKeyAndANewerVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cloche.db")
	s := open(t, path)
	create(t, s, "p", "box")
	if again := open(t, path); again != nil {
		if _, err := again.Sandbox(t.Context(), "team", "p", "box"); err != nil {
			t.Errorf("reopened: %v", err)
		}
	}
	_, err := Open(t.Context(), path, xor(0x33))
	if wantCode(t, err, cloche.CodeInvalid); err == nil || !strings.Contains(err.Error(), "another key") {
		t.Errorf("another key: %v", err)
	}
	if _, err := s.write.ExecContext(t.Context(), `INSERT INTO migration (version, name, applied_at) VALUES (999, 'x', 0)`); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), path, xor(0x5a))
	if wantCode(t, err, cloche.CodeInvalid); err == nil || !strings.Contains(err.Error(), "newer version of cloche") {
		t.Errorf("a newer version: %v", err)
	}
}

func TestOpenReportsAFileThatIsNoDatabase(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cloche.db")
	if err := os.WriteFile(path, bytes.Repeat([]byte("not a database "), 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path, xor(1)); err == nil {
		t.Error("Open took it")
	}
}

func TestConnectionsAreAsPromised(t *testing.T) {
	s := fresh(t)
	for query, want := range map[string]string{
		"PRAGMA journal_mode": "wal", "PRAGMA synchronous": "2", "PRAGMA foreign_keys": "1", "PRAGMA busy_timeout": fmt.Sprint(busyTimeout),
	} {
		var got string
		if err := s.write.QueryRowContext(t.Context(), query).Scan(&got); err != nil || got != want {
			t.Errorf("%s = %s, want %s; %v", query, got, want, err)
		}
	}
	if _, err := s.read.ExecContext(t.Context(), `DELETE FROM token`); err == nil {
		t.Error("a reader wrote")
	}
}

func TestWritersAndReadersAtOnce(t *testing.T) {
	s := fresh(t)
	b, first := create(t, s, "p", "box")
	var wg sync.WaitGroup
	const writers, each = 4, 10
	for range writers {
		wg.Go(func() {
			for range each {
				if _, err := s.UpdateSandbox(context.Background(), b.ID, func(b *cloche.Sandbox) error { b.VCPUs++; return nil }); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range each {
				if _, err := s.Session(context.Background(), first.ID); err != nil {
					t.Error(err)
				}
				if _, _, err := s.Sandboxes(context.Background(), "team", "p", cloche.ListSandboxes{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got, err := s.SandboxByID(t.Context(), b.ID); err != nil || got.VCPUs != b.VCPUs+writers*each {
		t.Errorf("%d updates are left of %d; %v", got.VCPUs-b.VCPUs, writers*each, err)
	}
}

func TestTokens(t *testing.T) {
	s := fresh(t)
	tok := cloche.Token{ID: cloche.NewTokenID(), Team: "t", Project: "p", Hash: sha256.Sum256([]byte("x")), CreatedAt: time.Unix(5, 0).UTC()}
	if err := s.PutToken(t.Context(), tok); err != nil {
		t.Fatal(err)
	}
	if got, err := s.TokenByHash(t.Context(), tok.Hash); err != nil || got != tok {
		t.Errorf("TokenByHash = %+v, %v", got, err)
	}
	if all, err := s.Tokens(t.Context()); err != nil || len(all) != 1 || all[0] != tok {
		t.Errorf("Tokens = %+v, %v", all, err)
	}
	if err := s.DeleteToken(t.Context(), tok.ID); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.DeleteToken(t.Context(), tok.ID), cloche.CodeNotFound)
	_, err := s.TokenByHash(t.Context(), tok.Hash)
	wantCode(t, err, cloche.CodeNotFound)
}

func TestImages(t *testing.T) {
	s := fresh(t)
	b, first := sample("p", "box")
	i := cloche.Image{
		ID: b.ImageID, Name: "universal", Digest: "sha256:00", SizeBytes: 5 << 30, Files: 7, CreatedAt: time.Unix(5, 6).UTC(),
		Config: cloche.ImageConfig{User: "u", WorkDir: "/w", Env: map[string]string{"A": "b"}, Runtimes: map[string]cloche.Runtime{"node24": {Path: "/r", User: "v"}}},
	}
	newer := cloche.Image{ID: cloche.NewImageID(), Name: "debian:13", CreatedAt: time.Unix(6, 0).UTC()}
	for _, v := range []cloche.Image{i, newer, i} {
		if err := s.PutImage(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	if all, err := s.Images(t.Context()); err != nil || !cmp.Equal(all, []cloche.Image{newer, i}) {
		t.Errorf("Images: %v\n%s", err, cmp.Diff([]cloche.Image{newer, i}, all))
	}
	if err := s.CreateSandbox(t.Context(), b, first); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.DeleteImage(t.Context(), i.ID), cloche.CodeConflict)
	if err := s.DeleteSandbox(t.Context(), b.ID, first.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteImage(t.Context(), i.ID); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.DeleteImage(t.Context(), i.ID), cloche.CodeNotFound)
}
