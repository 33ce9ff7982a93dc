package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Image is a name for an image's content.
type Image struct {
	Name         sandbox.ImageName
	Digest       string // of the content, "sha256:…"
	Kind         string // "oci" for a plain image, "files" or "memory" for one made of a sandbox
	Size         int64  // of the artifact on a node, in bytes
	Architecture string // "amd64"
	Source       string // where it came from, without credentials
	Config       []byte // JSON, as its importer wrote it
	Snapshot     []byte // JSON: where it was made of a sandbox, and what a start of one with memory needs; nil for a plain one
	Network      *ImageNetwork
	CreatedAt    time.Time
}

// ImageNetwork is what the sandbox that an image was made of could reach then.
// It is nil for a plain image.
type ImageNetwork struct {
	Project sandbox.Project `json:"project"` // that the sandbox was in
	Rules   map[string]bool `json:"rules,omitempty"`
}

const imageColumns = `project, repo, tag, digest, kind, size, architecture, source, config, snapshot, network, created_at`

func scanImage(row scanner) (Image, error) {
	var m Image
	var network []byte
	var created int64
	err := row.Scan(&m.Name.Project, &m.Name.Repo, &m.Name.Tag, &m.Digest, &m.Kind, &m.Size, &m.Architecture, &m.Source,
		&m.Config, &m.Snapshot, &network, &created)
	if err == nil && len(network) > 0 {
		err = json.Unmarshal(network, &m.Network)
	}
	if len(m.Snapshot) == 0 {
		m.Snapshot = nil
	}
	m.CreatedAt = fromDB(created)
	return m, err
}

// PutImage gives an image's content a name, which it takes from another content
// if need be; NotFound when the project does not exist. It returns the image
// that had the name before, nil for none.
func (db *DB) PutImage(ctx context.Context, m Image) (before *Image, err error) {
	var network []byte
	if m.Network != nil {
		if network, err = json.Marshal(m.Network); err != nil {
			return nil, fmt.Errorf("record image %s: %w", m.Name, err)
		}
	}
	err = db.inTx(ctx, nil, func(tx *sql.Tx) error {
		before = nil
		old, err := getImage(ctx, tx, m.Name)
		switch {
		case err == nil:
			before = &old
		case !fault.Is(err, fault.NotFound):
			return err
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO images (`+imageColumns+`)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
			ON CONFLICT (project, repo, tag) DO UPDATE SET digest = excluded.digest, kind = excluded.kind,
			size = excluded.size, architecture = excluded.architecture, source = excluded.source,
			config = excluded.config, snapshot = excluded.snapshot, network = excluded.network, created_at = excluded.created_at`,
			m.Name.Project, m.Name.Repo, m.Name.Tag, m.Digest, m.Kind, m.Size, m.Architecture, m.Source,
			string(m.Config), string(m.Snapshot), string(network), toDB(m.CreatedAt))
		if isDangling(err) {
			return noProject(m.Name.Project)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("record image %s: %w", m.Name, err)
	}
	return before, nil
}

// GetImage returns the image of a name; NotFound when there is none.
func (db *DB) GetImage(ctx context.Context, name sandbox.ImageName) (Image, error) {
	return getImage(ctx, db.read, name)
}

func getImage(ctx context.Context, q querier, name sandbox.ImageName) (Image, error) {
	m, err := scanImage(q.QueryRowContext(ctx, `SELECT `+imageColumns+` FROM images
		WHERE project = $1 AND repo = $2 AND tag = $3`, name.Project, name.Repo, name.Tag))
	if errors.Is(err, sql.ErrNoRows) {
		return Image{}, fault.New(fault.NotFound, "there is no image %s", name)
	}
	if err != nil {
		return Image{}, fmt.Errorf("read image %s: %w", name, err)
	}
	return m, nil
}

// ListImages returns the images of the projects, or of all projects when none
// is named, by name. An image is visible from below: to list what a project
// sees, name its Lineage.
func (db *DB) ListImages(ctx context.Context, projects ...sandbox.Project) ([]Image, error) {
	w := new(conditions)
	if len(projects) > 0 {
		args := make([]any, len(projects))
		for i, p := range projects {
			args[i] = p
		}
		w.add(`project IN (?`+strings.Repeat(`, ?`, len(projects)-1)+`)`, args...)
	}
	all, err := collect(ctx, db.read, scanImage,
		`SELECT `+imageColumns+` FROM images`+w.String()+` ORDER BY project, repo, tag`, w.args...)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return all, nil
}

// DeleteImage takes a name away and returns the image that it named; NotFound
// when there is none.
func (db *DB) DeleteImage(ctx context.Context, name sandbox.ImageName) (Image, error) {
	m, err := scanImage(db.write.QueryRowContext(ctx, `DELETE FROM images WHERE project = $1 AND repo = $2 AND tag = $3
		RETURNING `+imageColumns, name.Project, name.Repo, name.Tag))
	if errors.Is(err, sql.ErrNoRows) {
		return Image{}, fault.New(fault.NotFound, "there is no image %s", name)
	}
	if err != nil {
		return Image{}, fmt.Errorf("delete image %s: %w", name, err)
	}
	return m, nil
}

// DigestUse says who needs an image's content.
type DigestUse struct {
	Names     int64 // names for it
	Sandboxes int64 // live sandboxes made of it
}

// CountDigest returns who needs the content of a digest.
func (db *DB) CountDigest(ctx context.Context, digest string) (DigestUse, error) {
	var u DigestUse
	err := db.read.QueryRowContext(ctx, `SELECT (SELECT COUNT(*) FROM images WHERE digest = $1),
		(SELECT COUNT(*) FROM sandboxes WHERE image_digest = $1 AND `+live+`)`, digest).Scan(&u.Names, &u.Sandboxes)
	if err != nil {
		return DigestUse{}, fmt.Errorf("count the users of image content %s: %w", digest, err)
	}
	return u, nil
}
