package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/cloche-dev/cloche"
)

const tokenColumns = `id, team, project, hash, created_at`

// scanToken reads a row of tokenColumns.
func scanToken(row scanner) (t cloche.Token, err error) {
	var hash []byte
	if err := row.Scan(&t.ID, &t.Team, &t.Project, &hash, instant{&t.CreatedAt}); err != nil {
		return t, err
	}
	if copy(t.Hash[:], hash) != len(t.Hash) || len(hash) != len(t.Hash) {
		return t, fmt.Errorf("record of %s: a hash of %d bytes", t.ID, len(hash))
	}
	return t, nil
}

// PutToken adds a token.
func (s *Store) PutToken(ctx context.Context, t cloche.Token) error {
	return s.tx(ctx, "token record", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO token (`+tokenColumns+`) VALUES (?, ?, ?, ?, ?)`,
			t.ID, t.Team, t.Project, t.Hash[:], nanos(t.CreatedAt))
		return err
	})
}

const tokenQuery = `SELECT ` + tokenColumns + ` FROM token WHERE hash = ?`

// TokenByHash returns the token whose secret has that hash. None is
// CodeNotFound.
func (s *Store) TokenByHash(ctx context.Context, hash [32]byte) (cloche.Token, error) {
	t, err := scanToken(s.tokenByHash.QueryRowContext(ctx, hash[:]))
	if errors.Is(err, sql.ErrNoRows) {
		return t, cloche.Errorf(cloche.CodeNotFound, "there is no such token")
	}
	return t, fault("token record", err)
}

// Tokens returns all tokens, oldest first.
func (s *Store) Tokens(ctx context.Context) ([]cloche.Token, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT `+tokenColumns+` FROM token ORDER BY created_at, id`)
	all, err := collect(rows, err, scanToken)
	return all, fault("token list", err)
}

// DeleteToken removes a token, which ends its use at once. None is
// CodeNotFound.
func (s *Store) DeleteToken(ctx context.Context, id cloche.TokenID) error {
	return s.tx(ctx, "token record", func(tx *sql.Tx) error {
		r, err := tx.ExecContext(ctx, `DELETE FROM token WHERE id = ?`, id)
		if err != nil {
			return err
		}
		n, err := r.RowsAffected()
		if err == nil && n == 0 {
			return cloche.Errorf(cloche.CodeNotFound, "there is no token %s", id)
		}
		return err
	})
}
