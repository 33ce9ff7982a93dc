// Package store keeps the records of an installation in one SQL database:
// sandboxes, nodes, images, projects, callers, tokens, and the audit log. It
// is SQLite on one machine and PostgreSQL for a cluster; all statements are
// here and both run the same ones. Admission is part of it, since only the
// database can make it exact. It decides nothing else: where a sandbox goes and
// who may do what is said by its callers.
//
// Times come back in UTC and are exact to the microsecond. Errors that a
// caller of the API can act on have a fault kind.
package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	"github.com/pressly/goose/v3"
	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"
)

//go:embed migrations/*.sql
var migrations embed.FS

// DB is an open database. Its methods may be called side by side.
type DB struct {
	// write has a single connection on SQLite, where writers take turns
	// anyway, and is the same pool as read on PostgreSQL.
	write *sql.DB
	read  *sql.DB
	// postgres is whether transactions need a lock to take turns.
	postgres bool
}

// Open opens the database at a URL, "sqlite:/path/to/file" or
// "postgres://user@host/name", makes it if it is a file that is not there, and
// brings its tables up to date.
func Open(ctx context.Context, address string) (*DB, error) {
	path, isFile := strings.CutPrefix(address, "sqlite:")
	switch {
	case isFile && path != "":
		return openSQLite(ctx, path)
	case strings.HasPrefix(address, "postgres://"), strings.HasPrefix(address, "postgresql://"):
		return openPostgres(ctx, address)
	}
	// Not the address itself: it may hold a password.
	scheme, _, _ := strings.Cut(address, ":")
	return nil, fmt.Errorf("database address with scheme %q: want sqlite:/path/to/file or postgres://user@host/name", scheme)
}

// Close closes the database.
func (db *DB) Close() error {
	if db.read == db.write {
		return db.write.Close()
	}
	return errors.Join(db.read.Close(), db.write.Close())
}

// Ping reports whether the database answers.
func (db *DB) Ping(ctx context.Context) error {
	if err := db.read.PingContext(ctx); err != nil {
		return fmt.Errorf("ask the database whether it lives: %w", err)
	}
	return nil
}

// readers is how many SQLite connections read side by side.
const readers = 8

func openSQLite(ctx context.Context, path string) (*DB, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("database %s: %w", path, err)
	}
	// SQLite gives its other files the mode of this one.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	// A commit survives the end of our process at once, and the end of the
	// machine from the next checkpoint on; in between the edges' journals know.
	dsn := (&url.URL{Scheme: "file", Path: path}).String() +
		"?_busy_timeout=10000&_journal_mode=WAL&_synchronous=NORMAL&_foreign_keys=1"
	write, err := sql.Open("sqlite", dsn+"&_txlock=immediate")
	if err != nil {
		return nil, fmt.Errorf("open the database %s: %w", path, err)
	}
	write.SetMaxOpenConns(1)
	read, err := sql.Open("sqlite", dsn+"&_query_only=1")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the database %s: %w", path, err), write.Close())
	}
	read.SetMaxOpenConns(readers)
	read.SetMaxIdleConns(readers)
	db := &DB{write: write, read: read}
	unlock, err := lockDir(filepath.Dir(path))
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	defer unlock()
	if err := db.migrate(ctx, goose.DialectSQLite3); err != nil {
		return nil, errors.Join(fmt.Errorf("database %s: %w", path, err), db.Close())
	}
	return db, nil
}

// lockDir keeps other programs from changing tables at the same time. It
// leaves no file.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open the database's directory: %w", err)
	}
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), f.Close())
	}
	return func() { f.Close() }, nil
}

func openPostgres(ctx context.Context, address string) (*DB, error) {
	pool, err := sql.Open("pgx", address)
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	pool.SetMaxOpenConns(16)
	pool.SetMaxIdleConns(16)
	pool.SetConnMaxIdleTime(5 * time.Minute)
	db := &DB{write: pool, read: pool, postgres: true}
	if err := db.migratePostgres(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// migratePostgres keeps other programs from changing tables at the same time:
// the lock belongs to a connection, and ends with it at the latest.
func (db *DB) migratePostgres(ctx context.Context) error {
	conn, err := db.write.Conn(ctx)
	if err != nil {
		return fmt.Errorf("connect to the database: %w", err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(ctx, `SELECT pg_advisory_lock($1)`, int64(migration)); err != nil {
		return fmt.Errorf("wait for other programs to bring the tables up to date: %w", err)
	}
	err = db.migrate(ctx, goose.DialectPostgres)
	_, uerr := conn.ExecContext(context.WithoutCancel(ctx), `SELECT pg_advisory_unlock($1)`, int64(migration))
	return errors.Join(err, uerr)
}

func (db *DB) migrate(ctx context.Context, dialect goose.Dialect) error {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return fmt.Errorf("read the migrations: %w", err)
	}
	p, err := goose.NewProvider(dialect, db.write, files)
	if err != nil {
		return fmt.Errorf("prepare the migrations: %w", err)
	}
	if _, err := p.Up(ctx); err != nil {
		return fmt.Errorf("bring the tables up to date: %w", err)
	}
	return nil
}

// The locks that are taken on PostgreSQL to have one's turn. SQLite has one
// writer at a time.
const (
	migration = 0x6f64_0000 // the tables
	admission = 0x6f64_0001 // sums over sandboxes
	identity  = 0x6f64_0002 // projects, callers, grants, tokens; taken before admission
)

// inTx runs f in one transaction. On PostgreSQL it holds the locks until the
// transaction ends; each statement sees what was committed before it.
func (db *DB) inTx(ctx context.Context, locks []int64, f func(*sql.Tx) error) error {
	tx, err := db.write.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin a transaction: %w", err)
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
	if db.postgres {
		for _, l := range locks {
			if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock($1)`, l); err != nil {
				return fmt.Errorf("wait for the transaction's turn: %w", err)
			}
		}
	}
	if err := f(tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// querier is what *sql.DB and *sql.Tx have alike.
type querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// collect runs a query and scans each of its rows.
func collect[T any](ctx context.Context, q querier, scan func(scanner) (T, error), query string, args ...any) ([]T, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var all []T
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, rows.Err()
}

// scanner is what *sql.Row and *sql.Rows have alike.
type scanner interface {
	Scan(dest ...any) error
}

// affected returns how many rows a statement changed.
func affected(res sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// toDB returns a time as it is kept.
func toDB(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// fromDB is the reverse of toDB.
func fromDB(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

// fromMicros returns a length of time that is kept in microseconds.
func fromMicros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// isDuplicate reports whether a row with the same key was there.
func isDuplicate(err error) bool {
	var pe *pgconn.PgError
	var se *sqlite.Error
	switch {
	case errors.As(err, &pe):
		return pe.Code == "23505"
	case errors.As(err, &se):
		return se.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY || se.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE
	}
	return false
}

// isDangling reports whether a row refers to one that is not there, or would
// be left so.
func isDangling(err error) bool {
	var pe *pgconn.PgError
	var se *sqlite.Error
	switch {
	case errors.As(err, &pe):
		return pe.Code == "23503"
	case errors.As(err, &se):
		return se.Code() == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY
	}
	return false
}
