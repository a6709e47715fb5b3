package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cloche-dev/cloche"
)

// sessionColumns are what sessionRow reads, of a table named s.
const sessionColumns = `s.id, s.sandbox_id, s.team, s.project, s.state, s.cause, s.image_id, s.runtime, s.user,
	s.work_dir, s.vcpus, s.memory_mib, s.timeout, s.region, s.policy, s.requested_at, s.started_at, s.updated_at,
	s.stop_requested_at, s.ended_at, s.cpu, s.duration, s.egress, s.ingress`

// sessionRow is a session with the column that needs decoding.
type sessionRow struct {
	s      cloche.Session
	policy string
}

// dest is where the columns go, in the order of sessionColumns.
func (r *sessionRow) dest() []any {
	s := &r.s
	return []any{&s.ID, &s.SandboxID, &s.Team, &s.Project, &s.State, &s.Cause, &s.ImageID, &s.Runtime, &s.User,
		&s.WorkDir, &s.VCPUs, &s.MemoryMiB, &s.Timeout, &s.Region, &r.policy, instant{&s.RequestedAt},
		instant{&s.StartedAt}, instant{&s.UpdatedAt}, instant{&s.StopRequestedAt}, instant{&s.EndedAt},
		&s.Usage.ActiveCPU, &s.Usage.Duration, &s.Usage.EgressBytes, &s.Usage.IngressBytes}
}

func (r *sessionRow) decode() (cloche.Session, error) {
	if err := json.Unmarshal([]byte(r.policy), &r.s.Policy); err != nil {
		return cloche.Session{}, fmt.Errorf("record of %s: policy: %w", r.s.ID, err)
	}
	return r.s, nil
}

func scanSession(row scanner) (cloche.Session, error) {
	var r sessionRow
	if err := row.Scan(r.dest()...); err != nil {
		return cloche.Session{}, err
	}
	return r.decode()
}

// insertSession adds a session. A sandbox that has a live one already makes it
// fail as a duplicate (index session_live).
func insertSession(ctx context.Context, tx *sql.Tx, s *cloche.Session) error {
	policy, err := json.Marshal(s.Policy)
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO session (id, sandbox_id, team, project, state, cause, image_id, runtime,
		user, work_dir, vcpus, memory_mib, timeout, region, policy, requested_at, started_at, updated_at,
		stop_requested_at, ended_at, cpu, duration, egress, ingress)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
		s.ID, s.SandboxID, s.Team, s.Project, s.State, s.Cause, s.ImageID, s.Runtime, s.User, s.WorkDir,
		s.VCPUs, s.MemoryMiB, int64(s.Timeout), s.Region, string(policy), nanos(s.RequestedAt), nanos(s.StartedAt),
		nanos(s.UpdatedAt), nanos(s.StopRequestedAt), nanos(s.EndedAt), int64(s.Usage.ActiveCPU),
		int64(s.Usage.Duration), s.Usage.EgressBytes, s.Usage.IngressBytes)
	return err
}

// AddSession adds a session and makes it its sandbox's latest, provided that
// prev still is that and has ended; else it is CodeConflict.
func (s *Store) AddSession(ctx context.Context, next cloche.Session, prev cloche.SessionID) error {
	return s.tx(ctx, "session record", func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `UPDATE sandbox SET session_id = ?, state_at = ?
			WHERE id = ? AND session_id = ? AND deleted_at = 0`, next.ID, nanos(next.StateAt()), next.SandboxID, prev)
		if err != nil {
			return err
		}
		n, err := r.RowsAffected()
		if err != nil {
			return err
		}
		if n == 0 {
			return s.superseded(ctx, tx, next.SandboxID)
		}
		err = insertSession(ctx, tx, &next)
		if duplicate(err) {
			return cloche.Errorf(cloche.CodeConflict, "the sandbox has a session that has not ended")
		}
		return err
	})
}

func noSession(id cloche.SessionID) error {
	return cloche.Errorf(cloche.CodeNotFound, "there is no session %s", id)
}

const sessionQuery = `SELECT ` + sessionColumns + `
	FROM session s JOIN sandbox b ON b.id = s.sandbox_id WHERE s.id = ? AND b.deleted_at = 0`

