package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cloche-dev/cloche"
)

// PutImage adds an image, or replaces the one with the same id. Several images
// may have one name: the latest is what the name means.
func (s *Store) PutImage(ctx context.Context, i cloche.Image) error {
	config, err := json.Marshal(i.Config)
	if err != nil {
		return cloche.Internal("image record", err)
	}
	return s.tx(ctx, "image record", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO image (id, name, digest, size, files, created_at, config)
			VALUES (?, ?, ?, ?, ?, ?, ?)`, i.ID, i.Name, i.Digest, i.SizeBytes, i.Files, nanos(i.CreatedAt), string(config))
		return err
	})
}

// Images returns all images, latest first.
func (s *Store) Images(ctx context.Context) ([]cloche.Image, error) {
	rows, err := s.read.QueryContext(ctx, `SELECT id, name, digest, size, files, created_at, config
		FROM image ORDER BY created_at DESC, id DESC`)
	all, err := collect(rows, err, scanImage)
	return all, fault("image list", err)
}

// scanImage reads a row of Images.
func scanImage(row scanner) (i cloche.Image, err error) {
	var config string
	if err := row.Scan(&i.ID, &i.Name, &i.Digest, &i.SizeBytes, &i.Files, instant{&i.CreatedAt}, &config); err != nil {
		return i, err
	}
	if err := json.Unmarshal([]byte(config), &i.Config); err != nil {
		return i, fmt.Errorf("record of %s: %w", i.ID, err)
	}
	return i, nil
}

// DeleteImage removes an image. One that a sandbox is made from is
// CodeConflict, none is CodeNotFound.
func (s *Store) DeleteImage(ctx context.Context, id cloche.ImageID) error {
	return s.tx(ctx, "image record", func(tx *sql.Tx) error {
		var user string
		err := tx.QueryRowContext(ctx, `SELECT name FROM sandbox WHERE image_id = ? AND deleted_at = 0 LIMIT 1`, id).Scan(&user)
		if err == nil {
			return cloche.Errorf(cloche.CodeConflict, "the image is in use by the sandbox %q; delete that first", user)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		r, err := tx.ExecContext(ctx, `DELETE FROM image WHERE id = ?`, id)
		if err != nil {
			return err
		}
		n, err := r.RowsAffected()
		if err == nil && n == 0 {
			return cloche.Errorf(cloche.CodeNotFound, "there is no image %s", id)
		}
		return err
	})
}
