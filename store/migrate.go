package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrate applies, each in a transaction of its own, the migrations that the
// database has not seen. Their files are numbered from 1 without gaps.
func migrate(ctx context.Context, db *sql.DB) error {
	files, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil {
		return fmt.Errorf("migrations: %w", err)
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS migration (
		version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at INTEGER NOT NULL) STRICT`); err != nil {
		return fault("migrations", err)
	}
	var have int
	if err := db.QueryRowContext(ctx, `SELECT coalesce(max(version), 0) FROM migration`).Scan(&have); err != nil {
		return fault("migrations", err)
	}
	if have > len(files) {
		return cloche.Errorf(cloche.CodeInvalid,
			"the database is of a newer version of cloche (its schema is %d, this program knows up to %d); run that version or a later one",
			have, len(files))
	}
	for i, file := range files[have:] {
		if err := apply(ctx, db, have+i+1, file); err != nil {
			return fault("migration "+path.Base(file), err)
		}
	}
	return nil
}

// apply runs one migration and notes that it did, in one transaction: a crash
// leaves all of it or nothing. A migration that has been released never changes.
func apply(ctx context.Context, db *sql.DB, version int, file string) error {
	if want := fmt.Sprintf("%04d_", version); !strings.HasPrefix(path.Base(file), want) {
		return fmt.Errorf("its name does not begin with %q", want)
	}
	text, err := migrations.ReadFile(file)
	if err != nil {
		return err
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, string(text))
	if err == nil {
		_, err = tx.ExecContext(ctx, `INSERT INTO migration (version, name, applied_at) VALUES (?, ?, ?)`,
			version, path.Base(file), time.Now().UnixNano())
	}
	if err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}
