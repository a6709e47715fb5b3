package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/cloche-dev/cloche"
)

// sandboxColumns are what sandboxRow reads, of a table named b. The env is not
// one of them: lists leave it out, which leaves its pages unread.
const sandboxColumns = `b.id, b.team, b.project, b.name, b.persistent, b.image, b.image_id, b.runtime, b.user,
	b.work_dir, b.vcpus, b.memory_mib, b.timeout, b.ports, b.region, b.policy, b.session_id, b.created_at,
	b.updated_at, b.total_cpu, b.total_duration, b.total_egress, b.total_ingress,
	(SELECT json_group_object(key, value) FROM tag WHERE sandbox_id = b.id)`

// sandboxRow is a sandbox with the columns that need decoding.
type sandboxRow struct {
	b                   cloche.Sandbox
	ports, policy, tags string
	env                 []byte
}

// dest is where the columns go, in the order of sandboxColumns.
func (r *sandboxRow) dest() []any {
	b := &r.b
	return []any{&b.ID, &b.Team, &b.Project, &b.Name, &b.Persistent, &b.Image, &b.ImageID, &b.Runtime, &b.User,
		&b.WorkDir, &b.VCPUs, &b.MemoryMiB, &b.Timeout, &r.ports, &b.Region, &r.policy, &b.SessionID,
		instant{&b.CreatedAt}, instant{&b.UpdatedAt}, &b.Total.ActiveCPU, &b.Total.Duration,
		&b.Total.EgressBytes, &b.Total.IngressBytes, &r.tags}
}

// decode completes the sandbox. seal may be nil if the env was not read.
func (r *sandboxRow) decode(seal Sealer) (cloche.Sandbox, error) {
	b := &r.b
	err := errors.Join(
		json.Unmarshal([]byte(r.ports), &b.Ports),
		json.Unmarshal([]byte(r.policy), &b.Policy),
		json.Unmarshal([]byte(r.tags), &b.Tags))
	if len(b.Tags) == 0 {
		b.Tags = nil
	}
	if err == nil && r.env != nil {
		var plain []byte
		if plain, err = seal.Open(r.env, envBinding(b.ID)); err == nil {
			err = json.Unmarshal(plain, &b.Env)
		}
	}
	if err != nil {
		return cloche.Sandbox{}, fmt.Errorf("record of %s: %w", b.ID, err)
	}
	return *b, nil
}

// envBinding ties a sealed environment to its sandbox.
func envBinding(id cloche.SandboxID) []byte { return []byte("sandbox env " + id) }

// sealEnv returns nil for an empty environment.
func (s *Store) sealEnv(b *cloche.Sandbox) ([]byte, error) {
	if len(b.Env) == 0 {
		return nil, nil
	}
	plain, err := json.Marshal(b.Env)
	if err != nil {
		return nil, fmt.Errorf("env: %w", err)
	}
	return s.seal.Seal(plain, envBinding(b.ID))
}

