package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Quota limits what the sandboxes of a project, and of those below it, use
// together. nil means no limit.
type Quota struct {
	Sandboxes *int64
	CPU       *float64 // cores
	MemoryMB  *int64   // MiB
}

// Project groups sandboxes and images.
type Project struct {
	Path      sandbox.Project
	Quota     Quota
	CreatedAt time.Time
}

const projectColumns = `path, quota_sandboxes, quota_cpu, quota_memory_mb, created_at`

func scanProject(row scanner) (Project, error) {
	var p Project
	var created int64
	err := row.Scan(&p.Path, &p.Quota.Sandboxes, &p.Quota.CPU, &p.Quota.MemoryMB, &created)
	p.CreatedAt = fromDB(created)
	return p, err
}

func noProject(path sandbox.Project) error {
	e := fault.New(fault.NotFound, "there is no project %s", path)
	e.Field = "project"
	return e
}

// GetProject returns a project; NotFound when it does not exist.
func (db *DB) GetProject(ctx context.Context, path sandbox.Project) (Project, error) {
	return getProject(ctx, db.read, path)
}

// GetProject is DB.GetProject as the transaction sees it.
func (c *Change) GetProject(ctx context.Context, path sandbox.Project) (Project, error) {
	return getProject(ctx, c.tx, path)
}

func getProject(ctx context.Context, q querier, path sandbox.Project) (Project, error) {
	p, err := scanProject(q.QueryRowContext(ctx, `SELECT `+projectColumns+` FROM projects WHERE path = $1`, path))
	if errors.Is(err, sql.ErrNoRows) {
		return Project{}, noProject(path)
	}
	if err != nil {
		return Project{}, fmt.Errorf("read project %s: %w", path, err)
	}
	return p, nil
}

// lineage returns a project and all above it, itself first; NotFound when it
// does not exist.
func lineage(ctx context.Context, q querier, path sandbox.Project) ([]Project, error) {
	paths := path.Lineage()
	if len(paths) == 0 {
		return nil, noProject(path)
	}
	args := make([]any, len(paths))
	for i, p := range paths {
		args[i] = p
	}
	w := new(conditions)
	w.add(`path IN (?`+strings.Repeat(`, ?`, len(paths)-1)+`)`, args...)
	all, err := collect(ctx, q, scanProject, `SELECT `+projectColumns+` FROM projects`+w.String(), w.args...)
	if err != nil {
		return nil, fmt.Errorf("read project %s and those above it: %w", path, err)
	}
	slices.SortFunc(all, func(a, b Project) int { return len(b.Path) - len(a.Path) })
	if len(all) == 0 || all[0].Path != path {
		return nil, noProject(path)
	}
	return all, nil
}

// ListProjects returns all projects by path.
func (db *DB) ListProjects(ctx context.Context) ([]Project, error) {
	all, err := collect(ctx, db.read, scanProject, `SELECT `+projectColumns+` FROM projects`)
	if err != nil {
		return nil, fmt.Errorf("list projects: %w", err)
	}
	slices.SortFunc(all, func(a, b Project) int { return strings.Compare(string(a.Path), string(b.Path)) })
	return all, nil
}

// CreateProject makes a project; AlreadyExists when it is there, NotFound when
// the one above it is not.
func (c *Change) CreateProject(ctx context.Context, p Project) error {
	if parent := p.Path.Parent(); parent != "" {
		if _, err := getProject(ctx, c.tx, parent); err != nil {
			return err
		}
	}
	_, err := c.tx.ExecContext(ctx, `INSERT INTO projects (`+projectColumns+`) VALUES ($1, $2, $3, $4, $5)`,
		p.Path, p.Quota.Sandboxes, p.Quota.CPU, p.Quota.MemoryMB, toDB(p.CreatedAt))
	if isDuplicate(err) {
		return fault.New(fault.AlreadyExists, "there is a project %s already", p.Path)
	}
	if err != nil {
		return fmt.Errorf("record project %s: %w", p.Path, err)
	}
	return nil
}

// SetQuota replaces a project's quota and returns the project; NotFound when
// it does not exist. What runs already goes on.
func (c *Change) SetQuota(ctx context.Context, path sandbox.Project, q Quota) (Project, error) {
	n, err := affected(c.tx.ExecContext(ctx, `UPDATE projects SET quota_sandboxes = $1, quota_cpu = $2, quota_memory_mb = $3
		WHERE path = $4`, q.Sandboxes, q.CPU, q.MemoryMB, path))
	if err != nil {
		return Project{}, fmt.Errorf("set the quota of project %s: %w", path, err)
	}
	if n == 0 {
		return Project{}, noProject(path)
	}
	return getProject(ctx, c.tx, path)
}

// ProjectUse says what is in a project.
type ProjectUse struct {
	Projects  int64 // below it
	Sandboxes int64 // live ones of its own
	Images    int64 // of its own
}

// CountProject returns what is in a project.
func (db *DB) CountProject(ctx context.Context, path sandbox.Project) (ProjectUse, error) {
	return countProject(ctx, db.read, path)
}

func countProject(ctx context.Context, q querier, path sandbox.Project) (ProjectUse, error) {
	var u ProjectUse
	prefix := string(path) + "/"
	err := q.QueryRowContext(ctx, `SELECT (SELECT COUNT(*) FROM projects WHERE substr(path, 1, $1) = $2),
		(SELECT COUNT(*) FROM sandboxes WHERE project = $3 AND `+live+`),
		(SELECT COUNT(*) FROM images WHERE project = $3)`, len(prefix), prefix, path).Scan(&u.Projects, &u.Sandboxes, &u.Images)
	if err != nil {
		return ProjectUse{}, fmt.Errorf("count what is in project %s: %w", path, err)
	}
	return u, nil
}

// DeleteProject deletes a project with the rights on it and the records of its
// ended sandboxes; NotFound when it does not exist, WrongState when it has live
// sandboxes, images or projects below it.
func (c *Change) DeleteProject(ctx context.Context, path sandbox.Project) error {
	if _, err := getProject(ctx, c.tx, path); err != nil {
		return err
	}
	u, err := countProject(ctx, c.tx, path)
	if err != nil {
		return err
	}
	if u != (ProjectUse{}) {
		return fault.New(fault.WrongState, "project %s has %d projects below it, %d sandboxes and %d images; delete those first",
			path, u.Projects, u.Sandboxes, u.Images)
	}
	for _, q := range []string{
		`DELETE FROM sandboxes WHERE project = $1`,
		`DELETE FROM idempotency WHERE project = $1`,
		`DELETE FROM projects WHERE path = $1`,
	} {
		_, err := c.tx.ExecContext(ctx, q, path)
		if isDangling(err) {
			return fault.New(fault.WrongState, "project %s has just got a new image; delete that first", path)
		}
		if err != nil {
			return fmt.Errorf("delete project %s: %w", path, err)
		}
	}
	return nil
}
