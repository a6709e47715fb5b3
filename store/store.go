// Package store keeps the records of sandboxes, sessions, tokens and images in
// one SQLite file. A method that changes something has made it durable when it
// returns nil. It checks what a database can check (unique names, one live
// session for each sandbox, the table of state transitions) and decides nothing
// else. All methods may be called concurrently.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// Sealer encrypts what is stored secretly. The binding is authenticated and not
// stored: a sealed value opens only with the binding that it was sealed with,
// so that it cannot be moved to another record.
type Sealer interface {
	Seal(plain, binding []byte) ([]byte, error)
	Open(sealed, binding []byte) ([]byte, error)
}

// Store is an open database. It has one connection that writes, so that writers
// wait for each other in Go and not in SQLite, and a few that read.
type Store struct {
	write *sql.DB
	read  *sql.DB
	seal  Sealer

	// What every request of the API asks, parsed once: parsing takes as long
	// as the answer.
	sessionByID *sql.Stmt
	tokenByHash *sql.Stmt
}

// busyTimeout is how long a connection waits for another process that has the
// file, such as sqlite3 in the hands of an operator, in milliseconds.
const busyTimeout = 10_000

// Open opens the database at path, makes it if need be (mode 0600) and brings
// its schema up to date. A database of a newer version, or one whose secrets
// were sealed with another key, is an *Error that says so.
func Open(ctx context.Context, path string, seal Sealer) (*Store, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("database path: %w", err)
	}
	// SQLite gives its -wal and -shm files the mode of the database file.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("database file: %w", err)
	}
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("database file: %w", err)
	}
	s := &Store{seal: seal}
	if err := s.connect(path); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	err = migrate(ctx, s.write)
	if err == nil {
		err = s.checkKey(ctx)
	}
	if err == nil {
		err = s.prepare(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// connect opens the two pools; a connection is made when it is first used.
func (s *Store) connect(path string) (err error) {
	if s.write, err = sql.Open("sqlite", dsn(path, url.Values{
		"_txlock": {"immediate"},
		"_pragma": {"journal_mode(WAL)", "synchronous(FULL)"},
	})); err != nil {
		return fmt.Errorf("database: %w", err)
	}
	// One writer, which takes the write lock when its transaction begins: a
	// transaction that reads first and is upgraded later can fail with
	// SQLITE_BUSY at once, whatever the wait (sqlite.org/lang_transaction.html).
	s.write.SetMaxOpenConns(1)
	if s.read, err = sql.Open("sqlite", dsn(path, url.Values{
		"_pragma": {"query_only(1)"},
	})); err != nil {
		return fmt.Errorf("database: %w", err)
	}
	readers := max(4, runtime.GOMAXPROCS(0))
	s.read.SetMaxOpenConns(readers)
	// Opening one costs more than a query: none is closed for being idle.
	s.read.SetMaxIdleConns(readers)
	return nil
}

// dsn is the address of the file for the driver, with the settings that every
// connection has.
func dsn(path string, q url.Values) string {
	// The wait must be set first: setting the journal mode takes a lock.
	q["_pragma"] = append([]string{fmt.Sprintf("busy_timeout(%d)", busyTimeout), "foreign_keys(1)"}, q["_pragma"]...)
	u := url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}
	return u.String()
}

// Close closes all connections after the calls in flight. It is idempotent.
func (s *Store) Close() error {
	var errs []error
	for _, q := range []*sql.Stmt{s.sessionByID, s.tokenByHash} {
		if q != nil {
			errs = append(errs, q.Close())
		}
	}
	for _, db := range []*sql.DB{s.read, s.write} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return errors.Join(errs...)
}

// prepare parses the queries of every request.
func (s *Store) prepare(ctx context.Context) (err error) {
	if s.sessionByID, err = s.read.PrepareContext(ctx, sessionQuery); err != nil {
		return fmt.Errorf("session query: %w", err)
	}
	if s.tokenByHash, err = s.read.PrepareContext(ctx, tokenQuery); err != nil {
		return fmt.Errorf("token query: %w", err)
	}
	return nil
}

// sealCheck is the known text of seal_check.
const sealCheck = "cloche"

// checkKey seals the known text in a new database and opens it in an old one, so
// that a wrong key is found at the start and not at the first resume.
func (s *Store) checkKey(ctx context.Context) error {
	binding := []byte("seal_check")
	return s.tx(ctx, "key check", func(tx *sql.Tx) error {
		var sealed []byte
		err := tx.QueryRowContext(ctx, `SELECT sealed FROM seal_check`).Scan(&sealed)
		if errors.Is(err, sql.ErrNoRows) {
			if sealed, err = s.seal.Seal([]byte(sealCheck), binding); err != nil {
				return err
			}
			_, err = tx.ExecContext(ctx, `INSERT INTO seal_check (id, sealed) VALUES (1, ?)`, sealed)
			return err
		}
		if err != nil {
			return err
		}
		plain, err := s.seal.Open(sealed, binding)
		if err != nil || string(plain) != sealCheck {
			return &cloche.Error{
				Code:    cloche.CodeInvalid,
				Op:      "key check",
				Message: "the secrets in the database were sealed with another key; put back the key file that belongs to it",
				Err:     err,
			}
		}
		return nil
	})
}

// tx runs fn in one write transaction. It commits if fn returns nil, and only
// then. op names the step in the error.
func (s *Store) tx(ctx context.Context, op string, fn func(*sql.Tx) error) error {
	tx, err := s.write.BeginTx(ctx, nil)
	if err != nil {
		return fault(op, err)
	}
	if err := fn(tx); err != nil {
		if rerr := tx.Rollback(); rerr != nil && !errors.Is(rerr, sql.ErrTxDone) {
			err = errors.Join(err, rerr)
		}
		return fault(op, err)
	}
	failpoint.Here("store/tx/before-commit")
	if err := tx.Commit(); err != nil {
		return fault(op, err)
	}
	failpoint.Here("store/tx/after-commit")
	return nil
}

// fault turns an error of SQLite into one of the vocabulary. An *Error and the
// end of a context pass as they are.
func fault(op string, err error) error {
	var ours *cloche.Error
	var theirs *sqlite.Error
	switch {
	case err == nil || errors.As(err, &ours):
		return err
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", op, err)
	// The low byte of an extended result code is the primary one
	// (sqlite.org/rescode.html).
	case errors.As(err, &theirs) && theirs.Code()&0xff == sqlite3.SQLITE_FULL:
		return &cloche.Error{Code: cloche.CodeExhausted, Op: op, Message: "the server's disk is full", Err: err}
	case errors.As(err, &theirs) && theirs.Code()&0xff == sqlite3.SQLITE_BUSY:
		return &cloche.Error{Code: cloche.CodeUnavailable, Op: op, Message: "the server's database is locked by another process", Err: err}
	}
	return cloche.Internal(op, err)
}

// duplicate reports whether err is the violation of a unique index or key.
func duplicate(err error) bool {
	var e *sqlite.Error
	return errors.As(err, &e) &&
		(e.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE || e.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
}

// querier is what *sql.DB and *sql.Tx have in common here.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// scanner is a *sql.Row or *sql.Rows.
type scanner interface{ Scan(dest ...any) error }

// collect reads all rows of a query.
func collect[T any](rows *sql.Rows, err error, scan func(scanner) (T, error)) (all []T, _ error) {
	if err != nil {
		return nil, err
	}
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, errors.Join(err, rows.Close())
		}
		all = append(all, v)
	}
	return all, errors.Join(rows.Err(), rows.Close())
}

// instant is a time.Time as a column holds it. The zero time is 0.
type instant struct{ t *time.Time }

// Scan implements sql.Scanner.
func (i instant) Scan(v any) error {
	n, ok := v.(int64)
	if !ok {
		return fmt.Errorf("a time is stored as %T", v)
	}
	*i.t = time.Time{}
	if n != 0 {
		*i.t = time.Unix(0, n).UTC()
	}
	return nil
}

// nanos is a time as an argument of a statement.
func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