// CreateSandbox adds a sandbox and its first session. A name that is taken in
// the project is CodeConflict.
func (s *Store) CreateSandbox(ctx context.Context, b cloche.Sandbox, first cloche.Session) error {
	env, err := s.sealEnv(&b)
	if err != nil {
		return cloche.Internal("sandbox record", err)
	}
	ports, policy, err := encodeSettings(&b)
	if err != nil {
		return cloche.Internal("sandbox record", err)
	}
	return s.tx(ctx, "sandbox record", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO sandbox (id, team, project, name, persistent, image, image_id,
			runtime, user, work_dir, vcpus, memory_mib, timeout, ports, env, region, policy, session_id,
			created_at, updated_at, state_at, total_cpu, total_duration, total_egress, total_ingress)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0)`,
			b.ID, b.Team, b.Project, b.Name, b.Persistent, b.Image, b.ImageID, b.Runtime, b.User, b.WorkDir,
			b.VCPUs, b.MemoryMiB, int64(b.Timeout), ports, env, b.Region, policy, first.ID,
			nanos(b.CreatedAt), nanos(b.UpdatedAt), nanos(first.StateAt()))
		if duplicate(err) {
			return cloche.Errorf(cloche.CodeConflict, "there is a sandbox named %q already; choose another name or use that one", b.Name)
		}
		if err != nil {
			return err
		}
		if err := putTags(ctx, tx, &b); err != nil {
			return err
		}
		return insertSession(ctx, tx, &first)
	})
}

// encodeSettings returns the columns ports and policy.
func encodeSettings(b *cloche.Sandbox) (ports, policy string, err error) {
	list := b.Ports
	if list == nil {
		list = []int{}
	}
	p, err := json.Marshal(list)
	if err != nil {
		return "", "", fmt.Errorf("ports: %w", err)
	}
	q, err := json.Marshal(b.Policy)
	if err != nil {
		return "", "", fmt.Errorf("policy: %w", err)
	}
	return string(p), string(q), nil
}

// putTags adds the tags of a sandbox that has none in the table.
func putTags(ctx context.Context, tx *sql.Tx, b *cloche.Sandbox) error {
	for k, v := range b.Tags {
		if _, err := tx.ExecContext(ctx, `INSERT INTO tag (sandbox_id, key, value) VALUES (?, ?, ?)`, b.ID, k, v); err != nil {
			return err
		}
	}
	return nil
}

// Sandbox returns the sandbox of that name. None is CodeNotFound.
func (s *Store) Sandbox(ctx context.Context, team, project, name string) (cloche.Sandbox, error) {
	b, err := s.sandbox(ctx, s.read, `b.team = ? AND b.project = ? AND b.name = ?`, team, project, name)
	if errors.Is(err, sql.ErrNoRows) {
		return b, cloche.Errorf(cloche.CodeNotFound, "there is no sandbox named %q in this project", name)
	}
	return b, fault("sandbox record", err)
}

// SandboxByID returns the sandbox with that id. None is CodeNotFound.
func (s *Store) SandboxByID(ctx context.Context, id cloche.SandboxID) (cloche.Sandbox, error) {
	b, err := s.sandbox(ctx, s.read, `b.id = ?`, id)
	if errors.Is(err, sql.ErrNoRows) {
		return b, noSandbox(id)
	}
	return b, fault("sandbox record", err)
}

func noSandbox(id cloche.SandboxID) error {
	return cloche.Errorf(cloche.CodeNotFound, "there is no sandbox %s", id)
}

// sandbox reads one sandbox that is not deleted, with its Env. None is
// sql.ErrNoRows, which only the caller can put into words.
func (s *Store) sandbox(ctx context.Context, q querier, where string, args ...any) (cloche.Sandbox, error) {
	var r sandboxRow
	row := q.QueryRowContext(ctx, `SELECT `+sandboxColumns+`, b.env FROM sandbox b WHERE b.deleted_at = 0 AND `+where, args...)
	if err := row.Scan(append(r.dest(), &r.env)...); err != nil {
		return cloche.Sandbox{}, err
	}
	return r.decode(s.seal)
}

// Sandboxes returns one page of a project's sandboxes, without their Env, each
// with its latest session, and the cursor of the next page, "" after the last.
func (s *Store) Sandboxes(ctx context.Context, team, project string, l cloche.ListSandboxes) ([]cloche.SandboxView, string, error) {
	column, key := "", func(v cloche.SandboxView) (c cursor) { return c }
	switch l.Sort {
	case "", cloche.SortCreatedAt:
		l.Sort, column = cloche.SortCreatedAt, "b.created_at"
		key = func(v cloche.SandboxView) cursor { return cursor{Time: nanos(v.Sandbox.CreatedAt)} }
	case cloche.SortName:
		column = "b.name"
		key = func(v cloche.SandboxView) cursor { return cursor{Name: v.Sandbox.Name} }
	case cloche.SortStatusUpdatedAt:
		column = "b.state_at"
		key = func(v cloche.SandboxView) cursor { return cursor{Time: nanos(v.Session.StateAt())} }
	default:
		return nil, "", cloche.Errorf(cloche.CodeInvalid, "sandboxes are sorted by %s, %s or %s",
			cloche.SortCreatedAt, cloche.SortName, cloche.SortStatusUpdatedAt)
	}
	k, err := newKeyset(l.Page, string(l.Sort), column, "b.id")
	if err != nil {
		return nil, "", err
	}
	where, args := `b.deleted_at = 0 AND b.team = ? AND b.project = ?`, []any{team, project}
	if l.NamePrefix != "" {
		// Every character of a name is below DEL.
		where, args = where+` AND b.name >= ? AND b.name < ?`, append(args, l.NamePrefix, l.NamePrefix+"\x7f")
	}
	if l.TagKey != "" {
		where += ` AND EXISTS (SELECT 1 FROM tag WHERE sandbox_id = b.id AND key = ? AND value = ?)`
		args = append(args, l.TagKey, l.TagValue)
	}
	rows, err := s.read.QueryContext(ctx, `SELECT `+sandboxColumns+`, `+sessionColumns+`
		FROM sandbox b JOIN session s ON s.id = b.session_id WHERE `+where+k.where+k.order, append(args, k.args...)...)
	views, err := collect(rows, err, scanView)
	if err != nil {
		return nil, "", fault("sandbox list", err)
	}
	return page(views, k, func(v cloche.SandboxView) cursor {
		c := key(v)
		c.List, c.Ascending, c.ID = string(l.Sort), l.Ascending, string(v.Sandbox.ID)
		return c
	})
}

// scanView reads a row of sandboxColumns and sessionColumns.
func scanView(row scanner) (v cloche.SandboxView, err error) {
	var b sandboxRow
	var s sessionRow
	if err = row.Scan(append(b.dest(), s.dest()...)...); err != nil {
		return v, err
	}
	if v.Sandbox, err = b.decode(nil); err != nil {
		return v, err
	}
	v.Session, err = s.decode()
	return v, err
}

// UpdateSandbox applies change to the record in one transaction. What makes the
// sandbox what it is (ids, name, creation, latest session, totals) is not
// written.
func (s *Store) UpdateSandbox(ctx context.Context, id cloche.SandboxID, change func(*cloche.Sandbox) error) (b cloche.Sandbox, err error) {
	err = s.tx(ctx, "sandbox record", func(tx *sql.Tx) error {
		b, err = s.sandbox(ctx, tx, `b.id = ?`, id)
		if errors.Is(err, sql.ErrNoRows) {
			return noSandbox(id)
		}
		if err != nil {
			return err
		}
		tags := maps.Clone(b.Tags)
		if err := change(&b); err != nil {
			return err
		}
		env, err := s.sealEnv(&b)
		if err != nil {
			return err
		}
		ports, policy, err := encodeSettings(&b)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE sandbox SET persistent = ?, image = ?, image_id = ?, runtime = ?,
			user = ?, work_dir = ?, vcpus = ?, memory_mib = ?, timeout = ?, ports = ?, env = ?, region = ?,
			policy = ?, updated_at = ? WHERE id = ?`, b.Persistent, b.Image, b.ImageID, b.Runtime, b.User, b.WorkDir,
			b.VCPUs, b.MemoryMiB, int64(b.Timeout), ports, env, b.Region, policy, nanos(b.UpdatedAt), id); err != nil {
			return err
		}
		if maps.Equal(tags, b.Tags) {
			return nil
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM tag WHERE sandbox_id = ?`, id); err != nil {
			return err
		}
		return putTags(ctx, tx, &b)
	})
	return b, err
}

// DeleteSandbox removes the sandbox if latest is still its latest session, and
// else is CodeConflict. The name is free at once, the secrets are erased, the
// sessions stay for accounting.
func (s *Store) DeleteSandbox(ctx context.Context, id cloche.SandboxID, latest cloche.SessionID) error {
	return s.tx(ctx, "sandbox record", func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `UPDATE sandbox SET deleted_at = ?, env = NULL
			WHERE id = ? AND session_id = ? AND deleted_at = 0`, time.Now().UnixNano(), id, latest)
		if err != nil {
			return err
		}
		n, err := r.RowsAffected()
		if err != nil {
			return err
		}
		if n == 0 {
			return s.superseded(ctx, tx, id)
		}
		_, err = tx.ExecContext(ctx, `DELETE FROM tag WHERE sandbox_id = ?`, id)
		return err
	})
}

// superseded is the error of a change that expected another latest session.
func (s *Store) superseded(ctx context.Context, tx *sql.Tx, id cloche.SandboxID) error {
	if _, err := s.sandbox(ctx, tx, `b.id = ?`, id); err != nil {
		if errors.Is(err, sql.ErrNoRows) {
			return noSandbox(id)
		}
		return err
	}
	return cloche.Errorf(cloche.CodeConflict, "the sandbox has a newer session")
}