// Session returns a session of a sandbox that was not deleted. None is
// CodeNotFound.
func (s *Store) Session(ctx context.Context, id cloche.SessionID) (cloche.Session, error) {
	v, err := scanSession(s.sessionByID.QueryRowContext(ctx, id))
	if errors.Is(err, sql.ErrNoRows) {
		return v, noSession(id)
	}
	return v, fault("session record", err)
}

// listSessions is the name of the list in cursors.
const listSessions = "sessions"

// Sessions returns one page of a project's sessions and the cursor of the next
// page, "" after the last. Those of deleted sandboxes are not in it.
func (s *Store) Sessions(ctx context.Context, team, project string, l cloche.ListSessions) ([]cloche.Session, string, error) {
	k, err := newKeyset(l.Page, listSessions, "s.requested_at", "s.id")
	if err != nil {
		return nil, "", err
	}
	where, args := `b.deleted_at = 0 AND s.team = ? AND s.project = ?`, []any{team, project}
	if l.Sandbox != "" {
		where, args = where+` AND b.name = ?`, append(args, l.Sandbox)
	}
	rows, err := s.read.QueryContext(ctx, `SELECT `+sessionColumns+` FROM session s JOIN sandbox b ON b.id = s.sandbox_id
		WHERE `+where+k.where+k.order, append(args, k.args...)...)
	all, err := collect(rows, err, scanSession)
	if err != nil {
		return nil, "", fault("session list", err)
	}
	return page(all, k, func(v cloche.Session) cursor {
		return cursor{List: listSessions, Ascending: l.Ascending, Time: nanos(v.RequestedAt), ID: string(v.ID)}
	})
}

// UpdateSession applies change in one transaction. A state that may not follow
// the present one is CodeConflict. A session that becomes final adds its usage
// to its sandbox's total.
func (s *Store) UpdateSession(ctx context.Context, id cloche.SessionID, change func(*cloche.Session) error) (v cloche.Session, err error) {
	err = s.tx(ctx, "session record", func(tx *sql.Tx) error {
		old, err := scanSession(tx.QueryRowContext(ctx, `SELECT `+sessionColumns+` FROM session s WHERE s.id = ?`, id))
		if errors.Is(err, sql.ErrNoRows) {
			return noSession(id)
		}
		if err != nil {
			return err
		}
		v = old
		if err := change(&v); err != nil {
			return err
		}
		if v.State != old.State {
			if _, err := old.State.To(v.State); err != nil {
				return err
			}
		}
		if _, err := tx.ExecContext(ctx, `UPDATE session SET state = ?, cause = ?, timeout = ?, started_at = ?,
			updated_at = ?, stop_requested_at = ?, ended_at = ?, cpu = ?, duration = ?, egress = ?, ingress = ?
			WHERE id = ?`, v.State, v.Cause, int64(v.Timeout), nanos(v.StartedAt), nanos(v.UpdatedAt),
			nanos(v.StopRequestedAt), nanos(v.EndedAt), int64(v.Usage.ActiveCPU), int64(v.Usage.Duration),
			v.Usage.EgressBytes, v.Usage.IngressBytes, id); err != nil {
			return err
		}
		return account(ctx, tx, &old, &v)
	})
	return v, err
}

// account brings what the sandbox's record says of its sessions up to date.
func account(ctx context.Context, tx *sql.Tx, old, v *cloche.Session) error {
	if _, err := tx.ExecContext(ctx, `UPDATE sandbox SET state_at = ? WHERE id = ? AND session_id = ?`,
		nanos(v.StateAt()), v.SandboxID, v.ID); err != nil {
		return err
	}
	if old.State.Final() || !v.State.Final() {
		return nil
	}
	_, err := tx.ExecContext(ctx, `UPDATE sandbox SET total_cpu = total_cpu + ?, total_duration = total_duration + ?,
		total_egress = total_egress + ?, total_ingress = total_ingress + ? WHERE id = ?`,
		int64(v.Usage.ActiveCPU), int64(v.Usage.Duration), v.Usage.EgressBytes, v.Usage.IngressBytes, v.SandboxID)
	return err
}

// LiveSessions returns every session that is not final, oldest first, also
// those of deleted sandboxes.
func (s *Store) LiveSessions(ctx context.Context) ([]cloche.Session, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+sessionColumns+` FROM session s
		WHERE s.state NOT IN ('stopped', 'failed', 'aborted') ORDER BY s.requested_at, s.id`)
	all, err := collect(rows, err, scanSession)
	return all, fault("live sessions", err)
}
